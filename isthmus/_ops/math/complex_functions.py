"""Functions of complex numbers with C's answers for infinities, nans and both sides of a cut, which torch's CPU has.

JAX's functions are right for finite numbers off the cuts. Here an infinity meets a nan, a zero has a sign, and a
hyperbolic cosine may not overflow half-way. Real numbers go to JAX's functions as they are::

    exp = defined(jnp.exp, _exp)   # exp(x) is jnp.exp(x) unless x is complex

Signs are taken off and put back by choices, not by ``abs``, whose derivative at zero would be zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from isthmus._ops.common import Array

Function = Callable[[Array], Array]


def defined(real: Function, of_complex: Function) -> Function:
    """Return a function that is ``of_complex`` for complex numbers and ``real`` for others."""
    return lambda x: of_complex(x) if jnp.iscomplexobj(x) else real(x)


def _signed(x: Array, like: Array) -> Array:
    return jnp.where(jnp.signbit(like) != jnp.signbit(x), -x, x)


def _plain(x: Array) -> Array:
    return jnp.where(jnp.signbit(x), -x, x)


def _alone(zero: Array, other: Array) -> Array:
    """Return where a part is zero and stays so because the other is not finite; elsewhere it has a derivative."""
    return (zero == 0) & ~jnp.isfinite(other)


def _turned(function: Function) -> Function:
    """Return ``-i f(iz)``: the sine of a hyperbolic sine, and so on."""

    def turned(z: Array) -> Array:
        w = function(jax.lax.complex(-z.imag, z.real))
        return jax.lax.complex(w.imag, -w.real)

    return turned


def _exp(z: Array) -> Array:
    x, y = z.real, z.imag
    w = jnp.exp(z)
    # The angle of an infinite number that has none: C says inf + i nan, or zeros for exp(-inf).
    lost = jnp.isinf(x) & ~jnp.isfinite(y)
    real = jnp.where(lost, jnp.where(x > 0, jnp.inf, 0.0), w.real)
    imag = jnp.where(lost, jnp.where(x > 0, jnp.nan, 0.0), w.imag)
    return jax.lax.complex(real, jnp.where(_alone(y, x), y, imag))


def _logarithm(function: Function) -> Function:
    def log(z: Array) -> Array:
        w = function(z)
        return jax.lax.complex(jnp.where(jnp.isinf(z.real) | jnp.isinf(z.imag), jnp.inf, w.real), w.imag)

    return log


def _sqrt(z: Array) -> Array:
    x, y = z.real, z.imag
    # Above the cut, then mirrored: below it -0.0 must give the conjugate, which XLA's sqrt does not promise.
    w = jnp.sqrt(jax.lax.complex(x, _plain(y)))
    real = jnp.where(jnp.isposinf(x) | jnp.isinf(y), jnp.inf, w.real)
    imag = jnp.where(jnp.isneginf(x) | jnp.isinf(y), jnp.inf, w.imag)
    return jax.lax.complex(real, _signed(imag, y))


def _sinh(z: Array) -> Array:
    x, y = z.real, z.imag
    real = jnp.where(jnp.isinf(x) & ~jnp.isfinite(y), jnp.inf, jnp.sinh(x) * jnp.cos(y))
    # sinh(0 + i inf) keeps the zero: 0 * nan would not.
    real = jnp.where(_alone(x, y), x, real)
    return jax.lax.complex(real, jnp.where(_alone(y, jnp.cosh(x)), y, jnp.cosh(x) * jnp.sin(y)))


def _sin(z: Array) -> Array:
    w = _turned(_sinh)(z)
    # The sign of an infinite sine is unspecified; C's is positive.
    return jax.lax.complex(w.real, jnp.where(jnp.isinf(z.imag) & ~jnp.isfinite(z.real), jnp.inf, w.imag))


def _cosh(z: Array) -> Array:
    x, y = z.real, z.imag
    real = jnp.where(jnp.isinf(x) & ~jnp.isfinite(y), jnp.inf, jnp.cosh(x) * jnp.cos(y))
    imag = jnp.where(_alone(y, jnp.cosh(x)), jnp.where(jnp.signbit(x), -y, y), jnp.sinh(x) * jnp.sin(y))
    return jax.lax.complex(real, jnp.where(_alone(x, y), x, imag))


def _tanh(z: Array) -> Array:
    x, y = z.real, z.imag
    w = jnp.tanh(z)
    return jax.lax.complex(jnp.where(_alone(x, y), x, w.real), jnp.where(_alone(y, x), y, w.imag))


def _odd(function: Function) -> Function:
    """Return a function that is odd and takes conjugates to conjugates, found where both parts are positive."""

    def odd(z: Array) -> Array:
        x, y = z.real, z.imag
        w = function(_as_complex128(jax.lax.complex(_plain(x), _plain(y)))).astype(z.dtype)
        return jax.lax.complex(_signed(w.real, x), _signed(w.imag, y))

    return odd


def _as_complex128(z: Array) -> Array:
    """Return complex numbers in double precision: squares of small parts must not vanish."""
    return z.astype(jnp.complex128)


def _asinh(z: Array) -> Array:
    x, y = z.real, z.imag
    w = jnp.arcsinh(z)
    infinite = jnp.isinf(x) | jnp.isinf(y)
    real = jnp.where(infinite, jnp.inf, w.real)
    return jax.lax.complex(real, jnp.where(jnp.isnan(x) & (y == 0), y, w.imag))


def _atanh(z: Array) -> Array:
    x, y = z.real, z.imag
    w = jnp.arctanh(z)
    # At infinity, whatever the other part, the answer is i pi / 2.
    far = jnp.isinf(x) | jnp.isinf(y)
    real = jnp.where(far | ((x == 0) & jnp.isnan(y)), 0.0, w.real)
    imag = jnp.where(jnp.isnan(x) | jnp.isnan(y), jnp.nan, w.imag)
    imag = jnp.where(jnp.isinf(y) | (jnp.isinf(x) & ~jnp.isnan(y)), math.pi / 2, imag)
    return jax.lax.complex(real, imag)


def _acos(z: Array) -> Array:
    x, y = z.real, z.imag
    w = jnp.arccos(_as_complex128(jax.lax.complex(x, _plain(y)))).astype(z.dtype)
    real = jnp.where((x == 0) & jnp.isnan(y), math.pi / 2, w.real)
    imag = jnp.where(jnp.isinf(x) | jnp.isinf(y), jnp.inf, _plain(w.imag))
    return jax.lax.complex(real, _signed(imag, -y))


def _acosh(z: Array) -> Array:
    x, y = z.real, z.imag
    w = _acos(jax.lax.complex(x, _plain(y)))
    imag = w.real
    return jax.lax.complex(_plain(w.imag), _signed(imag, y))


def _expm1(z: Array) -> Array:
    # torch's formula: what is lost in exp(z) - 1 is a square of half the angle's sine.
    x, y = z.real, z.imag
    half = jnp.sin(y / 2)
    return jax.lax.complex(jnp.expm1(x) * jnp.cos(y) - 2 * half * half, jnp.exp(x) * jnp.sin(y))


asin, atan = defined(jnp.arcsin, _turned(_odd(_asinh))), defined(jnp.arctan, _turned(_odd(_atanh)))
asinh, atanh = defined(jnp.arcsinh, _odd(_asinh)), defined(jnp.arctanh, _odd(_atanh))
acos, acosh = defined(jnp.arccos, _acos), defined(jnp.arccosh, _acosh)
sinh, cosh, tanh = defined(jnp.sinh, _sinh), defined(jnp.cosh, _cosh), defined(jnp.tanh, _tanh)
sin, tan = defined(jnp.sin, _sin), defined(jnp.tan, _turned(_tanh))
cos = defined(jnp.cos, lambda z: _cosh(jax.lax.complex(-z.imag, z.real)))
exp, expm1 = defined(jnp.exp, _exp), defined(jnp.expm1, _expm1)
exp2 = defined(jnp.exp2, lambda z: _exp(jax.lax.complex(z.real * math.log(2), z.imag * math.log(2))))
log, log2 = defined(jnp.log, _logarithm(jnp.log)), defined(jnp.log2, _logarithm(jnp.log2))
log10 = defined(jnp.log10, _logarithm(jnp.log10))
log1p = defined(jnp.log1p, lambda z: jnp.log1p(_as_complex128(z)).astype(z.dtype))
sqrt, rsqrt = defined(jnp.sqrt, _sqrt), defined(jax.lax.rsqrt, lambda z: 1 / _sqrt(z))
absolute = defined(jnp.abs, lambda z: jnp.where(jnp.isinf(z.real) | jnp.isinf(z.imag), jnp.inf, jnp.abs(z)))
sigmoid = defined(jax.nn.sigmoid, lambda z: 1 / (1 + _exp(-z)))
