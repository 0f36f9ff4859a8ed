"""Orthogonal polynomials of a degree given as a tensor, by torch's own closed forms and recurrences."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import FLOAT32_OR_64, INT_TO_FLOAT, Array
from isthmus._ops.elementwise import elementwise

Step = Callable[[Array, Array, Array], Array]


def _degree(n: Array) -> Array:
    """The degree as a whole number; -1 where it is none, as a conversion to int64 has it on the CPU."""
    fits = jnp.isfinite(n) & (jnp.abs(n) < 2.0**63)
    return jnp.where(fits, jnp.trunc(n), -jnp.ones_like(n))


def _recurrence(first: Array, step: Step, n: Array, needed: Array) -> Array:
    """The polynomial of degree n where it is wanted: ``step(k, last, before)`` gives degree k + 1.

    One loop runs to the highest degree wanted, and stops early once every value is nan.
    """
    # What is known without the loop must not make it longer.
    degree = jnp.where(needed, n, 0).astype(jnp.int64)

    def left(state: tuple[Array, Array, Array]) -> Array:
        k, _, last = state
        return (k < degree) & ~jnp.isnan(last)

    def advance(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        k, before, last = state
        going = left(state)
        value = step(k.astype(first.dtype), last, before)
        return k + 1, jnp.where(going, last, before), jnp.where(going, value, last)

    start = (jnp.ones((), jnp.int64), jnp.ones_like(first), first)
    _, _, last = jax.lax.while_loop(lambda state: jnp.any(left(state)), advance, start)
    return jnp.where(n == 0, jnp.ones_like(first), last)


def _divided(total: Array, count: Array) -> Array:
    """A quotient rounded once: XLA multiplies by the reciprocal of a divisor it knows to be the same everywhere."""
    return total / jnp.where(jnp.isnan(total), 1, count)


def _known(n: Array, out: Array, *cases: tuple[Array, Array]) -> Array:
    """``found`` but for values known without it, the first case that holds first; 0 for negative degrees."""
    for condition, value in reversed(cases):
        out = jnp.where(condition, value, out)
    return jnp.where(n < 0, jnp.zeros_like(out), out)


def _sign(n: Array) -> Array:
    """(-1) ** n."""
    return jnp.where(n - 2 * jnp.floor(n / 2) == 0, jnp.ones_like(n), -jnp.ones_like(n))


def _closed_u(y: Array, n: Array, angle: Array) -> Array:
    # Where the sine is zero, the limit of the quotient.
    sine, whole = jnp.sin(angle), (n + 1) * angle
    return jnp.where(sine != 0, jnp.sin(whole) / sine, (n + 1) * jnp.cos(whole) / y)


def _closed_v(y: Array, n: Array, angle: Array) -> Array:
    out = jnp.cos((n + 0.5) * angle) / jnp.cos(angle / 2)
    return jnp.where(jnp.sin(angle / 2) != 1, out, _sign(n) * (2 * n + 1))


def _closed_w(y: Array, n: Array, angle: Array) -> Array:
    out = jnp.sin((n + 0.5) * angle) / jnp.sin(angle / 2)
    return jnp.where(jnp.cos(angle / 2) != 1, out, jnp.where(y > 0, 2 * n + 1, _sign(n)))


def _closed_shifted_w(y: Array, n: Array, angle: Array) -> Array:
    out = jnp.sin((n + 0.5) * angle) / jnp.sin(angle / 2)
    return jnp.where(jnp.cos(angle / 2) != 1, out, _sign(n))


_FIRST: dict[str, Callable[[Array], Array]] = {
    "t": lambda y: y,
    "u": lambda y: y + y,
    "v": lambda y: y + y - 1,
    "w": lambda y: y + y + 1,
}
_AT_ONE: dict[str, Callable[[Array], Array]] = {
    "t": jnp.ones_like,
    "u": lambda n: n + 1,
    "v": jnp.ones_like,
    "w": lambda n: 2 * n + 1,
}
_AT_MINUS_ONE: dict[str, Callable[[Array], Array]] = {
    "t": _sign,
    "u": lambda n: _sign(n) * (n + 1),
    "v": lambda n: _sign(n) * (2 * n + 1),
    "w": _sign,
}
_CLOSED: dict[str, Callable[[Array, Array, Array], Array]] = {
    "t": lambda y, n, angle: jnp.cos(n * angle),
    "u": _closed_u,
    "v": _closed_v,
    "w": _closed_w,
}


def _chebyshev(kind: str, shifted: bool, above: int) -> Callable[[Array, Array], Array]:
    """A Chebyshev polynomial: inside the interval the closed form for degrees ``above``, as torch has it."""
    closed = _closed_shifted_w if shifted and kind == "w" else _CLOSED[kind]

    def chebyshev(x: Array, n: Array) -> Array:
        x, n = jnp.broadcast_arrays(x, _degree(n))
        y = x + x - 1 if shifted else x
        top, bottom = x == 1, x == (0 if shifted else -1)
        inside = (n > above) & (jnp.abs(y) < 1)
        # The degree multiplies the angle and its error, so it is rounded only once.
        angle = jnp.arccos(jnp.clip(y, -1, 1).astype(jnp.float64)).astype(y.dtype)
        out = _recurrence(
            _FIRST[kind](y), lambda k, last, before: (y + y) * last - before, n, ~(top | bottom | inside)
        )
        ends = ((top, _AT_ONE[kind](n)), (bottom, _AT_MINUS_ONE[kind](n)))
        return _known(n, out, *ends, (inside, closed(y, n, angle)))

    return chebyshev


def _hermite_limit(n: Array) -> Array:
    """Where torch answers nan: the values of such degrees overflow."""
    return n > (128 if n.dtype == jnp.float32 else 512)


def _hermite_polynomial_h(x: Array, n: Array) -> Array:
    x, n = jnp.broadcast_arrays(x, _degree(n))
    beyond = _hermite_limit(n)
    out = _recurrence(x + x, lambda k, last, before: (x + x) * last - 2 * k * before, n, ~beyond)
    return _known(n, out, (beyond, jnp.full_like(x, jnp.nan)))


def _hermite_polynomial_he(x: Array, n: Array) -> Array:
    x, n = jnp.broadcast_arrays(x, _degree(n))
    beyond = _hermite_limit(n)
    out = _recurrence(x, lambda k, last, before: x * last - k * before, n, ~beyond)
    return _known(n, out, (beyond, jnp.full_like(x, jnp.nan)))


def _laguerre_polynomial_l(x: Array, n: Array) -> Array:
    x, n = jnp.broadcast_arrays(x, _degree(n))

    def step(k: Array, last: Array, before: Array) -> Array:
        return _divided((k + k + (1 - x)) * last - k * before, k + 1)

    zero = x == 0
    return _known(n, _recurrence(1 - x, step, n, ~zero), (zero, jnp.ones_like(x)))


def _legendre_polynomial_p(x: Array, n: Array) -> Array:
    x, n = jnp.broadcast_arrays(x, _degree(n))

    def step(k: Array, last: Array, before: Array) -> Array:
        return _divided((k + k + 1) * x * last - k * before, k + 1)

    top, bottom = x == 1, x == -1
    out = _recurrence(x, step, n, ~(top | bottom))
    return _known(n, out, (top, jnp.ones_like(x)), (bottom, _sign(n)))


for _packet, _fn in {
    aten.special_chebyshev_polynomial_t: _chebyshev("t", False, 6),
    aten.special_chebyshev_polynomial_u: _chebyshev("u", False, 8),
    aten.special_chebyshev_polynomial_v: _chebyshev("v", False, 8),
    aten.special_chebyshev_polynomial_w: _chebyshev("w", False, 8),
    aten.special_shifted_chebyshev_polynomial_t: _chebyshev("t", True, 6),
    aten.special_shifted_chebyshev_polynomial_u: _chebyshev("u", True, 6),
    aten.special_shifted_chebyshev_polynomial_v: _chebyshev("v", True, 6),
    aten.special_shifted_chebyshev_polynomial_w: _chebyshev("w", True, 4),
    aten.special_hermite_polynomial_h: _hermite_polynomial_h,
    aten.special_hermite_polynomial_he: _hermite_polynomial_he,
    aten.special_laguerre_polynomial_l: _laguerre_polynomial_l,
    aten.special_legendre_polynomial_p: _legendre_polynomial_p,
}.items():
    # torch has these in float32 and float64 only.
    elementwise(
        _packet.default, _packet.x_scalar, _packet.n_scalar, promote_as=INT_TO_FLOAT, dtypes=FLOAT32_OR_64
    )(_fn)
