"""Margin losses of one and of many classes; torch has them in float32 and float64 only."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import FLOAT32_OR_64, Array, Scalar, cast
from isthmus._ops.nn.loss import reduce
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported

_NONE, _MEAN = 0, 1


def _rows(x: Array, target: Array) -> tuple[Array, Array]:
    """Return the scores one row a sample, and the targets likewise."""
    if target.dtype != np.int64:
        raise Unsupported(f"targets of {target.dtype}, which torch refuses as well")
    samples = x.shape[0] if x.ndim > 1 else 1
    return x.reshape(samples, x.size // max(samples, 1)), target.reshape(
        samples, target.size // max(samples, 1)
    )


def _margins(
    rows: Array, target: Array, p: float, margin: Scalar, weight: Array | None
) -> tuple[Array, Array, Array]:
    """Return by how much each other class comes too near the target, the target's place, and its weight."""
    if p not in (1, 2):
        raise Unsupported("only p == 1 and p == 2 supported")
    classes = rows.shape[1]
    require((target >= 0) & (target < classes), RuntimeError, "target out of range")
    label = jnp.clip(target, 0, max(classes - 1, 0))
    away = cast(margin, rows.dtype) - jnp.take_along_axis(rows, label, 1) + rows
    own = jnp.arange(classes) == label
    # Chosen, not clipped: torch counts a nan as no violation.
    near = jnp.where((away > 0) & ~own, away, jnp.zeros((), rows.dtype))
    scale = jnp.ones((), rows.dtype) if weight is None else weight[label]
    return near, own, scale


@lowering(aten.multi_margin_loss.default, static=["p"], dtypes=FLOAT32_OR_64)
def multi_margin_loss(
    self: Array,
    target: Array,
    p: float = 1,
    margin: Scalar = 1,
    weight: Array | None = None,
    reduction: int = _MEAN,
) -> Array:
    """How far each class is from being ``margin`` below the target, averaged over the classes."""
    rows, labels = _rows(self, target)
    if not self.size:
        return jnp.zeros(target.shape if reduction == _NONE else (), self.dtype)
    near, _, scale = _margins(rows, labels, p, margin, weight)
    loss = ((near if p == 1 else near * near) * scale).sum(1) / rows.shape[1]
    return reduce(loss.reshape(target.shape) if reduction == _NONE else loss, reduction, self.dtype)


@lowering(aten.multi_margin_loss_backward.default, static=["p"], dtypes=FLOAT32_OR_64)
def multi_margin_loss_backward(
    grad_output: Array,
    self: Array,
    target: Array,
    p: float,
    margin: Scalar,
    weight: Array | None = None,
    reduction: int = _MEAN,
) -> Array:
    """The gradient for the scores: the target's is what all others push down."""
    rows, labels = _rows(self, target)
    if not self.size:
        return jnp.zeros(self.shape, self.dtype)
    near, own, scale = _margins(rows, labels, p, margin, weight)
    slope = (near > 0).astype(rows.dtype) if p == 1 else 2 * near
    # The loss was averaged over the classes, and over the samples too where it was reduced to a mean.
    slope = slope * scale / (rows.shape[1] * (rows.shape[0] if reduction == _MEAN else 1))
    gradient = jnp.where(own, -slope.sum(1, keepdims=True), slope)
    return (gradient * grad_output.reshape(-1, 1)).reshape(self.shape)


def _labels(rows: Array, target: Array) -> tuple[Array, Array]:
    """Return which targets come before the first -1, and how often each class is among them."""
    classes = rows.shape[1]
    inside = (target >= -1) & (target < classes)
    require(inside, RuntimeError, "argument #2 'target' is out of range")
    # A product of truths: the first -1 ends the list for good.
    real = jnp.cumprod(target >= 0, axis=1).astype(bool)
    samples = jnp.arange(rows.shape[0])[:, None]
    counts = (
        jnp.zeros(rows.shape, rows.dtype).at[samples, jnp.where(real, target, classes)].add(1, mode="drop")
    )
    return real, counts


def _violations(rows: Array, target: Array, real: Array, others: Array) -> Array:
    """Return by how much each class (last dim) that is no target comes too near each target (dim 1)."""
    labels = jnp.clip(target, 0, rows.shape[1] - 1)
    away = 1 - jnp.take_along_axis(rows, labels, 1)[:, :, None] + rows[:, None, :]
    return jnp.where((away > 0) & real[:, :, None] & others[:, None, :], away, jnp.zeros((), rows.dtype))


@lowering(aten.multilabel_margin_loss_forward.default, dtypes=FLOAT32_OR_64)
def multilabel_margin_loss_forward(self: Array, target: Array, reduction: int) -> tuple[Array, Array]:
    """How far other classes are from being 1 below each target, and which classes are targets."""
    rows, labels = _rows(self, target)
    if not self.size:
        shape = self.shape[:-1] if reduction == _NONE else ()
        return jnp.zeros(shape, self.dtype), jnp.zeros(target.shape, self.dtype)
    real, counts = _labels(rows, labels)
    loss = _violations(rows, labels, real, counts == 0).sum((1, 2)) / rows.shape[1]
    each = loss.reshape(self.shape[:-1]) if reduction == _NONE else loss
    return reduce(each, reduction, self.dtype), (counts > 0).astype(self.dtype).reshape(target.shape)


@lowering(aten.multilabel_margin_loss_backward.default, dtypes=FLOAT32_OR_64)
def multilabel_margin_loss_backward(
    grad_output: Array, self: Array, target: Array, reduction: int, is_target: Array
) -> Array:
    """The gradient for the scores: up for each target, down for each class too near it."""
    rows, labels = _rows(self, target)
    if not self.size:
        return jnp.zeros(self.shape, self.dtype)
    real, _ = _labels(rows, labels)
    # Which classes are no targets comes from the tensor that forward saved, as in torch.
    hits = _violations(rows, labels, real, is_target.reshape(rows.shape) == 0) > 0
    samples = jnp.arange(rows.shape[0])[:, None]
    columns = jnp.where(real, labels, rows.shape[1])
    down = hits.sum(1).astype(rows.dtype)
    gradient = down.at[samples, columns].add(-hits.sum(2).astype(rows.dtype), mode="drop")
    scale = rows.shape[1] * (rows.shape[0] if reduction == _MEAN else 1)
    return (gradient / scale * grad_output.reshape(-1, 1)).reshape(self.shape)
