"""Losses and their gradients: elementwise in the computation dtype, then reduced as asked."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax.typing import DTypeLike

from isthmus._graph.names import aten
from isthmus._ops.common import Array, ArrayFunction, accumulation_dtype, cast, promote
from isthmus._ops.elementwise import keyword_signature
from isthmus._ops.nn.activation import log_sigmoid
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require

_NONE, _MEAN = 0, 1


def reduce(loss: Array, reduction: int, dtype: DTypeLike) -> Array:
    """Return the loss as torch's ``reduction`` asks: as it is, its mean or its sum."""
    if reduction == _NONE:
        return cast(loss, dtype)
    # The mean of nothing is nan, as torch has it.
    return cast(loss.mean() if reduction == _MEAN else loss.sum(), dtype)


def _shared(grad: Array, shape: tuple[int, ...], reduction: int) -> Array:
    """Return the gradient of each element of the loss."""
    return jnp.broadcast_to(grad / max(math.prod(shape), 1) if reduction == _MEAN else grad, shape)


def _pointwise(
    function: ArrayFunction, self: Array, target: Array, reduction: int = _MEAN, **options: float
) -> Array:
    """A loss of two tensors and at most one static option, reduced."""
    compute, result = promote(self, target)
    loss = function(cast(self, compute), cast(target, compute), *options.values())
    return reduce(loss, reduction, result)


def _pointwise_backward(
    slope: ArrayFunction,
    grad_output: Array,
    self: Array,
    target: Array,
    reduction: int,
    **options: float,
) -> Array:
    """The gradient of a pointwise loss, given its derivative for the first tensor."""
    compute, result = promote(self, target)
    x, y = jnp.broadcast_arrays(cast(self, compute), cast(target, compute))
    grad = _shared(cast(grad_output, compute), x.shape, reduction)
    return cast(slope(x, y, *options.values()) * grad, result)


def _register_pair(name: str, loss: ArrayFunction, slope: ArrayFunction, *options: str) -> None:
    forward, backward = functools.partial(_pointwise, loss), functools.partial(_pointwise_backward, slope)
    names = ["self", "target", "reduction", *options]
    # The option has another name in each schema, so its parameter is written here.
    forward.__signature__ = keyword_signature(names)  # type: ignore[attr-defined]
    backward.__signature__ = keyword_signature(["grad_output", *names])  # type: ignore[attr-defined]
    lowering(getattr(aten, name).default)(forward)
    lowering(getattr(aten, f"{name}_backward").default)(backward)


def _smooth_l1(x: Array, y: Array, beta: float) -> Array:
    z = jnp.abs(x - y)
    return jnp.where(z < beta, 0.5 * z * z / beta, z - 0.5 * beta) if beta else z


def _smooth_l1_slope(x: Array, y: Array, beta: float) -> Array:
    z = x - y
    sign = (z > 0).astype(z.dtype) - (z < 0).astype(z.dtype)
    return jnp.where(jnp.abs(z) >= beta, sign, z / beta) if beta else sign


def _huber(x: Array, y: Array, delta: float) -> Array:
    z = jnp.abs(x - y)
    return jnp.where(z < delta, 0.5 * z * z, delta * (z - 0.5 * delta))


def _huber_slope(x: Array, y: Array, delta: float) -> Array:
    z = x - y
    return jnp.where(z <= -delta, -delta, jnp.where(z >= delta, delta, z))


def _soft_margin_slope(x: Array, y: Array) -> Array:
    z = jnp.exp(-y * x)
    return -y * z / (z + 1)


_register_pair("mse_loss", lambda x, y: jnp.square(x - y), lambda x, y: 2 * (x - y))
_register_pair("smooth_l1_loss", _smooth_l1, _smooth_l1_slope, "beta")
_register_pair("huber_loss", _huber, _huber_slope, "delta")
_register_pair("soft_margin_loss", lambda x, y: jnp.log1p(jnp.exp(-y * x)), _soft_margin_slope)


def _weighted(loss: Array, weight: Array | None) -> Array:
    return loss if weight is None else loss * cast(weight, loss.dtype)


