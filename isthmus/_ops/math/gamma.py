"""The gamma function's relatives: its logarithmic derivatives, the zeta function, incomplete gammas."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import FLOATING, INT_TO_FLOAT, REAL, Array, cast, promote
from isthmus._ops.elementwise import elementwise
from isthmus._ops.math.bessel import polynomial
from isthmus._ops.registry import lowering

# Half an ulp of 1 in double precision: smaller terms no longer change a sum.
_EPSILON = 2.0**-53
_BERNOULLI = (  # (2k)! / B_2k, the denominators of the Euler-Maclaurin sum
    12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.307674368e12 / 691, 7.47242496e10,
    -1.067062284288e16 / 3617, 5.109094217170944e18 / 43867, -8.028576626982912e20 / 174611,
    1.5511210043330985984e23 / 854513, -1.6938241367317436694528e27 / 236364091,
)  # fmt: skip


@elementwise(
    aten.special_zeta.default,
    aten.special_zeta.other_scalar,
    aten.special_zeta.self_scalar,
    promote_as=INT_TO_FLOAT,
    dtypes=FLOATING,
)
def zeta(x: Array, q: Array) -> Array:
    """The Hurwitz zeta function, with torch's values where it has poles or is not defined."""
    return _zeta64(x, q).astype(x.dtype)


def _zeta64(x: Array, q: Array) -> Array:
    """The zeta function in double precision; its first term in the operands' own, as torch has it."""
    own, tiny = jnp.power(q, -x).astype(jnp.float64), float(jnp.finfo(x.dtype).tiny)
    x, q = jnp.broadcast_arrays(x.astype(jnp.float64), q.astype(jnp.float64))
    term64 = jnp.power(q, -x)
    first = jnp.where(jnp.abs(term64) < tiny, term64, own)  # XLA has no subnormal numbers
    # Poles: the harmonic series, and every q for which one term divides by zero.
    infinite = (x == 1) | ((q <= 0) & (q == jnp.floor(q)))
    undefined = (x < 1) | ((q <= 0) & (x != jnp.floor(x)) & ~infinite)
    out = _euler_maclaurin(*_direct_sum(x, q, first, infinite | undefined), x)
    out = jnp.where(infinite, jnp.full_like(x, jnp.inf), out)
    return jnp.where(undefined, jnp.full_like(x, jnp.nan), out)


State = tuple[Array, Array, Array, Array, Array]


def _direct_sum(x: Array, q: Array, first: Array, done: Array) -> tuple[Array, Array, Array, Array]:
    """Sum nine terms, and more until they are past 9; stop where a term no longer counts."""

    def left(state: State) -> Array:
        count, point, _, _, done = state
        return ~done & ((count < 9) | (point <= 9))

    def add(state: State) -> State:
        count, point, term, total, done = state
        going = left(state)
        point = jnp.where(going, point + 1, point)
        term = jnp.where(going, jnp.power(point, -x), term)
        total = jnp.where(going, total + term, total)
        small = (-_EPSILON * total < term) & (term < _EPSILON * total)
        return count + 1, point, term, total, done | (going & small)

    start = (jnp.zeros((), jnp.int64), q, jnp.zeros_like(q), first, done)
    _, point, term, total, done = jax.lax.while_loop(lambda state: jnp.any(left(state)), add, start)
    return point, term, total, done


def _euler_maclaurin(point: Array, term: Array, total: Array, done: Array, x: Array) -> Array:
    """Add the rest of the sum, from the integral on; stop where a correction no longer counts."""
    total = jnp.where(done, total, total + term * point / (x - 1) - 0.5 * term)
    factor, k = jnp.ones_like(x), 0
    for divisor in _BERNOULLI:
        factor, term = factor * (x + k), term / point
        change = factor * term / divisor
        total = jnp.where(done, total, total + change)
        done = done | (jnp.abs(change / total) < _EPSILON)
        factor, term = factor * (x + (k + 1)), term / point
        k += 2
    return total


@lowering(aten.polygamma.default, dtypes=REAL)
def polygamma(n: int, self: Array) -> Array:
    """The n-th derivative of digamma."""
    compute, result = promote(self, kind=INT_TO_FLOAT)
    x = cast(self, compute)
    if n == 0:
        return cast(digamma(x), result)
    if n == 1:
        return cast(trigamma(x), result)
    # Factorial and zeta overflow and underflow as they do in the dtype, but for XLA's want of subnormal numbers.
    factorial = jnp.exp(jnp.asarray(math.lgamma(n + 1), compute)).astype(jnp.float64)
    zetas = _zeta64(jnp.full_like(x, n + 1), x)
    smallest = float(jnp.finfo(compute).smallest_subnormal) / 2
    zetas = jnp.where(jnp.abs(zetas) < smallest, jnp.zeros_like(zetas), zetas)
    return cast((1 if n % 2 else -1) * factorial * zetas, result)


