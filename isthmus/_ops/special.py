"""Special functions, and elementwise ops with a rule of their own for zero, nan or infinity."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import INT_TO_FLOAT, NO_OPMATH, cast, elementwise, promote
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported

Array = Any


def _real(x: Array) -> Array:
    if jnp.iscomplexobj(x):
        raise Unsupported("special functions of complex numbers")
    return x


def _xlogy(x: Array, y: Array) -> Array:
    """x * log(y), 0 where x is 0 unless y is nan."""
    product = jnp.where(x == 0, jnp.zeros((), x.dtype), x * jnp.log(y))
    return jnp.where(jnp.isnan(y), jnp.full((), jnp.nan, x.dtype), product)


def _xlog1py(x: Array, y: Array) -> Array:
    """x * log(1 + y), 0 where x is 0 unless y is nan."""
    product = jnp.where(x == 0, jnp.zeros((), x.dtype), x * jnp.log1p(y))
    return jnp.where(jnp.isnan(y), jnp.full((), jnp.nan, x.dtype), product)


def _zeta(x: Array, q: Array) -> Array:
    """The Hurwitz zeta function with torch's values where it has poles or is not defined."""
    x, q = jnp.broadcast_arrays(x, q)
    infinite = (x == 1) | ((q <= 0) & (q == jnp.floor(q)))
    undefined = (x < 1) | ((q <= 0) & (x != jnp.floor(x)) & ~infinite)
    defined = ~(infinite | undefined)

    def terms_left(state: tuple[Array, Array]) -> Array:
        return jnp.any(defined & (state[1] <= 0))

    def add_term(state: tuple[Array, Array]) -> tuple[Array, Array]:
        total, at = state
        left = defined & (at <= 0)
        return total + jnp.where(left, jnp.power(at, -x), 0), jnp.where(left, at + 1, at)

    # JAX's series starts at a positive q; the terms before it are added one by one, as torch does.
    total, positive = jax.lax.while_loop(terms_left, add_term, (jnp.zeros_like(q), q))
    poles = jnp.where(infinite, jnp.full((), jnp.inf, x.dtype), total + jsp.zeta(x, positive))
    return jnp.where(undefined, jnp.full((), jnp.nan, x.dtype), poles)


def _entr(x: Array) -> Array:
    """-x * log(x), 0 at 0 and -inf below."""
    inside = jnp.where(x > 0, -x * jnp.log(x), jnp.where(x == 0, 0.0, -jnp.inf).astype(x.dtype))
    return jnp.where(jnp.isnan(x), x, inside)


_FLOATING: dict[Any, Any] = {
    aten.i0.default: lambda x: jsp.i0(_real(x)),
    aten.special_i0e.default: lambda x: jsp.i0e(_real(x)),
    aten.special_i1.default: lambda x: jsp.i1(_real(x)),
    aten.special_i1e.default: lambda x: jsp.i1e(_real(x)),
    aten.special_ndtri.default: lambda x: jsp.ndtri(_real(x)),
    aten.special_log_ndtr.default: lambda x: jsp.log_ndtr(_real(x)),
    aten.special_entr.default: _entr,
    aten.xlogy.Tensor: _xlogy,
    aten.xlogy.Scalar_Other: _xlogy,
    aten.xlogy.Scalar_Self: _xlogy,
    aten.special_xlog1py.default: _xlog1py,
    aten.special_xlog1py.other_scalar: _xlog1py,
    aten.special_xlog1py.self_scalar: _xlog1py,
    aten.special_zeta.default: _zeta,
    aten.special_zeta.other_scalar: _zeta,
    aten.special_zeta.self_scalar: _zeta,
    aten.copysign.Scalar: jnp.copysign,
}
for _op, _fn in _FLOATING.items():
    elementwise(_op, _fn, promote_as=INT_TO_FLOAT)


def _igamma(op: Any, fn: Any) -> None:
    @lowering(op)
    def lowered(self: Array, other: Array) -> Array:
        compute, result = promote(self, other)
        a, b = jnp.broadcast_arrays(cast(self, compute), cast(other, compute))
        return cast(fn(a, b), result)


_igamma(aten.igamma.default, jax.lax.igamma)
_igamma(aten.igammac.default, jax.lax.igammac)


@lowering(aten.polygamma.default)
def polygamma(n: int, self: Array) -> Array:
    """The n-th derivative of digamma."""
    compute, result = promote(self, kind=INT_TO_FLOAT)
    x = cast(self, compute)
    if n == 0:
        return cast(digamma(x), result)
    if n == 1:
        return cast(trigamma(x), result)
    # torch's own formula, which holds where the zeta function does: for positive x.
    sign = 1.0 if n % 2 else -1.0
    return cast(sign * math.gamma(n + 1) * _zeta(jnp.full_like(x, n + 1), x), result)


def digamma(x: Array) -> Array:
    """The logarithmic derivative of gamma; its pole at zero keeps the side it was reached from."""
    pole = jnp.copysign(jnp.full((), jnp.inf, x.dtype), -x)
    return jnp.where(x == 0, pole, jax.lax.digamma(x))


def trigamma(x: Array) -> Array:
    """The derivative of digamma, by reflection for x below one half."""
    reflected = x < 0.5
    positive = jnp.where(reflected, 1 - x, x)
    found = _zeta(jnp.full_like(x, 2), positive)
    sine = jnp.sin(jnp.pi * x)
    return jnp.where(reflected, (jnp.pi / sine) ** 2 - found, found)


@lowering(aten.heaviside.default)
def heaviside(self: Array, values: Array) -> Array:
    """0 below zero, 1 above it, ``values`` at it; nan counts as below."""
    if values.dtype != self.dtype:
        raise Unsupported("heaviside of two dtypes, which torch refuses as well")
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
    bits = x.dtype.itemsize * 8
    fits = (by >= 0) & (by < bits)
    width = jnp.where(fits, by, 0).astype(x.dtype)
    if left:
        return jnp.where(fits, jnp.left_shift(x, width), jnp.zeros((), x.dtype))
    signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
    emptied = jnp.where(x < 0, -1, 0).astype(x.dtype) if signed else jnp.zeros_like(x)
    return jnp.where(fits, jnp.right_shift(x, width), emptied)


for _name, _left in (("left", True), ("right", False)):
    for _overload in ("Tensor", "Tensor_Scalar", "Scalar_Tensor"):
        _packet = getattr(aten, f"bitwise_{_name}_shift")
        elementwise(
            getattr(_packet, _overload), lambda a, b, left=_left: _shifted(a, b, left), promote_as=NO_OPMATH
        )
for _name, _left in (("__lshift__", True), ("__rshift__", False)):
    for _overload in ("Tensor", "Scalar"):
        _op = getattr(getattr(aten, _name), _overload)
        elementwise(_op, lambda a, b, left=_left: _shifted(a, b, left), promote_as=NO_OPMATH)


@lowering(aten.histc.default)
def histc(self: Array, bins: int = 100, min: Any = 0, max: Any = 0) -> Array:
    """How many elements fall into each of equal bins; equal bounds mean those of the data."""
    x = self.reshape(-1)
    low, high = cast(min, x.dtype), cast(max, x.dtype)
    if x.size:
        same = low == high
        low, high = jnp.where(same, x.min(), low), jnp.where(same, x.max(), high)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    inside = (x >= low) & (x <= high)
    place = jnp.floor((x - low) * bins / (high - low)).astype(jnp.int64)
    place = jnp.where(inside, jnp.clip(place, 0, bins - 1), bins)
    return jnp.zeros(bins, x.dtype).at[place].add(np.ones((), x.dtype), mode="drop")
