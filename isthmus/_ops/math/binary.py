"""Elementwise ops of two or three operands, each a tensor or a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import (
    ALWAYS_BOOL,
    DEFAULT,
    INT_TO_FLOAT,
    NO_OPMATH,
    Number,
    cast,
    divide,
    elementwise,
    is_bool,
    ordered,
    promote,
)
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported

Array = Any


def _add(a: Array, b: Array, alpha: Any = None) -> Array:
    if alpha is not None:
        b = b * alpha
    return jnp.logical_or(a, b) if a.dtype == jnp.bool_ else a + b


def _sub(a: Array, b: Array, alpha: Any = None) -> Array:
    return a - (b if alpha is None else b * alpha)


def _rsub(a: Array, b: Array, alpha: Any = None) -> Array:
    return _sub(b, a, alpha)


def _with_alpha(op: Any, fn: Any) -> None:
    """File an op with ``alpha``, which scales an operand but takes no part in promotion."""

    @lowering(op)
    def lowered(self: Any, other: Any, alpha: Any = 1) -> Array:
        if fn is not _add and (is_bool(self) or is_bool(other)):
            raise Unsupported("a difference of bools, which torch refuses as well")
        compute, result = promote(self, other)
        scale = None if isinstance(alpha, int) and alpha == 1 else cast(alpha, compute)
        return cast(fn(cast(self, compute), cast(other, compute), scale), result)


_with_alpha(aten.add.Tensor, _add)
_with_alpha(aten.add.Scalar, _add)
_with_alpha(aten.sub.Tensor, _sub)
_with_alpha(aten.sub.Scalar, _sub)
_with_alpha(aten.rsub.Tensor, _rsub)
_with_alpha(aten.rsub.Scalar, _rsub)


def _mul(a: Array, b: Array) -> Array:
    return jnp.logical_and(a, b) if a.dtype == jnp.bool_ else a * b


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
    rounded = jnp.where(quotient - down > 0.5, down + 1, down)
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
    found = jax.lax.rem(a, b)
    return jnp.where((found != 0) & ((b < 0) != (found < 0)), found + b, found)


def _pow(a: Array, b: Array) -> Array:
    if jnp.issubdtype(a.dtype, jnp.integer):
        return _integer_pow(a, b)
    found = jnp.power(a, b)
    if not jnp.iscomplexobj(a):
        return found
    # The logarithm of a complex zero is of no use, and that of an infinite number loses its parts.
    found = jnp.where((a == 0) & (b.real > 0), 0, found)
    return found if b.ndim else jnp.where(b == 2, a * a, jnp.where(b == 3, a * a * a, found))


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


def _maximum(a: Array, b: Array) -> Array:
    return jnp.logical_or(a, b) if a.dtype == jnp.bool_ else jnp.maximum(a, b)


def _minimum(a: Array, b: Array) -> Array:
    return jnp.logical_and(a, b) if a.dtype == jnp.bool_ else jnp.minimum(a, b)


def _clamp(x: Array, low: Any = None, high: Any = None) -> Array:
    if low is not None:
        x = jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


def _floating(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of floating-point numbers, the only ones that torch takes."""

    def checked(*given: Array) -> Array:
        if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in given):
            raise Unsupported("integers, which torch refuses as well")
        return fn(*given)

    return checked


def logaddexp(a: Array, b: Array) -> Array:
    """The logarithm of a sum of exponentials; of complex ones about the larger real part, torch's branch."""
    if not jnp.iscomplexobj(a):
        return jnp.logaddexp(a, b)
    a, b = jnp.broadcast_arrays(a, b)
    ordered = a.real < b.real
    low, high = jnp.where(ordered, a, b), jnp.where(ordered, b, a)
    lost = jnp.isneginf(low.real - high.real)  # whatever the angle, which may be infinite
    found = jnp.where(lost, high, jnp.log1p(jnp.exp(low - high)) + high)
    both = jnp.isinf(low.real) & (low.real == high.real)
    at_infinity = jnp.where(low.real < 0, low, jnp.log(jnp.exp(low) + jnp.exp(high)))
    nan = jnp.full_like(found, complex(math.nan, math.nan))
    return jnp.where(jnp.isnan(a) | jnp.isnan(b), nan, jnp.where(both, at_infinity, found))


