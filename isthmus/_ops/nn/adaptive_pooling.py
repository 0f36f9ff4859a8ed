"""Adaptive pooling: window i goes from ``floor(i * in / out)`` to ``ceil((i + 1) * in / out)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import accumulation_dtype, cast
from isthmus._ops.nn.pooling import better, scatter_grad
from isthmus._ops.registry import lowering

Array = Any
_NOWHERE = np.iinfo(np.int32).max


def _windows(size: int, count: int) -> tuple[Any, Any]:
    """Return the places each window covers, windows by places, and which of them it really does."""
    i = np.arange(count)
    start, end = i * size // count, -(-(i + 1) * size // count)
    places = start[:, None] + np.arange(int((end - start).max(initial=1)))
    return np.minimum(places, size - 1), places < end[:, None]


def _spread(x: Array, dim: int, count: int) -> tuple[Array, Any]:
    """Return ``x`` with ``dim`` split into windows and places, and the mask over those two."""
    size = x.shape[dim]
    if size % count == 0:
        split = x.reshape(*x.shape[:dim], count, size // count, *x.shape[dim + 1 :])
        return split, np.ones((count, size // count), bool)
    places, valid = _windows(size, count)
    return jnp.take(x, places, axis=dim), valid


def _shaped(mask: Any, dim: int, ndim: int) -> Any:
    """Return a mask over windows and places shaped to meet a tensor that has them at ``dim``."""
    return mask.reshape((1,) * dim + mask.shape + (1,) * (ndim - dim - 2))


def _average(x: Array, output_size: Sequence[int]) -> Array:
    n = len(output_size)
    for dim, count in zip(range(x.ndim - n, x.ndim), output_size, strict=True):
        split, valid = _spread(x, dim, count)
        # Masked, not weighted by zero: an infinity outside a window must not reach it.
        total = jnp.where(_shaped(valid, dim, split.ndim), split, jnp.zeros((), x.dtype)).sum(dim + 1)
        lengths = valid.sum(1).reshape((-1,) + (1,) * (x.ndim - dim - 1))
        x = total / lengths.astype(x.dtype)
    return x


def _average_pools(n: int, op: Any, backward: Any) -> None:
    @lowering(op)
    def forward_lowering(self: Array, output_size: list[int]) -> Array:
        """The average of each window."""
        if 0 in self.shape or 0 in output_size:
            return jnp.zeros((*self.shape[:-n], *output_size), self.dtype)
        return cast(_average(cast(self, accumulation_dtype(self.dtype)), output_size), self.dtype)

    @lowering(backward)
    def backward_lowering(grad_output: Array, self: Array) -> Array:
        """Each window's gradient, shared by its elements."""
        if 0 in grad_output.shape:
            return jnp.zeros(self.shape, self.dtype)
        wide, size = accumulation_dtype(self.dtype), grad_output.shape[-n:]
        like = jax.ShapeDtypeStruct(self.shape, wide)  # type: ignore[no-untyped-call]
        (found,) = jax.linear_transpose(lambda x: _average(x, size), like)(cast(grad_output, wide))
        return cast(found, self.dtype)


_average_pools(2, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default)
_average_pools(3, aten._adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d_backward.default)


def _maxima(x: Array, output_size: Sequence[int]) -> tuple[Array, Array]:
    n = len(output_size)
    spatial = x.shape[x.ndim - n :]
    places = jnp.broadcast_to(jnp.arange(int(np.prod(spatial)), dtype=jnp.int32).reshape(spatial), x.shape)
    lowest = np.asarray(-np.inf if jnp.issubdtype(x.dtype, jnp.floating) else np.iinfo(x.dtype).min, x.dtype)
    nowhere = np.asarray(_NOWHERE, np.int32)
    for dim, count in zip(range(x.ndim - n, x.ndim), output_size, strict=True):
        values, valid = _spread(x, dim, count)
        indices, _ = _spread(places, dim, count)
        mask = _shaped(valid, dim, values.ndim)
        pair = (jnp.where(mask, values, lowest), jnp.where(mask, indices, nowhere))
        x, places = jax.lax.reduce(pair, (lowest, nowhere), better, (dim + 1,))
    return x, places.astype(jnp.int64)


def _max_pools(n: int, op: Any, backward: Any) -> None:
    @lowering(op)
    def forward_lowering(self: Array, output_size: list[int]) -> tuple[Array, Array]:
        """The largest element of each window and its place in the flattened spatial dims."""
        if 0 in self.shape or 0 in output_size:
            shape = (*self.shape[:-n], *output_size)
            return jnp.zeros(shape, self.dtype), jnp.zeros(shape, jnp.int64)
        return _maxima(self, output_size)

    @lowering(backward)
    def backward_lowering(grad_output: Array, self: Array, indices: Array) -> Array:
        """Each window's gradient, added where its maximum was."""
        return scatter_grad(grad_output, self, indices, n)


_max_pools(2, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool2d_backward.default)
_max_pools(3, aten.adaptive_max_pool3d.default, aten.adaptive_max_pool3d_backward.default)
