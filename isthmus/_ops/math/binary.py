"""Elementwise ops of two or three operands, each a tensor or a number."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten, prims
from isthmus._graph.private import Op
from isthmus._ops.common import (
    ALWAYS_BOOL,
    FLOATING,
    INT_TO_FLOAT,
    NO_OPMATH,
    REAL,
    Array,
    ArrayFunction,
    Number,
    Operand,
    Scalar,
    cast,
    divide,
    is_bool,
    promote,
)
from isthmus._ops.elementwise import elementwise
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported

Function = Callable[[Array, Array], Array]
Alpha = Scalar
"""Scales the second operand, but takes no part in promotion."""


def _combined(function: Function, self: Operand, other: Operand, alpha: Alpha = 1) -> Array:
    """Return ``function(self, other * alpha)`` in the dtype that the operands promote to."""
    compute, result = promote(self, other)
    a, b = cast(self, compute), cast(other, compute)
    if not (isinstance(alpha, int) and alpha == 1):
        b = b * cast(alpha, compute)
    return cast(function(a, b), result)


@lowering(aten.add.Tensor, aten.add.Scalar)
def add(self: Operand, other: Operand, alpha: Alpha = 1) -> Array:
    """``self + other * alpha``; the sum of bools is whether either holds."""
    return _combined(_by_kind(jnp.logical_or, jnp.add), self, other, alpha)


@lowering(aten.sub.Tensor, aten.sub.Scalar)
def sub(self: Operand, other: Operand, alpha: Alpha = 1) -> Array:
    """``self - other * alpha``."""
    if is_bool(self) or is_bool(other):
        raise Unsupported("a difference of bools, which torch refuses as well")
    return _combined(jnp.subtract, self, other, alpha)


@lowering(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(self: Operand, other: Operand, alpha: Alpha = 1) -> Array:
    """``other - self * alpha``."""
    return sub(other, self, alpha)


def _by_kind(of_bools: Function, of_numbers: Function) -> Function:
    return lambda a, b: of_bools(a, b) if a.dtype == jnp.bool_ else of_numbers(a, b)


def _floor_divide(a: Array, b: Array) -> Array:
    if jnp.issubdtype(a.dtype, jnp.integer):
        return jnp.floor_divide(a, b)
    return _python_floor_divide(a, b)


def _python_floor_divide(a: Array, b: Array) -> Array:
    """Divide and round down as Python does, from the exact remainder."""
    remainder = jax.lax.rem(a, b)
    quotient = (a - remainder) / b
    quotient = jnp.where((remainder != 0) & ((b < 0) != (remainder < 0)), quotient - 1, quotient)
    down = jnp.floor(quotient)
    # The quotient was divided after a subtraction and may be an ulp below the whole number it stands for.
    rounded = jnp.where(quotient - down > 0.5, down + 1, down)
    # Python's rule, which torch follows: a zero quotient has the sign of the true one.
    signed_zero = jnp.copysign(jnp.zeros_like(a), a / b)
    result = jnp.where(quotient == 0, signed_zero, rounded)
    return jnp.where(b == 0, a / b, result)


def _trunc_divide(a: Array, b: Array) -> Array:
    if jnp.issubdtype(a.dtype, jnp.integer):
        return jax.lax.div(a, b)
    # XLA's float32 division on a GPU may miss by an ulp, which truncation makes a 1; in float64 it cannot.
    return jnp.trunc((a.astype(jnp.float64) / b.astype(jnp.float64)).astype(a.dtype))


def _remainder(a: Array, b: Array) -> Array:
    if jnp.issubdtype(a.dtype, jnp.integer):
        return jnp.remainder(a, b)
    remainder = jax.lax.rem(a, b)
    return jnp.where((remainder != 0) & ((b < 0) != (remainder < 0)), remainder + b, remainder)


def _pow(a: Array, b: Array) -> Array:
    if jnp.issubdtype(a.dtype, jnp.integer):
        return _integer_pow(a, b)
    out = jnp.power(a, b)
    if not jnp.iscomplexobj(a):
        return out
    # The logarithm of a complex zero is of no use, and that of an infinite number loses its parts.
    out = jnp.where((a == 0) & (b.real > 0), 0, out)
    return out if b.ndim else jnp.where(b == 2, a * a, jnp.where(b == 3, a * a * a, out))


def _integer_pow(a: Array, b: Array) -> Array:
    """Raise integers with wrap-around; a negative exponent leaves 1 and -1 and turns the rest to 0."""
    if not jnp.issubdtype(b.dtype, jnp.signedinteger):
        return _repeated_squares(a, b)
    power = _repeated_squares(a, jnp.abs(b).astype(f"uint{8 * b.dtype.itemsize}"))
    odd = (b & 1) == 1
    inverse = jnp.where(a == 1, 1, jnp.where(a == -1, jnp.where(odd, -1, 1), 0)).astype(a.dtype)
    return jnp.where(b < 0, inverse, power)


def _repeated_squares(a: Array, b: Array) -> Array:
    """Raise integers to unsigned powers; ``jnp.power`` looks at the six lowest bits of an exponent alone."""

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        product, square, left = state
        for _ in range(8):  # at once, so that a small exponent takes one round
            product = jnp.where(left & 1 == 1, product * square, product)
            square, left = square * square, left >> 1
        return product, square, left

    a, b = jnp.broadcast_arrays(a, b)
    return jax.lax.while_loop(lambda state: jnp.any(state[2] != 0), step, (jnp.ones_like(a), a, b))[0]


def _clamp(x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    if low is not None:
        x = jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


def logaddexp(a: Array, b: Array) -> Array:
    """The logarithm of a sum of exponentials; of complex ones about the larger real part, torch's branch."""
    if not jnp.iscomplexobj(a):
        return jnp.logaddexp(a, b)
    a, b = jnp.broadcast_arrays(a, b)
    ordered = a.real < b.real
    low, high = jnp.where(ordered, a, b), jnp.where(ordered, b, a)
    lost = jnp.isneginf(low.real - high.real)  # whatever the angle, which may be infinite
    out = jnp.where(lost, high, jnp.log1p(jnp.exp(low - high)) + high)
    both = jnp.isinf(low.real) & (low.real == high.real)
    at_infinity = jnp.where(low.real < 0, low, jnp.log(jnp.exp(low) + jnp.exp(high)))
    nan = jnp.full_like(out, complex(math.nan, math.nan))
    return jnp.where(jnp.isnan(a) | jnp.isnan(b), nan, jnp.where(both, at_infinity, out))


