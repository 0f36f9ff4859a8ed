"""Special functions, and elementwise ops with a rule of their own for zero, nan or infinity."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp

from isthmus._graph.names import aten
from isthmus._graph.private import Op
from isthmus._ops.common import FLOATING, INT_TO_FLOAT, NO_OPMATH, REAL, Array, Ints, cast, promote, wrap_dims
from isthmus._ops.elementwise import elementwise
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported


def _times_log(x: Array, y: Array, log: Callable[[Array], Array]) -> Array:
    """x * log(y), 0 where x is 0 unless y is nan."""
    product = jnp.where(x == 0, jnp.zeros((), x.dtype), x * log(y))
    return jnp.where(jnp.isnan(y), jnp.full((), jnp.nan, x.dtype), product)


@elementwise(
    aten.xlogy.Tensor,
    aten.xlogy.Scalar_Other,
    aten.xlogy.Scalar_Self,
    promote_as=INT_TO_FLOAT,
    dtypes=FLOATING,
)
def _xlogy(x: Array, y: Array) -> Array:
    return _times_log(x, y, jnp.log)


@elementwise(
    aten.special_xlog1py.default,
    aten.special_xlog1py.other_scalar,
    aten.special_xlog1py.self_scalar,
    promote_as=INT_TO_FLOAT,
)
def _xlog1py(x: Array, y: Array) -> Array:
    return _times_log(x, y, jnp.log1p)


@elementwise(aten.special_entr.default, promote_as=INT_TO_FLOAT)
def _entr(x: Array) -> Array:
    """-x * log(x), 0 at 0 and -inf below."""
    inside = jnp.where(x > 0, -x * jnp.log(x), jnp.where(x == 0, 0.0, -jnp.inf).astype(x.dtype))
    return jnp.where(jnp.isnan(x), x, inside)


_BESSEL_AND_NORMAL: dict[Op, Callable[[Array], Array]] = {
    aten.i0.default: jsp.i0,
    aten.special_i0e.default: jsp.i0e,
    aten.special_i1.default: jsp.i1,
    aten.special_i1e.default: jsp.i1e,
    aten.special_ndtri.default: jsp.ndtri,
    aten.special_log_ndtr.default: jsp.log_ndtr,
}
for _op, _fn in _BESSEL_AND_NORMAL.items():
    elementwise(_op, promote_as=INT_TO_FLOAT, dtypes=FLOATING)(_fn)


@elementwise(aten.logit.default, promote_as=INT_TO_FLOAT, dtypes=FLOATING)
def _logit(x: Array, eps: float | None = None) -> Array:
    """log(x / (1 - x)), of x pushed ``eps`` away from 0 and 1."""
    if eps is not None:
        # The lower bound first: torch's order where eps is over one half.
        x = jnp.where(x < eps, eps, jnp.where(x > 1 - eps, 1 - eps, x))
    return jnp.log(x / (1 - x))


@lowering(aten.heaviside.default, dtypes=REAL)
def heaviside(self: Array, values: Array) -> Array:
    """0 below zero, 1 above it, ``values`` at it; nan counts as below."""
    return jnp.where(self == 0, values, cast(self > 0, self.dtype))


@lowering(aten.nan_to_num.default)
def nan_to_num(
    self: Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Array:
    """Numbers in place of nan and the infinities."""
    if jnp.iscomplexobj(self):
        parts = [nan_to_num(part, nan, posinf, neginf) for part in (self.real, self.imag)]
        return jax.lax.complex(*parts)
    if not jnp.issubdtype(self.dtype, jnp.floating):
        return self
    limits = jnp.finfo(self.dtype)
    return jnp.nan_to_num(
        self,
        nan=0.0 if nan is None else nan,
        posinf=limits.max if posinf is None else posinf,
        neginf=limits.min if neginf is None else neginf,
    )


@lowering(aten.round.decimals)
def round_decimals(self: Array, decimals: int) -> Array:
    """Rounded to a number of decimals, halves to even."""
    if not jnp.issubdtype(self.dtype, jnp.floating):
        raise Unsupported("rounding integers to decimals")
    compute, result = promote(self)
    # Always a positive power: 10 ** -2 is not exact, 10 ** 2 is.
    x, ten = cast(self, compute), jnp.asarray(10.0 ** abs(decimals), compute)
    return cast(jnp.round(x * ten) / ten if decimals >= 0 else jnp.round(x / ten) * ten, result)


@lowering(aten.frexp.Tensor)
def frexp(self: Array) -> tuple[Array, Array]:
    """Mantissa in [0.5, 1) and exponent."""
    compute, result = promote(self)
    mantissa, exponent = jnp.frexp(cast(self, compute))
    return cast(mantissa, result), exponent.astype(jnp.int32)


def _shifted(x: Array, by: Array, left: bool) -> Array:
    """Shift, and empty the number where the width is out of range."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise Unsupported("shifts are of integers")
    # A shift by the width or more is undefined in C; torch defines it, and so empties the number.
    bits = x.dtype.itemsize * 8
    fits = (by >= 0) & (by < bits)
    width = jnp.where(fits, by, 0).astype(x.dtype)
    if left:
        return jnp.where(fits, jnp.left_shift(x, width), jnp.zeros((), x.dtype))
    signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
    emptied = jnp.where(x < 0, -1, 0).astype(x.dtype) if signed else jnp.zeros_like(x)
    return jnp.where(fits, jnp.right_shift(x, width), emptied)


for _shift, _operator, _left in (
    (aten.bitwise_left_shift, aten.__lshift__, True),
    (aten.bitwise_right_shift, aten.__rshift__, False),
):
    _ops = (_shift.Tensor, _shift.Tensor_Scalar, _shift.Scalar_Tensor, _operator.Tensor, _operator.Scalar)
    elementwise(*_ops, promote_as=NO_OPMATH)(functools.partial(_shifted, left=_left))


@lowering(aten.hash_tensor.default)
def hash_tensor(self: Array, dim: Ints = (), keepdim: bool = False, mode: int = 0) -> Array:
    """The exclusive or along dims of the elements' 64 bits, as an integer or a double."""
    if mode != 0 or jnp.iscomplexobj(self):
        raise Unsupported("a hash torch refuses as well")
    if jnp.issubdtype(self.dtype, jnp.floating):
        # torch hashes the bits of the double that a float converts to.
        words = jax.lax.bitcast_convert_type(self.astype(jnp.float64), jnp.uint64)
    else:
        words = cast(self, jnp.int64).astype(jnp.uint64)
    dims = wrap_dims(dim, self.ndim)
    hashes = jax.lax.reduce(words, jnp.zeros((), jnp.uint64), jax.lax.bitwise_xor, dims)
    return jnp.expand_dims(hashes, dims) if keepdim else hashes
