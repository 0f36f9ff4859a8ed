"""Activations and their gradients, in torch's formulas, so that kinks and infinities agree too."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._graph.private import Op
from isthmus._ops.common import INEXACT, Array, ArrayFunction, Scalar, cast, wrap_dim
from isthmus._ops.elementwise import Computation, elementwise
from isthmus._ops.registry import lowering

# The constants of the tanh approximation of gelu (Hendrycks and Gimpel, 2016).
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


def _gelu(x: Array, approximate: str) -> Array:
    if approximate == "tanh":
        return 0.5 * x * (1 + jnp.tanh(_TANH_SCALE * (x + _TANH_CUBE * x * x * x)))
    return x * 0.5 * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def _gelu_backward(grad: Array, x: Array, approximate: str) -> Array:
    if approximate == "tanh":
        t = jnp.tanh(_TANH_SCALE * (x + _TANH_CUBE * x * x * x))
        slope = _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)
        return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)
    cdf = 0.5 * (1 + jax.lax.erf(x * math.sqrt(0.5)))
    return grad * (cdf + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


def _silu_backward(grad: Array, x: Array) -> Array:
    s = jax.nn.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


def _elu(x: Array, alpha: Array, scale: Array, input_scale: Array) -> Array:
    return jnp.where(x <= 0, jnp.expm1(x * input_scale) * (alpha * scale), x * scale)


def _elu_backward(
    grad: Array, alpha: Array, scale: Array, input_scale: Array, is_result: bool, x: Array
) -> Array:
    below = x + alpha * scale if is_result else alpha * scale * jnp.exp(x * input_scale)
    return jnp.where(x <= 0, grad * input_scale * below, grad * scale)


def _hardtanh(x: Array, low: Array, high: Array) -> Array:
    # The lower bound first, as torch: where the bounds cross, the upper one wins.
    return jnp.minimum(jnp.maximum(x, low), high)


def _hardtanh_backward(grad: Array, x: Array, low: Array, high: Array) -> Array:
    # Zero at both bounds: a gradient through minimum and maximum would give a half.
    return jnp.where((x <= low) | (x >= high), jnp.zeros_like(grad), grad)


def _hardswish(x: Array) -> Array:
    return x * jnp.clip(x + 3, 0, 6) / 6


def _hardswish_backward(grad: Array, x: Array) -> Array:
    inside = jnp.where(x < 3, grad * (x / 3 + 0.5), grad)
    return jnp.where(x <= -3, jnp.zeros_like(grad), inside)


def _hardsigmoid_backward(grad: Array, x: Array) -> Array:
    return jnp.where((x > -3) & (x < 3), grad / 6, jnp.zeros_like(grad))


def _hardshrink(x: Array, lambd: Array) -> Array:
    return jnp.where((x >= -lambd) & (x <= lambd), jnp.zeros_like(x), x)


def _shrink_backward(grad: Array, x: Array, lambd: Array) -> Array:
    return jnp.where((x >= -lambd) & (x <= lambd), jnp.zeros_like(grad), grad)


def _softshrink(x: Array, lambd: Array) -> Array:
    # Zero times x, not zero: a nan stays one.
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0))


def _softplus(x: Array, beta: Array, threshold: Array) -> Array:
    # Beyond the threshold torch takes x itself: the exponential would overflow, and the rest is below an ulp.
    return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(x * beta)) / beta)


def _softplus_backward(grad: Array, x: Array, beta: Array, threshold: Array) -> Array:
    z = jnp.exp(x * beta)
    return jnp.where(x * beta > threshold, grad, grad * z / (z + 1))


def _mish(x: Array) -> Array:
    return x * jnp.tanh(jax.nn.softplus(x))


def _mish_backward(grad: Array, x: Array) -> Array:
    t = jnp.tanh(jax.nn.softplus(x))
    return grad * (t + x * jax.nn.sigmoid(x) * (1 - t * t))


def log_sigmoid(x: Array) -> Array:
    """The logarithm of the sigmoid, safe at both ends."""
    return jnp.minimum(x, 0) - jnp.log1p(jnp.exp(-jnp.abs(x)))


def _prelu_backward(grad: Array, x: Array, weight: Array) -> tuple[Array, Array]:
    positive = x > 0
    return jnp.where(positive, grad, weight * grad), jnp.where(positive, jnp.zeros_like(grad), x * grad)


def _logit_backward(grad: Array, x: Array, eps: float | None) -> Array:
    # Without eps the function has no value outside [0, 1]; with it, the input was clamped and its gradient is zero.
    low, outside = (0.0, jnp.nan) if eps is None else (eps, 0.0)
    return jnp.where((x < low) | (x > 1 - low), jnp.full_like(grad, outside), grad / (x * (1 - x)))


ACTIVATIONS: dict[Op, Computation] = {
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.silu.default: lambda x: x * jax.nn.sigmoid(x),
    aten.silu_backward.default: _silu_backward,
    aten.elu.default: _elu,
    aten.elu_backward.default: _elu_backward,
    aten.leaky_relu.default: lambda x, slope: jnp.where(x > 0, x, x * slope),
    aten.leaky_relu_backward.default: lambda g, x, slope, _: jnp.where(x > 0, g, g * slope),
    aten.hardtanh_backward.default: _hardtanh_backward,
    aten.hardswish.default: _hardswish,
    aten.hardswish_backward.default: _hardswish_backward,
    aten.hardsigmoid.default: lambda x: jnp.clip(x + 3, 0, 6) / 6,
    aten.hardsigmoid_backward.default: _hardsigmoid_backward,
    aten.hardshrink.default: _hardshrink,
    aten.hardshrink_backward.default: _shrink_backward,
    aten.softshrink.default: _softshrink,
    aten.softshrink_backward.default: _shrink_backward,
    aten.softplus.default: _softplus,
    aten.softplus_backward.default: _softplus_backward,
    aten.mish.default: _mish,
    aten.mish_backward.default: _mish_backward,
    aten._prelu_kernel.default: lambda x, weight: jnp.where(x > 0, x, weight * x),
    aten._prelu_kernel_backward.default: _prelu_backward,
    aten.sigmoid_backward.default: lambda g, y: g * jnp.conj((1 - y) * y),
    aten.tanh_backward.default: lambda g, y: g * jnp.conj(1 - y * y),
    aten.logit_backward.default: _logit_backward,
}
# torch takes integers here as well.
TAKES_INTEGERS: dict[Op, ArrayFunction] = {
    aten.hardtanh.default: _hardtanh,
    aten.threshold.default: lambda x, threshold, value: jnp.where(x <= threshold, value, x),
    aten.threshold_backward.default: lambda g, x, threshold: jnp.where(x <= threshold, jnp.zeros_like(g), g),
}
# A threshold or a slope is cast to the dtype of the tensors: a float beside integers does not make them floats.
for _op, _fn in ACTIVATIONS.items():
    elementwise(_op, numbers_promote=False, dtypes=INEXACT)(_fn)
for _op, _fn in TAKES_INTEGERS.items():
    elementwise(_op, numbers_promote=False)(_fn)


@lowering(aten.log_sigmoid_forward.default, accumulate=True)
def log_sigmoid_forward(self: Array) -> tuple[Array, Array]:
    """The logarithm of the sigmoid, and the exponential that the CPU's backward starts from."""
    return log_sigmoid(self), jnp.exp(-jnp.abs(self))