Table = dict[tuple[Op, ...], ArrayFunction]
SAME_DTYPE: Table = {
    (aten.mul.Tensor, aten.mul.Scalar): _by_kind(jnp.logical_and, jnp.multiply),
    (aten.bitwise_and.Tensor, aten.bitwise_and.Scalar): jnp.bitwise_and,
    (aten.bitwise_or.Tensor, aten.bitwise_or.Scalar): jnp.bitwise_or,
    (aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar): jnp.bitwise_xor,
    (aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar): _pow,
    (aten.gcd.default,): jnp.gcd,
    (aten.lcm.default,): jnp.lcm,
}
# JAX orders complex numbers, which torch refuses to.
ORDERED: Table = {
    (aten.fmax.default,): jnp.fmax,
    (aten.fmin.default,): jnp.fmin,
    (aten.maximum.default,): _by_kind(jnp.logical_or, jnp.maximum),
    (aten.minimum.default,): _by_kind(jnp.logical_and, jnp.minimum),
    (aten.clamp.default, aten.clamp.Tensor): _clamp,
    (aten.clamp_min.default, aten.clamp_min.Tensor): jnp.maximum,
    (aten.clamp_max.default, aten.clamp_max.Tensor): jnp.minimum,
}
for _ops, _fn in SAME_DTYPE.items():
    elementwise(*_ops)(_fn)
for _ops, _fn in ORDERED.items():
    elementwise(*_ops, dtypes=REAL)(_fn)
elementwise(aten.hypot.default, dtypes=FLOATING)(jnp.hypot)
elementwise(aten.nextafter.default, dtypes=FLOATING)(jnp.nextafter)
elementwise(aten.div.Tensor, aten.div.Scalar, promote_as=INT_TO_FLOAT)(divide)
elementwise(aten.copysign.Tensor, aten.copysign.Scalar, promote_as=INT_TO_FLOAT)(jnp.copysign)
elementwise(aten.logaddexp.default, promote_as=INT_TO_FLOAT)(logaddexp)
elementwise(aten.logaddexp2.default, promote_as=INT_TO_FLOAT, dtypes=FLOATING)(jnp.logaddexp2)
elementwise(aten.atan2.default, promote_as=INT_TO_FLOAT, dtypes=FLOATING)(jnp.arctan2)
elementwise(aten.eq.Tensor, aten.eq.Scalar, promote_as=ALWAYS_BOOL)(jnp.equal)
elementwise(aten.ne.Tensor, aten.ne.Scalar, promote_as=ALWAYS_BOOL)(jnp.not_equal)
elementwise(aten.lt.Tensor, aten.lt.Scalar, promote_as=ALWAYS_BOOL, dtypes=REAL)(jnp.less)
elementwise(aten.le.Tensor, aten.le.Scalar, promote_as=ALWAYS_BOOL, dtypes=REAL)(jnp.less_equal)
elementwise(aten.gt.Tensor, aten.gt.Scalar, promote_as=ALWAYS_BOOL, dtypes=REAL)(jnp.greater)
elementwise(aten.ge.Tensor, aten.ge.Scalar, promote_as=ALWAYS_BOOL, dtypes=REAL)(jnp.greater_equal)
elementwise(aten.logical_and.default, promote_as=ALWAYS_BOOL)(jnp.logical_and)
elementwise(aten.logical_or.default, promote_as=ALWAYS_BOOL)(jnp.logical_or)
elementwise(aten.logical_xor.default, promote_as=ALWAYS_BOOL)(jnp.logical_xor)


