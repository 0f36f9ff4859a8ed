"""Gradients of gamma, beta and Dirichlet samples by their parameters, by the approximations torch uses.

Each is -(d cdf / d parameter) / pdf at the sample: a Taylor series near the ends of the support, Rice's saddle
point expansion for large parameters, and a fitted rational function between them.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import FLOAT32_OR_64, Array, cast
from isthmus._ops.math.bessel import polynomial
from isthmus._ops.registry import lowering

# fmt: off
_GAMMA = np.array([  # the power of log(x / alpha), then numerator and denominator by the power of log(alpha)
    [[0.16009398, -0.094634809, 0.025146376, -0.0030648343],
     [1, 0.32668115, 0.10406089, 0.0014179084]],
    [[0.53487893, 0.1298071, 0.065735949, -0.0015649758],
     [0.16639465, 0.020070113, -0.0035938915, -0.00058392623]],
    [[0.040121004, -0.0065914022, -0.0026286047, -0.0013441777],
     [0.017050642, -0.0021309326, 0.00085092367, -1.5247877e-07]],
])
_BETA = np.array([  # numerator and denominator, then by the powers of u, a and b
    [[[1.003668233, -0.01061107488, -0.0657888334, 0.01201642863],
      [0.6336835991, -0.3557432599, 0.05486251648, -0.001465281033],
      [-0.03276231906, 0.004474107445, 0.002429354597, -0.0001557569013]],
     [[0.221950385, -0.3187676331, 0.01799915743, 0.01074823814],
      [-0.2951249643, 0.06219954479, 0.01535556598, 0.001550077057],
      [0.02155310298, 0.004170831599, 0.001292462449, 6.976601077e-05]],
     [[-0.05980841433, 0.008441916499, 0.01085618172, 0.002319392565],
      [0.02911413504, 0.01400243777, -0.002721828457, 0.000751041181],
      [0.005900514878, -0.001936558688, -9.495446725e-06, 5.385558597e-05]]],
    [[[1, -0.02924021934, -0.04438342661, 0.007285809825],
      [0.6357567472, -0.3473456711, 0.05454656494, -0.002407477521],
      [-0.03301322327, 0.004845219414, 0.00231480583, -0.0002307248149]],
     [[0.5925320577, -0.1757678135, 0.01505928619, 0.000564515273],
      [0.1014815858, -0.06589186703, 0.01272886114, -0.0007316646956],
      [-0.007258481865, 0.001096195486, 0.0003934994223, -4.12701925e-05]],
     [[0.06469649321, -0.0236701437, 0.002902096474, -5.896963079e-05],
      [0.001925008108, -0.002869809258, 0.0008000589141, -6.063713228e-05],
      [-0.0003477407336, 6.959756487e-05, 1.097287507e-05, -1.650964693e-06]]],
])
_DIGAMMA = (
    8.33333333333333333333e-2, -2.10927960927960927961e-2, 7.57575757575757575758e-3, -4.16666666666666666667e-3,
    3.96825396825396825397e-3, -8.33333333333333333333e-3, 8.33333333333333333333e-2,
)
# fmt: on


def _digamma(x: Array) -> Array:
    """The digamma function, rounded as torch rounds it: differences of it are what counts."""
    total, point = jnp.zeros(x.shape, jnp.float64), x
    # psi(x) = psi(x + 1) - 1 / x, until x is past 10 and the series holds.
    for _ in range(10):
        small = point < 10
        total = jnp.where(small, total - (1 / point).astype(jnp.float64), total)
        point = jnp.where(small, point + 1, point)
    z = 1 / (point * point).astype(jnp.float64)
    out = total + jnp.log(point).astype(jnp.float64) - (0.5 / point).astype(jnp.float64)
    out = out - z * polynomial(z, _DIGAMMA)
    below = jax.lax.digamma(x)
    out = jnp.where(x < 0, below, out.astype(x.dtype))
    return jnp.where((x <= 0) & (x == jnp.floor(x)), jnp.full_like(x, jnp.inf), out)


def _powers(x: Array, count: int) -> Array:
    return jnp.stack([x**k for k in range(count)], axis=-1)


def _without_nan(x: Array) -> Array:
    return jnp.where(jnp.isnan(x), jnp.zeros_like(x), x)


@lowering(aten._standard_gamma_grad.default, dtypes=FLOAT32_OR_64)
def standard_gamma_grad(self: Array, output: Array) -> Array:
    """The gradient of ``output``, a sample of a standard gamma distribution, by its parameter."""
    alpha, x = jnp.broadcast_arrays(self.astype(jnp.float64), output.astype(jnp.float64))
    out = jnp.where(alpha > 8, _gamma_saddle(alpha, x), _gamma_rational(alpha, x))
    return jnp.where(x < np.float32(0.8), _gamma_small(alpha, x), out).astype(self.dtype)


def _gamma_small(alpha: Array, x: Array) -> Array:
    term, first, second = jnp.ones_like(x), 1 / alpha, 1 / (alpha * alpha)
    for i in range(1, 6):
        term = term * (-x / i)
        first, second = first + term / (alpha + i), second + term / (alpha + i) ** 2
    slope = (jnp.log(x) - _digamma(alpha)) * first - second
    # torch divides by the density, and answers 0 once that is too small for a double.
    vanishes = alpha * jnp.log(x) < math.log(math.ulp(0.0)) - math.log(2)
    return _without_nan(jnp.where(vanishes, jnp.zeros_like(x), -slope * x * jnp.exp(x)))


def _gamma_saddle(alpha: Array, x: Array) -> Array:
    middle = (1 + 24 * alpha * (1 + 12 * alpha)) * (
        1440 * alpha**2 + 6 * x * (53 - 120 * x) - 65 * x * x / alpha + alpha * (107 + 3600 * x)
    )
    middle = middle / (1244160 * alpha**4)
    ratio, scale = jnp.log(x / alpha), jnp.sqrt(8 * alpha)
    # The power of a negative base, where rounding leaves one, is nan as in torch.
    tail = jnp.power(x - alpha - alpha * ratio, -1.5)
    outer = ratio * (scale / (alpha - x) + jnp.where(x < alpha, -tail, tail))
    outer = outer - jnp.sqrt(2 / alpha) * (alpha + x) / (alpha - x) ** 2
    stirling = 1 + 1 / (12 * alpha) * (1 + 1 / (24 * alpha))
    near = (np.float32(0.9) * alpha <= x) & (x <= np.float32(1.1) * alpha)
    return jnp.where(near, middle, -stirling * (x * outer) / scale)


def _gamma_rational(alpha: Array, x: Array) -> Array:
    u, v = _powers(jnp.log(x / alpha), 3), _powers(jnp.log(alpha), 4)
    # Both polynomials in the two logarithms at once: powers by a table of coefficients.
    p, q = (jnp.sum((u @ jnp.asarray(_GAMMA[:, side])) * v, axis=-1) for side in (0, 1))
    return jnp.exp(p / q)


@lowering(aten._dirichlet_grad.default, dtypes=FLOAT32_OR_64)
def dirichlet_grad(x: Array, alpha: Array, total: Array) -> Array:
    """The scaled gradient of ``x``, a component of a Dirichlet sample, by its parameter ``alpha``."""
    x, alpha, total = jnp.broadcast_arrays(x, alpha, total)
    beta, edge = total - alpha, total * x * (1 - x)
    doubles = [cast(v, jnp.float64) for v in (x, alpha, total)]
    far = jnp.where((alpha > 6) & (beta > 6), _beta_saddle(*doubles), _beta_rational(*doubles))
    # torch's bounds, compared in the dtype of x: another rounding would take another formula.
    near_one, near_zero = (x >= 0.5) & (edge < 0.75), (x <= 0.5) & (edge < 2.5)
    out = jnp.where(near_one, -_beta_small_by_beta(1 - x, beta, alpha), far.astype(x.dtype))
    return jnp.where(near_zero, _beta_small_by_alpha(x, alpha, beta), out)


def _beta_small_by_alpha(x: Array, alpha: Array, beta: Array) -> Array:
    factor = _digamma(alpha) - _digamma(alpha + beta) - jnp.log(x)
    term, series = jnp.ones_like(x), 1 / alpha * (factor + 1 / alpha)
    for i in range(1, 11):
        term = term * ((i - beta) * x / i)
        series = series + term / (alpha + i) * (factor + 1 / (alpha + i))
    return _without_nan(x * jnp.power(1 - x, -beta) * series)


def _beta_small_by_beta(x: Array, alpha: Array, beta: Array) -> Array:
    factor = _digamma(alpha + beta) - _digamma(beta)
    term, betas, slopes = jnp.ones_like(x), jnp.ones_like(x), jnp.zeros_like(x)
    series = factor / alpha
    for i in range(1, 9):
        term = term * (-x / i)
        slopes = slopes * (beta - i) + betas
        betas = betas * (beta - i)
        series = series + term / (alpha + i) * (slopes + factor * betas)
    return _without_nan(-jnp.power(1 - x, 1 - beta) * series)


def _beta_saddle(x: Array, alpha: Array, total: Array) -> Array:
    beta = total - alpha
    mean, spread = alpha / total, jnp.sqrt(alpha * beta / (total + 1)) / total
    prefactor = -x / jnp.sqrt(2 * alpha * beta / total)
    stirling = _stirling(alpha) * _stirling(beta) / _stirling(total)
    offset = alpha * (x - 1) + beta * x
    first = 2 * alpha**2 * (x - 1) + alpha * beta * (x - 1) - x * beta**2
    first = first / (jnp.sqrt(2 * alpha / beta) * jnp.power(total, 1.5) * offset**2)
    second = 0.5 * jnp.log(alpha / (total * x))
    third = jnp.sqrt(8 * alpha * beta / total) / offset
    distance = beta * jnp.log(beta / (total * (1 - x))) + alpha * jnp.log(alpha / (total * x))
    fourth = jnp.power(distance, -1.5)
    outer = stirling * prefactor * (first + second * (third + jnp.where(x < mean, fourth, -fourth)))
    near = (mean - 0.1 * spread <= x) & (x <= mean + 0.1 * spread)
    return jnp.where(near, _beta_at_mean(x, alpha, beta), outer)


def _stirling(x: Array) -> Array:
    return 1 + 1 / (12 * x) + 1 / (288 * x * x)


def _beta_at_mean(x: Array, alpha: Array, beta: Array) -> Array:
    """The saddle point expansion about its singularity at the mean."""
    total = alpha + beta
    poly = 8 * (1 - x) * (135 * beta - 11)
    poly = (453 + 1620 * beta * (1 - x) - 455 * x) * beta + alpha * poly
    poly = 3 * (59 + 180 * beta - 90 * x) * beta**2 + alpha * poly
    poly = (43 + 20 * (16 + 27 * beta) * x) * beta**3 + alpha * poly
    poly = 47 * x * beta**4 + alpha * poly
    numerator = (1 + 12 * alpha) * (1 + 12 * beta) / total**2
    return numerator / (1 - x) * poly / (12960 * alpha**3 * beta**2 * (1 + 12 * total))


def _beta_rational(x: Array, alpha: Array, total: Array) -> Array:
    u = jnp.log(x)
    a = jnp.log(alpha) - u
    b = jnp.log(total) - a
    powers = (_powers(u, 3), _powers(a, 3), _powers(b, 4))
    p, q = (jnp.einsum("...i,...j,...k,ijk->...", *powers, jnp.asarray(table)) for table in _BETA)
    return p / q * (x * (_digamma(total) - _digamma(alpha)) / (total - alpha))