def _logaddexp2(a: Array, b: Array) -> Array:
    if jnp.iscomplexobj(a):
        raise Unsupported("logaddexp2 of complex numbers, which torch refuses as well")
    return jnp.logaddexp2(a, b)


SAME: dict[Any, Callable[..., Any]] = {
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.bitwise_and.Tensor: jnp.bitwise_and,
    aten.bitwise_and.Scalar: jnp.bitwise_and,
    aten.bitwise_or.Tensor: jnp.bitwise_or,
    aten.bitwise_or.Scalar: jnp.bitwise_or,
    aten.bitwise_xor.Tensor: jnp.bitwise_xor,
    aten.bitwise_xor.Scalar: jnp.bitwise_xor,
    aten.fmax.default: ordered(jnp.fmax),
    aten.fmin.default: ordered(jnp.fmin),
    aten.maximum.default: ordered(_maximum),
    aten.minimum.default: ordered(_minimum),
    aten.pow.Tensor_Tensor: _pow,
    aten.pow.Tensor_Scalar: _pow,
    aten.pow.Scalar: _pow,
    aten.clamp.default: ordered(_clamp),
    aten.clamp.Tensor: ordered(_clamp),
    aten.clamp_min.default: ordered(jnp.maximum),
    aten.clamp_min.Tensor: ordered(jnp.maximum),
    aten.clamp_max.default: ordered(jnp.minimum),
    aten.clamp_max.Tensor: ordered(jnp.minimum),
    aten.gcd.default: jnp.gcd,
    aten.lcm.default: jnp.lcm,
    aten.hypot.default: _floating(jnp.hypot),
    aten.nextafter.default: _floating(jnp.nextafter),
}
FLOATING: dict[Any, Callable[..., Any]] = {
    aten.div.Tensor: divide,
    aten.div.Scalar: divide,
    aten.atan2.default: ordered(jnp.arctan2),
    aten.copysign.Tensor: jnp.copysign,
    aten.copysign.Scalar: jnp.copysign,
    aten.logaddexp.default: logaddexp,
    aten.logaddexp2.default: _logaddexp2,
}
DIVISIONS: dict[Any, Callable[..., Any]] = {
    aten.floor_divide.default: _floor_divide,
    aten.fmod.Tensor: jax.lax.rem,
    aten.fmod.Scalar: jax.lax.rem,
    aten.remainder.Tensor: _remainder,
    aten.remainder.Scalar: _remainder,
    aten.remainder.Scalar_Tensor: _remainder,
}
COMPARISONS = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": ordered(jnp.less),
    "le": ordered(jnp.less_equal),
    "gt": ordered(jnp.greater),
    "ge": ordered(jnp.greater_equal),
}
LOGICAL = {
    aten.logical_and.default: jnp.logical_and,
    aten.logical_or.default: jnp.logical_or,
    aten.logical_xor.default: jnp.logical_xor,
}


for _op, _fn in SAME.items():
    elementwise(_op, _fn, promote_as=DEFAULT)
for _op, _fn in FLOATING.items():
    elementwise(_op, _fn, promote_as=INT_TO_FLOAT)
for _name, _fn in COMPARISONS.items():
    elementwise(getattr(aten, _name).Tensor, _fn, promote_as=ALWAYS_BOOL)
    elementwise(getattr(aten, _name).Scalar, _fn, promote_as=ALWAYS_BOOL)
for _op, _fn in LOGICAL.items():
    elementwise(_op, _fn, promote_as=ALWAYS_BOOL)