def _divisor(other: Operand, b: Array) -> Array:
    """Raise what torch's CPU raises for integers divided by zero; return divisors that XLA can divide by."""
    if not jnp.issubdtype(b.dtype, jnp.integer):
        return b
    # A constant of the graph that is not zero needs no check in the program.
    number = other.value if isinstance(other, Number) else other
    traced = isinstance(number, jax.core.Tracer)
    if not traced and jnp.ndim(number) == 0 and bool(np.asarray(number) != 0):
        return b
    # A number of the call is looked at before the program runs: _device/checks/scalar_checks.py.
    if not (traced and isinstance(other, Number)):
        require(b != 0, RuntimeError, "ZeroDivisionError")
    # XLA answers with some number at run time, but where it folds constants it divides itself, and a zero ends the
    # process (SIGFPE; jaxlib 0.10.2).
    return jnp.where(b == 0, jnp.ones((), b.dtype), b)


def _division(function: Function, self: Operand, other: Operand) -> Array:
    """Divide and round; integers have no quotient by zero."""
    compute, result = promote(self, other)
    a, b = jnp.broadcast_arrays(cast(self, compute), cast(other, compute))
    return cast(function(a, _divisor(other, b)), result)


for _ops, _fn in {
    (aten.floor_divide.default,): _floor_divide,
    (aten.fmod.Tensor, aten.fmod.Scalar): jax.lax.rem,
    (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor): _remainder,
}.items():
    lowering(*_ops)(functools.partial(_division, _fn))


@lowering(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(self: Array, other: Operand, rounding_mode: str | None) -> Array:
    """Divide, and round the quotient down (``floor``) or towards zero (``trunc``) where asked."""
    if rounding_mode is not None:
        return _division({"trunc": _trunc_divide, "floor": _floor_divide}[rounding_mode], self, other)
    compute, result = promote(self, other, kind=INT_TO_FLOAT)
    return cast(divide(*jnp.broadcast_arrays(cast(self, compute), cast(other, compute))), result)


@lowering(aten.where.self)
def where(condition: Array, self: Operand, other: Operand) -> Array:
    """``self`` where the condition holds, ``other`` elsewhere."""
    _, result = promote(self, other, kind=NO_OPMATH)
    return jnp.where(condition != 0, cast(self, result), cast(other, result))


@lowering(prims.where.default)
def prims_where(pred: Array, a: Operand, b: Operand) -> Array:
    """Return the elements of ``a`` where a condition holds, those of ``b`` elsewhere; one may be a number."""
    _, dtype = promote(a, b)
    return jnp.where(pred, cast(a, dtype), cast(b, dtype))


@lowering(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(self: Array, mask: Array, value: Operand) -> Array:
    """``value``, a number or a 0-dim tensor, where the mask holds."""
    return jnp.where(mask, cast(value, self.dtype), self)


def _scaled(function: Function, self: Array, tensor1: Array, tensor2: Array, value: Scalar = 1) -> Array:
    """``self + value * function(tensor1, tensor2)``."""
    compute, result = promote(self, tensor1, tensor2)
    a, b, c, scale = (cast(x, compute) for x in (self, tensor1, tensor2, value))
    return cast(a + scale * function(b, c), result)


lowering(aten.addcmul.default)(functools.partial(_scaled, jnp.multiply))
lowering(aten.addcdiv.default)(functools.partial(_scaled, jnp.true_divide))


@lowering(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(self: Array, end: Array, weight: Operand) -> Array:
    """Interpolate from whichever end is nearer, as torch does, so that weight 1 gives ``end`` exactly."""
    compute, result = promote(self, end)
    if jnp.issubdtype(result, jnp.integer):
        raise Unsupported("integers, which torch refuses as well")
    a, b, w = cast(self, compute), cast(end, compute), cast(weight, compute)
    near = jnp.abs(w) < 0.5
    return cast(jnp.where(near, a + w * (b - a), b - (b - a) * (1 - w)), result)
