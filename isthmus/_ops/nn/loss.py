"""Losses and their gradients: elementwise in the computation dtype, then reduced as asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import accumulation_dtype, cast, keyword_signature, promote
from isthmus._ops.nn.activation import log_sigmoid
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require

Array = Any
_NONE, _MEAN = 0, 1


def reduce(loss: Array, reduction: int, dtype: Any) -> Array:
    """Return the loss as torch's ``reduction`` asks: as it is, its mean or its sum."""
    if reduction == _NONE:
        return cast(loss, dtype)
    # The mean of nothing is nan, as torch has it.
    return cast(loss.mean() if reduction == _MEAN else loss.sum(), dtype)


def _shared(grad: Array, shape: tuple[int, ...], reduction: int) -> Array:
    """Return the gradient of each element of the loss."""
    size = 1
    for n in shape:
        size *= n
    return jnp.broadcast_to(grad / max(size, 1) if reduction == _MEAN else grad, shape)


def _pointwise(op: Any, function: Callable[..., Array], option: str | None = None) -> None:
    """File a loss of two tensors and at most one static option."""

    def lowered(self: Array, target: Array, reduction: int = _MEAN, **options: Any) -> Array:
        compute, result = promote(self, target)
        loss = function(cast(self, compute), cast(target, compute), *options.values())
        return reduce(loss, reduction, result)

    _file(op, lowered, ["self", "target", "reduction"], option)


def _pointwise_backward(op: Any, function: Callable[..., Array], option: str | None = None) -> None:
    """File the gradient of such a loss: ``function`` gives the derivative for the first tensor."""

    def lowered(grad_output: Array, self: Array, target: Array, reduction: int, **options: Any) -> Array:
        compute, result = promote(self, target)
        x, y = jnp.broadcast_arrays(cast(self, compute), cast(target, compute))
        grad = _shared(cast(grad_output, compute), x.shape, reduction)
        return cast(function(x, y, *options.values()) * grad, result)

    _file(op, lowered, ["grad_output", "self", "target", "reduction"], option)


def _file(op: Any, lowered: Any, names: list[str], option: str | None) -> None:
    lowered.__signature__ = keyword_signature([*names, option] if option else names)
    lowering(op)(lowered)


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


_pointwise(aten.mse_loss.default, lambda x, y: jnp.square(x - y))
_pointwise(aten.smooth_l1_loss.default, _smooth_l1, "beta")
_pointwise(aten.huber_loss.default, _huber, "delta")
_pointwise(aten.soft_margin_loss.default, lambda x, y: jnp.log1p(jnp.exp(-y * x)))
_pointwise_backward(aten.mse_loss_backward.default, lambda x, y: 2 * (x - y))
_pointwise_backward(aten.smooth_l1_loss_backward.default, _smooth_l1_slope, "beta")
_pointwise_backward(aten.huber_loss_backward.default, _huber_slope, "delta")
_pointwise_backward(aten.soft_margin_loss_backward.default, _soft_margin_slope)


def _weighted(loss: Array, weight: Array | None) -> Array:
    return loss if weight is None else loss * cast(weight, loss.dtype)


@lowering(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    self: Array, target: Array, weight: Array | None = None, reduction: int = _MEAN
) -> Array:
    """Cross entropy of probabilities, each logarithm no lower than -100."""
    x, y = (cast(a, accumulation_dtype(self.dtype)) for a in (self, target))
    require((x >= 0) & (x <= 1), RuntimeError, "all elements of input should be between 0 and 1")
    require((y >= 0) & (y <= 1), RuntimeError, "all elements of target should be between 0 and 1")
    loss = (y - 1) * jnp.maximum(jnp.log1p(-x), -100) - y * jnp.maximum(jnp.log(x), -100)
    return reduce(_weighted(loss, weight), reduction, self.dtype)


@lowering(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    grad_output: Array, self: Array, target: Array, weight: Array | None = None, reduction: int = _MEAN
) -> Array:
    """The gradient of the cross entropy for the probabilities."""
    g, x, y = (cast(a, accumulation_dtype(self.dtype)) for a in (grad_output, self, target))
    slope = (x - y) / jnp.maximum((1 - x) * x, 1e-12)
    return cast(_weighted(_shared(g, x.shape, reduction) * slope, weight), self.dtype)


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
    target: Array, weight: Array | None, classes: int, ignore_index: int, dtype: Any
) -> Array:
    """Return the weight of each target, zero for one to be ignored, and require the rest to be classes."""
    ignored = target == ignore_index
    inside = (target >= 0) & (target < classes)
    require(ignored | inside, IndexError, "Target is out of bounds.")
    found = (
        jnp.ones(target.shape, dtype)
        if weight is None
        else cast(weight, dtype)[jnp.clip(target, 0, classes - 1)]
    )
    return jnp.where(ignored, jnp.zeros((), dtype), found)


def _nll(
    x: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    """The negative log likelihood, classes in dim 1 (or dim 0), and the weight it was averaged over."""
    dim, wide = min(1, x.ndim - 1), accumulation_dtype(x.dtype)
    target = target.astype(jnp.int64)
    weights = _target_weights(target, weight, x.shape[dim], ignore_index, wide)
    at = jnp.expand_dims(jnp.clip(target, 0, max(x.shape[dim] - 1, 0)), dim)
    picked = jnp.take_along_axis(cast(x, wide), at, axis=dim).squeeze(dim)
    # Where the weight is zero the likelihood may be infinite: choose, do not multiply.
    loss = jnp.where(target == ignore_index, jnp.zeros((), wide), -picked * weights)
    if reduction == _NONE and x.ndim > 1:
        return cast(loss, x.dtype), jnp.zeros((), x.dtype)
    total = weights.sum()
    found = loss.sum() / total if reduction == _MEAN else loss.sum()
    return cast(found, x.dtype), cast(total, x.dtype)


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
    dim, wide = min(1, x.ndim - 1), accumulation_dtype(x.dtype)
    target = target.astype(jnp.int64)
    weights = _target_weights(target, weight, x.shape[dim], ignore_index, wide)
    scale = cast(grad, wide) / cast(total, wide) if reduction == _MEAN else cast(grad, wide)
    each = jnp.where(target == ignore_index, jnp.zeros((), wide), -weights * scale)
    # Compared for every class of every target, and a GPU compares 32 bits at once.
    index = jnp.int32 if x.shape[dim] < 2**31 else jnp.int64
    classes = jnp.arange(x.shape[dim], dtype=index).reshape((-1,) + (1,) * (x.ndim - dim - 1))
    return classes == jnp.expand_dims(target.astype(index), dim), jnp.expand_dims(each, dim)


def _nll_pair(forward: Any, backward: Any) -> None:
    @lowering(forward)
    def forward_lowering(
        self: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
    ) -> tuple[Array, Array]:
        """The negative log likelihood of the targets, and their total weight."""
        return _nll(self, target, weight, reduction, ignore_index)

    @lowering(backward)
    def backward_lowering(
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


_nll_pair(aten.nll_loss_forward.default, aten.nll_loss_backward.default)
_nll_pair(aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default)
