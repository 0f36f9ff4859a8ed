"""Log-softmax with its sums, and gradients from logits: the ops of ``_graph/passes/cross_entropy.py``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from isthmus._graph.passes.cross_entropy import GRADIENT, LOSS_GRADIENT, WITH_SUMS
from isthmus._ops.common import accumulation_dtype, cast
from isthmus._ops.nn.loss import nll_gradient
from isthmus._ops.registry import lowering

Array = jax.Array


@lowering(WITH_SUMS)
def log_softmax_with_sums(self: Array, dim: int, half_to_float: bool) -> tuple[Array, Array, Array]:
    """Log-softmax, the largest element of each row, and the logarithm of the sum of ``exp(self - largest)``."""
    wide = cast(self, accumulation_dtype(self.dtype))
    largest = wide.max(dim, keepdims=True, initial=-jnp.inf)  # a row may be empty
    total = jnp.log(jnp.exp(wide - largest).sum(dim, keepdims=True))
    return cast(wide - largest - total, jnp.float32 if half_to_float else self.dtype), largest, total


@lowering(GRADIENT)
def log_softmax_gradient(
    self: Array,
    largest: Array,
    total: Array,
    dim: int,
    result_dtype: DTypeLike,
    dtype: DTypeLike,
    grad: Array,
) -> Array:
    """The gradient of log-softmax for its input."""
    wide = cast(grad, largest.dtype)
    likelihood = _likelihood(self, largest, total, result_dtype)
    return cast(wide - likelihood * wide.sum(dim, keepdims=True), dtype)


@lowering(LOSS_GRADIENT)
def cross_entropy_gradient(
    self: Array,
    largest: Array,
    total: Array,
    dim: int,
    result_dtype: DTypeLike,
    dtype: DTypeLike,
    grad: Array,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: Array,
) -> Array:
    """The gradient of log-softmax followed by the negative likelihood of targets."""
    # A row's gradient is zero but for its target's, so that one is the row's sum.
    hit, each = nll_gradient(grad, self, target, weight, reduction, ignore_index, total_weight)
    of_loss = jnp.where(hit, each, jnp.zeros((), each.dtype))
    return cast(of_loss - _likelihood(self, largest, total, result_dtype) * each, dtype)


def _likelihood(x: Array, largest: Array, total: Array, result_dtype: DTypeLike) -> Array:
    """The exponential of log-softmax, rounded as its result in forward was."""
    result = cast(cast(x, largest.dtype) - largest - total, result_dtype)
    return jnp.exp(cast(result, largest.dtype))
