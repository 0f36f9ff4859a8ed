"""Indices of sparse matrices, from rows of entries (COO) to where each row begins (CSR) and back."""

from __future__ import annotations

import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import Array
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported


@lowering(aten._convert_indices_from_coo_to_csr.default)
def convert_from_coo_to_csr(self: Array, size: int, out_int32: bool = False) -> Array:
    """Where each of ``size`` rows begins among entries sorted by row, and where the last one ends."""
    starts = jnp.searchsorted(self, jnp.arange(size + 1, dtype=self.dtype))
    return starts.astype(jnp.int32 if out_int32 else jnp.int64)


@lowering(aten._convert_indices_from_csr_to_coo.default)
def convert_from_csr_to_coo(
    crow_indices: Array, col_indices: Array, out_int32: bool = False, transpose: bool = False
) -> Array:
    """The row and the column of each entry, or the other way round."""
    if crow_indices.ndim > 1:
        raise Unsupported("the rows of a batch of sparse matrices")
    places = jnp.arange(col_indices.shape[0], dtype=crow_indices.dtype)
    rows = jnp.searchsorted(crow_indices[1:], places, side="right")
    both = [col_indices, rows] if transpose else [rows, col_indices]
    return jnp.stack([indices.astype(jnp.int32 if out_int32 else jnp.int64) for indices in both])
