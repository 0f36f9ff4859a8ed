"""Embeddings: rows of a table by index, and gradients added back into the table."""

from __future__ import annotations

import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import Array
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require


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


@lowering(aten.embedding_dense_backward.default, accumulate=True)
def embedding_dense_backward(
    grad_output: Array, indices: Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Array:
    """Each row's gradients summed, or averaged by frequency; none for the padding row."""
    width, rows = grad_output.shape[indices.ndim :], indices.reshape(-1)
    grad = grad_output.reshape(rows.shape[0], *width)
    if scale_grad_by_freq:
        counts = jnp.zeros((num_weights,), jnp.int64).at[rows].add(1)
        grad = grad / counts[rows].astype(grad.dtype).reshape((-1,) + (1,) * len(width))
    # An index outside the table is dropped: the padding row is sent there.
    rows = jnp.where(rows == padding_idx, num_weights, rows)
    return jnp.zeros((num_weights, *width), grad.dtype).at[rows].add(grad, mode="drop")


@lowering(aten.embedding_renorm.default, accumulate=True)
def embedding_renorm(self: Array, indices: Array, max_norm: float, norm_type: float) -> Array:
    """The table with each named row scaled down to ``max_norm`` where its norm is larger."""
    rows = indices.reshape(-1)
    _require_rows(rows, self.shape[0])
    norms = jnp.linalg.norm(self, ord=norm_type, axis=1, keepdims=True)
    named = jnp.zeros((self.shape[0], 1), bool).at[rows].set(True, mode="drop")
    scaled = self * (max_norm / (norms + 1e-7))  # torch's guard against a norm of zero
    return jnp.where(named & (norms > max_norm), scaled, self)
