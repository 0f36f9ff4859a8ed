"""Primitives that compute each element from the elements at the same place: padding stays where it is."""

from __future__ import annotations

from dataclasses import replace

from jax.extend.core import JaxprEqn

from isthmus._runtime.padding.interpreter import Interpreter, out_shape, rule
from isthmus._runtime.padding.layout import UNIFORM, PaddedArray
from isthmus._runtime.padding.sizes import Refused, is_symbolic

_NAMES = """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge
gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul
mulhi ne neg nextafter not or polygamma population_count pow random_gamma_grad real reduce_precision
regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
sinh sqrt square stop_gradient sub tan tanh xor zeta"""

# Zero from zeros: the padding of such a result is zero wherever that of all its operands is.
_FROM_ZERO = """abs add add_any and asin asinh atan atanh ceil conj convert_element_type copy copy_p erf expm1
floor imag integer_pow log1p max min mul neg or real reduce_precision round select_n sign sin sinh sqrt square
stop_gradient sub tan tanh xor"""
ELEMENTWISE, KEEPS_ZERO = _NAMES.split(), set(_FROM_ZERO.split())


@rule(*ELEMENTWISE)
def elementwise(run: Interpreter, eqn: JaxprEqn, *operands: PaddedArray) -> PaddedArray:
    """Bring the operands into one layout and apply the primitive; scalar operands (of clamp, select_n) stay scalars."""
    shape, name = out_shape(eqn), eqn.primitive.name
    whole = [_repeated(x, shape) for x in operands if len(x.shape) == len(shape)]
    joined = run.join(whole)
    left = iter(joined)
    arrays = [next(left).array if len(x.shape) == len(shape) else x.array for x in operands]
    cases = joined[1:] if name == "select_n" and len(joined) == len(operands) else joined
    zero = frozenset.intersection(*[x.zero for x in cases]) if name in KEEPS_ZERO else frozenset()
    if name == "integer_pow" and eqn.params["y"] <= 0:
        zero = frozenset()
    return PaddedArray(eqn.primitive.bind(*arrays, **eqn.params), shape, joined[0].axes, zero)


def _repeated(x: PaddedArray, shape: tuple[object, ...]) -> PaddedArray:
    """Return an operand whose axes of length 1 stand for a longer one as uniform along them."""
    once = [not is_symbolic(n) and n == 1 and m != 1 for n, m in zip(x.shape, shape, strict=True)]
    axes = [UNIFORM if repeat else axis for repeat, axis in zip(once, x.axes, strict=True)]
    return replace(x, shape=shape, axes=tuple(axes))


@rule("bitcast_convert_type")
def bitcast(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> PaddedArray:
    """Read bits as another dtype of the same width; another width adds or removes an axis."""
    if x.array.dtype.itemsize != eqn.params["new_dtype"].itemsize:
        raise Refused("bitcast_convert_type", "to another width")
    return replace(x, array=eqn.primitive.bind(x.array, **eqn.params))


@rule("optimization_barrier")
def optimization_barrier(run: Interpreter, eqn: JaxprEqn, *operands: PaddedArray) -> list[PaddedArray]:
    """Keep XLA from moving computations across."""
    arrays = eqn.primitive.bind(*[x.array for x in operands], **eqn.params)
    return [replace(x, array=array) for x, array in zip(operands, arrays, strict=True)]
