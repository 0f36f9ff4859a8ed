"""Activations and their gradients, in torch's formulas, so that kinks and infinities agree too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from isthmus._graph.names import Missing, aten
from isthmus._ops.common import accumulation_dtype, cast, keyword_signature, promote, wrap_dim
from isthmus._ops.known_schemas import arguments_of
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported

Array = Any
TAKES_INTEGERS = (aten.hardtanh.default, aten.threshold.default, aten.threshold_backward.default)


def activation(op: Any, function: Callable[..., Any]) -> None:
    """File ``function`` for ``op``: its tensors in the computation dtype, its numbers cast to that dtype."""
    if isinstance(op, Missing):
        lowering(op)(function)
        return
    arguments = arguments_of(op)

    def lowered(**values: Any) -> Any:
        tensors = [values[a.name] for a in arguments if a.kind == "tensor"]
        compute, result = promote(*tensors)
        if not jnp.issubdtype(compute, jnp.inexact) and op not in TAKES_INTEGERS:
            raise Unsupported(f"{op} of {compute}, which torch refuses")
        given = [values[a.name] if a.kind == "static" else cast(values[a.name], compute) for a in arguments]
        found = function(*given)
        return tuple(cast(f, result) for f in found) if isinstance(found, tuple) else cast(found, result)

    lowered.__doc__ = function.__doc__
    lowered.__signature__ = keyword_signature([a.name for a in arguments])  # type: ignore[attr-defined]
    lowered.__wrapped_function__ = function  # type: ignore[attr-defined]
    lowering(op)(lowered)


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
    return jnp.minimum(jnp.maximum(x, low), high)


def _hardtanh_backward(grad: Array, x: Array, low: Array, high: Array) -> Array:
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


def _log_sigmoid_backward(grad: Array, x: Array) -> Array:
    z = jnp.exp(-jnp.abs(x))
    return grad * jnp.where(x < 0, 1 - z / (1 + z), z / (1 + z))


def _prelu_backward(grad: Array, x: Array, weight: Array) -> tuple[Array, Array]:
    positive = x > 0
    return jnp.where(positive, grad, weight * grad), jnp.where(positive, jnp.zeros_like(grad), x * grad)


def _logit_backward(grad: Array, x: Array, eps: float | None) -> Array:
    low, outside = (0.0, jnp.nan) if eps is None else (eps, 0.0)
    return jnp.where((x < low) | (x > 1 - low), jnp.full_like(grad, outside), grad / (x * (1 - x)))


ACTIVATIONS: dict[Any, Callable[..., Any]] = {
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.silu.default: lambda x: x * jax.nn.sigmoid(x),
    aten.silu_backward.default: _silu_backward,
    aten.elu.default: _elu,
    aten.elu_backward.default: _elu_backward,
    aten.leaky_relu.default: lambda x, slope: jnp.where(x > 0, x, x * slope),
    aten.leaky_relu_backward.default: lambda g, x, slope, _: jnp.where(x > 0, g, g * slope),
    aten.hardtanh.default: _hardtanh,
    aten.hardtanh_backward.default: _hardtanh_backward,
    aten.hardswish.default: _hardswish,
    aten.hardswish_backward.default: _hardswish_backward,
    aten.hardsigmoid.default: lambda x: jnp.clip(x + 3, 0, 6) / 6,
    aten.hardsigmoid_backward.default: _hardsigmoid_backward,
    aten.hardshrink.default: _hardshrink,
    aten.hardshrink_backward.default: _shrink_backward,
    aten.softshrink.default: _softshrink,
    aten.softshrink_backward.default: _shrink_backward,
    aten.threshold.default: lambda x, threshold, value: jnp.where(x <= threshold, value, x),
    aten.threshold_backward.default: lambda g, x, threshold: jnp.where(x <= threshold, jnp.zeros_like(g), g),
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
for _op, _fn in ACTIVATIONS.items():
    activation(_op, _fn)


@lowering(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(self: Array) -> tuple[Array, Array]:
    """The logarithm of the sigmoid, and the exponential that the CPU's backward starts from."""
    wide = cast(self, accumulation_dtype(self.dtype))
    return cast(log_sigmoid(wide), self.dtype), cast(jnp.exp(-jnp.abs(wide)), self.dtype)


@lowering(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(grad_output: Array, self: Array, buffer: Array) -> Array:
    """The gradient of ``log_sigmoid``, from its input alone."""
    wide = accumulation_dtype(self.dtype)
    return cast(_log_sigmoid_backward(cast(grad_output, wide), cast(self, wide)), self.dtype)


@lowering(aten.glu.default)
def glu(self: Array, dim: int = -1) -> Array:
    """One half gated by the sigmoid of the other."""
    a, b = jnp.split(cast(self, accumulation_dtype(self.dtype)), 2, axis=wrap_dim(dim, self.ndim))
    return cast(a * jax.nn.sigmoid(b), self.dtype)


@lowering(aten.glu_backward.default)
def glu_backward(grad_output: Array, self: Array, dim: int) -> Array:
    """The gradient of ``glu`` for both halves."""
    wide, axis = accumulation_dtype(self.dtype), wrap_dim(dim, self.ndim)
    a, b = jnp.split(cast(self, wide), 2, axis=axis)
    gate, grad = jax.nn.sigmoid(b), cast(grad_output, wide)
    return cast(jnp.concatenate([grad * gate, grad * a * gate * (1 - gate)], axis), self.dtype)


@lowering(aten.glu_jvp.default)
def glu_jvp(glu: Array, x: Array, dx: Array, dim: int) -> Array:
    """The tangent of ``glu``."""
    wide, axis = accumulation_dtype(x.dtype), wrap_dim(dim, x.ndim)
    b, (da, db) = jnp.split(cast(x, wide), 2, axis=axis)[1], jnp.split(cast(dx, wide), 2, axis=axis)
    gate = jax.nn.sigmoid(b)
    return cast(da * gate + cast(glu, wide) * (1 - gate) * db, glu.dtype)


@lowering(aten.glu_backward_jvp.default)
def glu_backward_jvp(
    grad_x: Array, grad_glu: Array, x: Array, dgrad_glu: Array, dx: Array, dim: int
) -> Array:
    """The tangent of the gradient of ``glu``."""
    _, tangent = jax.jvp(lambda g, v: glu_backward(g, v, dim), (grad_glu, x), (dgrad_glu, dx))
    return cast(tangent, grad_x.dtype)


@lowering(aten.rrelu_with_noise_functional.default, random=True)
def rrelu_with_noise(
    self: Array, noise: Array, rng: Any, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False
) -> tuple[Array, Array]:
    """A leaky ReLU: slopes drawn at random in training, kept in ``noise``, and their mean otherwise."""
    wide = accumulation_dtype(self.dtype)
    x, low, high = cast(self, wide), cast(lower, wide), cast(upper, wide)
    if not training:
        return cast(jnp.where(x > 0, x, x * ((low + high) / 2)), self.dtype), noise
    drawn = low + jax.random.uniform(rng, x.shape, wide) * (high - low)
    slopes = jnp.where(x <= 0, drawn, jnp.ones_like(drawn))
    return cast(x * slopes, self.dtype), cast(slopes, noise.dtype)
