"""Embeddings: rows of a table by index, and gradients added back into the table."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import accumulation_dtype, cast
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require

Array = Any


def _require_rows(indices: Array, rows: int) -> None:
    # XLA clamps an index that is out of range, where torch raises.
    require((indices >= 0) & (indices < rows), IndexError, "index out of range in self")


@lowering(aten.embedding.default)
def embedding(
    weight: Array,
    indices: Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Array:
    """The rows of ``weight`` that ``indices`` name; the other arguments concern the gradient."""
    _require_rows(indices, weight.shape[0])
    if weight.shape[0] == 0:
        return jnp.zeros((*indices.shape, *weight.shape[1:]), weight.dtype)
    return jnp.take(weight, indices, axis=0, mode="clip")


@lowering(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    grad_output: Array, indices: Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Array:
    """Each row's gradients summed, or averaged by frequency; none for the padding row."""
    width = grad_output.shape[indices.ndim :]
    wide, rows = accumulation_dtype(grad_output.dtype), indices.reshape(-1)
    grad = cast(grad_output, wide).reshape(rows.shape[0], *width)
    if scale_grad_by_freq:
        counts = jnp.zeros((num_weights,), jnp.int64).at[rows].add(1)
        grad = grad / counts[rows].astype(wide).reshape((-1,) + (1,) * len(width))
    # An index outside the table is dropped: the padding row is sent there.
    kept = jnp.where(rows == padding_idx, num_weights, rows)
    total = jnp.zeros((num_weights, *width), wide).at[kept].add(grad, mode="drop")
    return cast(total, grad_output.dtype)


@lowering(aten.embedding_renorm.default)
def embedding_renorm(self: Array, indices: Array, max_norm: float, norm_type: float) -> Array:
    """The table with each named row scaled down to ``max_norm`` where its norm is larger."""
    rows = indices.reshape(-1)
    _require_rows(rows, self.shape[0])
    wide = cast(self, accumulation_dtype(self.dtype))
    norms = jnp.linalg.norm(wide, ord=norm_type, axis=1, keepdims=True)
    named = jnp.zeros((self.shape[0], 1), bool).at[rows].set(True, mode="drop")
    scaled = wide * (max_norm / (norms + 1e-7))
    return cast(jnp.where(named & (norms > max_norm), scaled, wide), self.dtype)
