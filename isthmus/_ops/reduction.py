"""Reductions over dims: sums, means, extremes, norms, cumulative ops."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import accumulation_dtype, cast, wrap_dim, wrap_dims
from isthmus._ops.registry import lowering

Array = Any


def _sum_dtype(x: Array, dtype: Any) -> Any:
    if dtype is not None:
        return np.dtype(dtype)
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else np.dtype(np.int64)


def total(x: Array, dims: tuple[int, ...], keepdim: bool, dtype: Any) -> Array:
    """Sum in torch's accumulation dtype."""
    result = _sum_dtype(x, dtype)
    return cast(cast(x, accumulation_dtype(result)).sum(dims, keepdims=keepdim), result)


@lowering(aten.sum.default)
def sum_all(self: Array, dtype: Any = None) -> Array:
    """The sum of every element."""
    return total(self, tuple(range(self.ndim)), False, dtype)


@lowering(aten.sum.dim_IntList)
def sum_dims(self: Array, dim: Any, keepdim: bool = False, dtype: Any = None) -> Array:
    """Sums along dims."""
    return total(self, wrap_dims(dim, self.ndim), keepdim, dtype)


def _mean(x: Array, dims: tuple[int, ...], keepdim: bool, dtype: Any) -> Array:
    result = x.dtype if dtype is None else np.dtype(dtype)
    wide = cast(x, accumulation_dtype(result))
    return cast(wide.mean(dims, keepdims=keepdim) if x.ndim else wide, result)


@lowering(aten.mean.default)
def mean_all(self: Array, dtype: Any = None) -> Array:
    """The mean of every element."""
    return _mean(self, tuple(range(self.ndim)), False, dtype)


@lowering(aten.mean.dim)
def mean_dims(self: Array, dim: Any, keepdim: bool = False, dtype: Any = None) -> Array:
    """Means along dims."""
    return _mean(self, wrap_dims(dim, self.ndim), keepdim, dtype)