@lowering(aten.binary_cross_entropy.default, accumulate=True)
def binary_cross_entropy(
    self: Array, target: Array, weight: Array | None = None, reduction: int = _MEAN
) -> Array:
    """Cross entropy of probabilities, each logarithm no lower than -100."""
    require((self >= 0) & (self <= 1), RuntimeError, "all elements of input should be between 0 and 1")
    require((target >= 0) & (target <= 1), RuntimeError, "all elements of target should be between 0 and 1")
    # torch's clamp: the logarithm of zero would be minus infinity, and 0 times that nan.
    loss = (target - 1) * jnp.maximum(jnp.log1p(-self), -100) - target * jnp.maximum(jnp.log(self), -100)
    return reduce(_weighted(loss, weight), reduction, self.dtype)


@lowering(aten.binary_cross_entropy_backward.default, accumulate="self")
def binary_cross_entropy_backward(
    grad_output: Array, self: Array, target: Array, weight: Array | None = None, reduction: int = _MEAN
) -> Array:
    """The gradient of the cross entropy for the probabilities."""
    # torch's EPSILON, which keeps the slope finite at probabilities of 0 and 1.
    slope = (self - target) / jnp.maximum((1 - self) * self, 1e-12)
    return _weighted(_shared(grad_output, self.shape, reduction) * slope, weight)


@lowering(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    self: Array,
    target: Array,
    weight: Array | None = None,
    pos_weight: Array | None = None,
    reduction: int = _MEAN,
) -> Array:
    """Cross entropy of logits, safe at both ends."""
    compute, result = promote(self, target, weight, pos_weight)
    x, y = cast(self, compute), cast(target, compute)
    scale = 1 if pos_weight is None else (cast(pos_weight, compute) - 1) * y + 1
    return reduce(_weighted((1 - y) * x - log_sigmoid(x) * scale, weight), reduction, result)


def _target_weights(
    target: Array, weight: Array | None, classes: int, ignore_index: int, dtype: DTypeLike
) -> Array:
    """Return the weight of each target, zero for one to be ignored, and require the rest to be classes."""
    ignored = target == ignore_index
    inside = (target >= 0) & (target < classes)
    require(ignored | inside, IndexError, "Target is out of bounds.")
    weights = (
        jnp.ones(target.shape, dtype)
        if weight is None
        else cast(weight, dtype)[jnp.clip(target, 0, classes - 1)]
    )
    return jnp.where(ignored, jnp.zeros((), dtype), weights)


@lowering(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, accumulate=True)
def nll_loss_forward(
    self: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    """The negative log likelihood, classes in dim 1 (or dim 0), and the weight it was averaged over."""
    dim, target = min(1, self.ndim - 1), target.astype(jnp.int64)
    weights = _target_weights(target, weight, self.shape[dim], ignore_index, self.dtype)
    classes = jnp.expand_dims(jnp.clip(target, 0, max(self.shape[dim] - 1, 0)), dim)
    likelihood = jnp.take_along_axis(self, classes, axis=dim).squeeze(dim)
    # Where the weight is zero the likelihood may be infinite: choose, do not multiply.
    loss = jnp.where(target == ignore_index, jnp.zeros((), self.dtype), -likelihood * weights)
    if reduction == _NONE and self.ndim > 1:
        return loss, jnp.zeros((), self.dtype)
    total = weights.sum()
    return loss.sum() / total if reduction == _MEAN else loss.sum(), total


def nll_gradient(
    grad: Array,
    x: Array,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignore_index: int,
    total: Array,
) -> tuple[Array, Array]:
    """Return which log probabilities are their targets', and the gradient of each target's."""
    dim, acc_dtype = min(1, x.ndim - 1), accumulation_dtype(x.dtype)
    target = target.astype(jnp.int64)
    weights = _target_weights(target, weight, x.shape[dim], ignore_index, acc_dtype)
    scale = cast(grad, acc_dtype) / cast(total, acc_dtype) if reduction == _MEAN else cast(grad, acc_dtype)
    each = jnp.where(target == ignore_index, jnp.zeros((), acc_dtype), -weights * scale)
    # Compared for every class of every target, and a GPU compares 32 bits at once.
    index = jnp.int32 if x.shape[dim] < 2**31 else jnp.int64
    classes = jnp.arange(x.shape[dim], dtype=index).reshape((-1,) + (1,) * (x.ndim - dim - 1))
    return classes == jnp.expand_dims(target.astype(index), dim), jnp.expand_dims(each, dim)


@lowering(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad_output: Array,
    self: Array,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: Array,
) -> Array:
    """The gradient of the negative log likelihood for the log probabilities."""
    hit, each = nll_gradient(grad_output, self, target, weight, reduction, ignore_index, total_weight)
    return cast(jnp.where(hit, each, jnp.zeros((), each.dtype)), self.dtype)