def _refuse_zeros(other: Any, b: Array) -> None:
    """Raise what torch's CPU raises for integers divided by zero; XLA would answer with a number."""
    if not jnp.issubdtype(b.dtype, jnp.integer):
        return
    number = other.value if isinstance(other, Number) else other
    if isinstance(number, jax.core.Tracer):
        if isinstance(other, Number):
            return  # looked at before the program runs: _device/checks/scalar_checks.py
    elif jnp.ndim(number) == 0 and bool(np.asarray(number) != 0):
        return
    require(b != 0, RuntimeError, "ZeroDivisionError")


def _division(op: Any, fn: Callable[..., Any]) -> None:
    """File a division, whose integers have no quotient by zero."""

    def lowered(self: Any, other: Any) -> Array:
        compute, result = promote(self, other)
        a, b = jnp.broadcast_arrays(cast(self, compute), cast(other, compute))
        _refuse_zeros(other, b)
        return cast(fn(a, b), result)

    lowered.__wrapped_function__ = fn  # type: ignore[attr-defined]
    lowering(op)(lowered)


for _op, _fn in DIVISIONS.items():
    _division(_op, _fn)


def _div_mode(op: Any) -> None:
    @lowering(op)
    def div(self: Array, other: Any, rounding_mode: str | None) -> Array:
        """Divide, and round the quotient as asked."""
        kind = INT_TO_FLOAT if rounding_mode is None else DEFAULT
        compute, result = promote(self, other, kind=kind)
        a, b = jnp.broadcast_arrays(cast(self, compute), cast(other, compute))
        if rounding_mode is not None:
            _refuse_zeros(other, b)
        fn = {None: divide, "trunc": _trunc_divide, "floor": _floor_divide}[rounding_mode]
        return cast(fn(a, b), result)


_div_mode(aten.div.Tensor_mode)
_div_mode(aten.div.Scalar_mode)


@lowering(aten.where.self)
def where(condition: Array, self: Any, other: Any) -> Array:
    """``self`` where the condition holds, ``other`` elsewhere."""
    _, result = promote(self, other, kind=NO_OPMATH)
    return jnp.where(condition != 0, cast(self, result), cast(other, result))


@lowering(aten.masked_fill.Scalar)
def masked_fill_scalar(self: Array, mask: Array, value: Any) -> Array:
    """``value`` where the mask holds."""
    return jnp.where(mask, cast(value, self.dtype), self)


@lowering(aten.masked_fill.Tensor)
def masked_fill_tensor(self: Array, mask: Array, value: Array) -> Array:
    """``value``, a 0-dim tensor, where the mask holds."""
    return jnp.where(mask, cast(value, self.dtype), self)


def _scaled(op: Any, fn: Any) -> None:
    @lowering(op)
    def lowered(self: Array, tensor1: Array, tensor2: Array, value: Any = 1) -> Array:
        compute, result = promote(self, tensor1, tensor2)
        a, b, c, v = (cast(x, compute) for x in (self, tensor1, tensor2, value))
        return cast(a + v * fn(b, c), result)


_scaled(aten.addcmul.default, jnp.multiply)
_scaled(aten.addcdiv.default, jnp.true_divide)


def _lerp(op: Any) -> None:
    @lowering(op)
    def lerp(self: Array, end: Array, weight: Any) -> Array:
        """Interpolate from whichever end is nearer, as torch does, so that weight 1 gives ``end`` exactly."""
        compute, result = promote(self, end)
        if jnp.issubdtype(result, jnp.integer):
            raise Unsupported("integers, which torch refuses as well")
        a, b, w = cast(self, compute), cast(end, compute), cast(weight, compute)
        near = jnp.abs(w) < 0.5
        return cast(jnp.where(near, a + w * (b - a), b - (b - a) * (1 - w)), result)


_lerp(aten.lerp.Scalar)
_lerp(aten.lerp.Tensor)
