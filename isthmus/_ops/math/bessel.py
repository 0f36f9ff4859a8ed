"""Airy and Bessel functions and erfcx, by the approximations torch's CPU kernels use.

torch leaves out the leading 1 of several of Cephes' denominators, which moves J, Y and Ai by up to 1e-6.
Values are to agree with torch, so it is left out here as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import jax.scipy.special as jsp

from isthmus._graph.names import aten
from isthmus._ops.common import FLOAT32_OR_64, INT_TO_FLOAT, Array
from isthmus._ops.elementwise import elementwise
from isthmus._ops.math import bessel_coefficients as c


def polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    """The polynomial with these coefficients, highest power first."""
    total = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def chebyshev_sum(x: Array, coefficients: Sequence[float]) -> Array:
    """The Chebyshev series at x / 2, highest order first, by Clenshaw's recurrence."""
    before, last = jnp.zeros_like(x), jnp.zeros_like(x)
    total = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        before, last = last, total
        total = x * last - before + coefficient
    return 0.5 * (total - before)


def _ratio(x: Array, numerator: Sequence[float], denominator: Sequence[float]) -> Array:
    return polynomial(x, numerator) / polynomial(x, denominator)


def _series(first: int) -> list[float]:
    """The Maclaurin coefficients in x cubed of the solution of y'' = xy that starts with x to the ``first``."""
    coefficients = [1.0]
    for k in range(1, 16):  # enough for double precision where |x| is below 2.09
        coefficients.append(coefficients[-1] / ((3 * k + first) * (3 * k + first - 1)))
    return coefficients[::-1]


_AIRY_EVEN, _AIRY_ODD = _series(0), _series(1)
_AIRY_AT_0, _AIRY_SLOPE = 0.355028053887817239260, 0.258819403792806798405


def _airy_ai(x: Array) -> Array:
    """The Airy function Ai: a power series about 0, asymptotic expansions on either side."""
    size = jnp.where(jnp.abs(x) < 2, 2, jnp.abs(x))
    # XLA multiplies by the reciprocal of a constant: an ulp of the arc, which sin and cos make a large error.
    three = jnp.where(jnp.isnan(x), 1, 3)
    arc = 2 * size * jnp.sqrt(size) / three.astype(x.dtype)
    z = 1 / arc
    height = 5.64189583547756286948e-01 / jnp.sqrt(jnp.sqrt(size))
    decaying = height * _ratio(z, c.AIRY_DECAY_NUM, c.AIRY_DECAY_DEN) / (2 * jnp.exp(arc))
    sine = 1 + z * z * _ratio(z * z, c.AIRY_SIN_NUM, c.AIRY_SIN_DEN)
    cosine = z * _ratio(z * z, c.AIRY_COS_NUM, c.AIRY_COS_DEN)
    phase = arc + 0.25 * math.pi
    swinging = height * (jnp.sin(phase) * sine - jnp.cos(phase) * cosine)
    near = jnp.clip(x, -2.09, 2.09)
    cube = near * near * near
    even, odd = polynomial(cube, _AIRY_EVEN), near * polynomial(cube, _AIRY_ODD)
    inner = _AIRY_AT_0 * even - _AIRY_SLOPE * odd
    out = jnp.where(x < -2.09, swinging, jnp.where(x >= 2.09, decaying, inner))
    out = jnp.where(x > 103.892, jnp.zeros_like(x), out)
    return jnp.where(jnp.isinf(x), jnp.full_like(x, jnp.nan), out)


_LARGE = {
    0: (c.BESSEL0_P_NUM, c.BESSEL0_P_DEN, c.BESSEL0_Q_NUM, c.BESSEL0_Q_DEN),
    1: (c.BESSEL1_P_NUM, c.BESSEL1_P_DEN, c.BESSEL1_Q_NUM, c.BESSEL1_Q_DEN),
}


def _hankel(x: Array, order: int) -> tuple[Array, Array]:
    """Hankel's expansion of J and Y for x above 5; nan at infinity."""
    # The rational functions are fitted in 5 / x, so the caller keeps x away from zero.
    w = 5 / x
    p_num, p_den, q_num, q_den = _LARGE[order]
    p, q = _ratio(w * w, p_num, p_den), w * _ratio(w * w, q_num, q_den)
    # XLA's GPU compiler may give sin and cos of an infinity a value once they are fused.
    angle = jnp.where(jnp.isinf(x), jnp.full_like(x, jnp.nan), x - (2 * order + 1) * math.pi / 4)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    scale = math.sqrt(2 / math.pi) / jnp.sqrt(x)
    return (p * cosine - q * sine) * scale, (p * sine + q * cosine) * scale


def _large(x: Array) -> Array:
    """x where Hankel's expansion holds, a number at which it does no harm elsewhere."""
    return jnp.where(x <= 5, 6, x)