def digamma(x: Array) -> Array:
    """The logarithmic derivative of gamma; its pole at zero keeps the side it was reached from."""
    pole = jnp.copysign(jnp.full((), jnp.inf, x.dtype), -x)
    return jnp.where(x == 0, pole, jax.lax.digamma(x))


def trigamma(x: Array) -> Array:
    """The derivative of digamma, by reflection for x below one half."""
    reflected = x < 0.5
    point = jnp.where(reflected, 1 - x, x)
    out = jnp.zeros_like(x)
    # torch's formula: six steps up, then three terms of the asymptotic series.
    for _ in range(6):
        out, point = out + 1 / (point * point), point + 1
    z = 1 / (point * point)
    out = out + (1 + 1 / (2 * point) + z * (1 / 6 - z * (1 / 30 - z * (1 / 42)))) / point
    # In the dtype of x, as torch has it: near a pole the rounding of pi shows.
    sine = jnp.sin(jnp.asarray(math.pi, x.dtype) * x)
    return jnp.where(reflected, math.pi**2 / (sine * sine) - out, out)


def _incomplete(
    function: Callable[[Array, Array], Array], at_zero: float, self: Array, other: Array
) -> Array:
    """An incomplete gamma function that is ``at_zero`` where its parameter ``self`` is zero."""
    compute, result = promote(self, other)
    # float32 has too few digits for the logarithms of large numbers that the functions subtract.
    a, x = (cast(operand, compute).astype(np.float64) for operand in (self, other))
    a, x = jnp.broadcast_arrays(a, x)
    large = a > _LARGE
    safe = jnp.where(large | (a <= 0), jnp.ones_like(a), a)
    out = jnp.where(large, _temme(a, x, 1 - at_zero), function(safe, x))
    # nan as a parameter counts only where the other one does not decide: torch's order.
    out = jnp.where(jnp.isinf(x), jnp.full_like(a, at_zero), out)
    out = jnp.where(jnp.isinf(a) | (x == 0), jnp.full_like(a, 1 - at_zero), out)
    out = jnp.where(a == 0, jnp.full_like(a, at_zero), out)
    undefined = (a < 0) | (x < 0) | ((a == 0) & ~(x > 0)) | (jnp.isinf(a) & jnp.isinf(x))
    return cast(jnp.where(undefined, jnp.full_like(a, jnp.nan), out), result)


lowering(aten.igamma.default)(functools.partial(_incomplete, jax.lax.igamma, 1.0))
lowering(aten.igammac.default)(functools.partial(_incomplete, jax.lax.igammac, 0.0))


_LARGE = 1e5
_TEMME = (  # DLMF 8.12.12: the powers of eta, highest first, for each power of 1 / a
    (-2.185448510679992e-06, 3.919263178522438e-05, -0.0001787551440329218, 0.0003527336860670194,
     0.0011574074074074073, -0.014814814814814815, 0.08333333333333333, -0.3333333333333333),
    (7.64916091608111e-06, -1.8098550334489977e-05, -4.018775720164609e-07, 0.00020576131687242798,
     -0.0009902263374485596, 0.0026455026455026454, -0.003472222222222222, -0.001851851851851852),
    (3.423578734096138e-08, -1.2760635188618728e-05, 5.2923448829120125e-05, -0.0001073665322636516,
     2.0093878600823047e-06, 0.0007716049382716049, -0.0026813271604938273, 0.004133597883597883),
)  # fmt: skip


def _temme(a: Array, x: Array, upper: float) -> Array:
    """Temme's uniform expansion of the incomplete gamma function, the upper one or the lower one, for large a.

    JAX's series and continued fraction have not converged there when they stop.
    """
    part = (x - a) / a
    series = polynomial(part, [(-1) ** n / n for n in range(18, 1, -1)]) * part * part
    half_square = jnp.where(jnp.abs(part) < 0.1, series, part - jnp.log1p(part))
    eta = jnp.copysign(jnp.sqrt(2 * half_square), part)
    near = jnp.clip(eta, -0.1, 0.1)  # beyond, the exponential below is zero
    rest = sum(polynomial(near, row) * jnp.power(a, -float(k)) for k, row in enumerate(_TEMME))
    rest = rest * jnp.exp(-a * half_square) / jnp.sqrt(2 * math.pi * a)
    side = 1 if upper else -1
    return 0.5 * jax.lax.erfc(side * eta * jnp.sqrt(a / 2)) + side * rest