@lowering(aten.log_sigmoid_backward.default, accumulate="self")
def log_sigmoid_backward(grad_output: Array, self: Array, buffer: Array) -> Array:
    """The gradient of ``log_sigmoid``, from its input alone: ``buffer`` is empty on some devices."""
    z = jnp.exp(-jnp.abs(self))
    return grad_output * jnp.where(self < 0, 1 - z / (1 + z), z / (1 + z))


@lowering(aten.glu.default, accumulate=True)
def glu(self: Array, dim: int = -1) -> Array:
    """One half gated by the sigmoid of the other."""
    a, b = jnp.split(self, 2, axis=wrap_dim(dim, self.ndim))
    return a * jax.nn.sigmoid(b)


@lowering(aten.glu_backward.default, accumulate="self")
def glu_backward(grad_output: Array, self: Array, dim: int) -> Array:
    """The gradient of ``glu`` for both halves."""
    axis = wrap_dim(dim, self.ndim)
    a, b = jnp.split(self, 2, axis=axis)
    gate = jax.nn.sigmoid(b)
    return jnp.concatenate([grad_output * gate, grad_output * a * gate * (1 - gate)], axis)


@lowering(aten.glu_jvp.default, accumulate="glu")
def glu_jvp(glu: Array, x: Array, dx: Array, dim: int) -> Array:
    """The tangent of ``glu``."""
    axis = wrap_dim(dim, x.ndim)
    b, (da, db) = jnp.split(x, 2, axis=axis)[1], jnp.split(dx, 2, axis=axis)
    gate = jax.nn.sigmoid(b)
    return da * gate + glu * (1 - gate) * db


@lowering(aten.glu_backward_jvp.default)
def glu_backward_jvp(
    grad_x: Array, grad_glu: Array, x: Array, dgrad_glu: Array, dx: Array, dim: int
) -> Array:
    """The tangent of the gradient of ``glu``."""
    _, tangent = jax.jvp(lambda g, v: glu_backward(g, v, dim), (grad_glu, x), (dgrad_glu, dx))
    return cast(tangent, grad_x.dtype)


@lowering(aten.rrelu_with_noise_functional.default, random=True, accumulate=("self", "noise"))
def rrelu_with_noise(
    self: Array,
    noise: Array,
    rng: Array,
    lower: Scalar = 0.125,
    upper: Scalar = 1 / 3,
    training: bool = False,
) -> tuple[Array, Array]:
    """A leaky ReLU: slopes drawn at random in training, which ``noise`` saves for backward, their mean otherwise."""
    low, high = cast(lower, self.dtype), cast(upper, self.dtype)
    if not training:
        return jnp.where(self > 0, self, self * ((low + high) / 2)), noise
    drawn = low + jax.random.uniform(rng, self.shape, self.dtype) * (high - low)
    slopes = jnp.where(self <= 0, drawn, jnp.ones_like(drawn))
    return self * slopes, slopes