def _bessel_j0(x: Array) -> Array:
    x = jnp.abs(x)
    z = x * x
    # The first two zeros of J0, squared, are factored out: near them the quotient keeps its digits.
    inner = (z - 5.78318596294678452118) * (z - 30.4712623436620863991) * _ratio(z, c.J0_NUM, c.J0_DEN)
    inner = jnp.where(x < 1e-5, 1 - z / 4, inner)
    return jnp.where(x <= 5, inner, _hankel(_large(x), 0)[0])


def _bessel_j1(x: Array) -> Array:
    size = jnp.abs(x)
    z = size * size
    # The same for the first two zeros of J1.
    inner = _ratio(z, c.J1_NUM, c.J1_DEN) * size * (z - 14.6819706421238932572) * (z - 49.2184563216946036703)
    out = jnp.where(size <= 5, inner, _hankel(_large(size), 1)[0])
    return jnp.where(x < 0, -out, out)


def _second_kind(x: Array, inner: Array, order: int) -> Array:
    """Y from its values up to 5: -inf at 0, nan below it."""
    out = jnp.where(x <= 5, inner, _hankel(_large(x), order)[1])
    out = jnp.where(x == 0, jnp.full_like(x, -jnp.inf), out)
    return jnp.where(x < 0, jnp.full_like(x, jnp.nan), out)


def _bessel_y0(x: Array) -> Array:
    z = x * x
    return _second_kind(x, _ratio(z, c.Y0_NUM, c.Y0_DEN) + 2 / math.pi * jnp.log(x) * _bessel_j0(x), 0)


def _bessel_y1(x: Array) -> Array:
    z = x * x
    logarithm = _bessel_j1(x) * jnp.log(x) - 1 / x
    return _second_kind(x, x * _ratio(z, c.Y1_NUM, c.Y1_DEN) + 2 / math.pi * logarithm, 1)


def _modified_bessel_k(x: Array, near: Array, far: Array, scaled: bool) -> Array:
    """K from its expansion up to 2 and that of K exp(x) beyond: infinite at 0, nan below it."""
    far = far / jnp.sqrt(x)
    # Scaled by exp(x): far away the plain function underflows, the scaled one does not.
    near, far = (near * jnp.exp(x), far) if scaled else (near, jnp.exp(-x) * far)
    out = jnp.where(x <= 2, near, far)
    out = jnp.where(x == 0, jnp.full_like(x, jnp.inf), out)
    return jnp.where(x < 0, jnp.full_like(x, jnp.nan), out)


def _modified_bessel_k0(x: Array, scaled: bool = False) -> Array:
    near = chebyshev_sum(x * x - 2, c.K0_NEAR) - jnp.log(0.5 * x) * jsp.i0(x)
    return _modified_bessel_k(x, near, chebyshev_sum(8 / x - 2, c.K0_FAR), scaled)


def _modified_bessel_k1(x: Array, scaled: bool = False) -> Array:
    near = jnp.log(0.5 * x) * jsp.i1(x) + chebyshev_sum(x * x - 2, c.K1_NEAR) / x
    return _modified_bessel_k(x, near, chebyshev_sum(8 / x - 2, c.K1_FAR), scaled)


def _spherical_bessel_j0(x: Array) -> Array:
    """sin(x) / x, by its series near 0, and 0 at infinity."""
    series = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)]
    out = jnp.where(jnp.abs(x) < 0.5, polynomial(x * x, series), jnp.sin(x) / x)
    return jnp.where(jnp.isinf(x), jnp.zeros_like(x), out)


def erfcx(x: Array) -> Array:
    """exp(x * x) * erfc(x) without the overflow."""
    size = jnp.abs(x)
    # [0, inf] is mapped to [-1, 1], where the Chebyshev series is; infinity over infinity would be nan.
    t = jnp.where(jnp.isinf(size), jnp.ones_like(x), (size - 3.75) / (size + 3.75))
    positive = chebyshev_sum(2 * t, c.ERFCX) / (1 + 2 * size)
    return jnp.where(x < 0, 2 * jnp.exp(x * x) - positive, positive)


for _op, _fn in {
    aten.special_airy_ai.default: _airy_ai,
    aten.special_bessel_j0.default: _bessel_j0,
    aten.special_bessel_j1.default: _bessel_j1,
    aten.special_bessel_y0.default: _bessel_y0,
    aten.special_bessel_y1.default: _bessel_y1,
    aten.special_modified_bessel_i0.default: jsp.i0,
    aten.special_modified_bessel_i1.default: jsp.i1,
    aten.special_modified_bessel_k0.default: _modified_bessel_k0,
    aten.special_modified_bessel_k1.default: _modified_bessel_k1,
    aten.special_scaled_modified_bessel_k0.default: lambda x: _modified_bessel_k0(x, scaled=True),
    aten.special_scaled_modified_bessel_k1.default: lambda x: _modified_bessel_k1(x, scaled=True),
    aten.special_spherical_bessel_j0.default: _spherical_bessel_j0,
    aten.special_erfcx.default: erfcx,
}.items():
    # torch has these in float32 and float64 only.
    elementwise(_op, promote_as=INT_TO_FLOAT, dtypes=FLOAT32_OR_64)(_fn)
