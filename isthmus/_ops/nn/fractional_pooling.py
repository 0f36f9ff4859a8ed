"""Fractional max pooling: windows of one size whose starts a random sample chooses for each plane."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import accumulation_dtype, cast
from isthmus._ops.nn.pooling import better, scatter_grad
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported

Array = Any
_NOWHERE = np.iinfo(np.int32).max


def _rounded(x: Array, dtype: Any) -> Array:
    """Return ``x`` rounded as ``dtype`` would be, which XLA may leave out if only asked to convert."""
    info = jnp.finfo(dtype)
    return x if accumulation_dtype(dtype) == dtype else jax.lax.reduce_precision(x, info.nexp, info.nmant)


def _starts(sample: Array, size: int, count: int, window: int) -> Array:
    """Return where each window starts: planes by windows; torch computes it in the dtype of the sample."""
    planes, dtype = sample.shape[0], sample.dtype
    last = jnp.full((planes, min(count, 1)), size - window, jnp.int32)
    if count <= 1:
        return last
    wide = accumulation_dtype(dtype)
    alpha = np.asarray(np.asarray(size - window, dtype) / np.asarray(count - 1, dtype), wide)
    at, given = np.arange(count - 1).astype(dtype).astype(wide), cast(sample, wide)[:, None]
    ahead = _rounded(_rounded(at + given, dtype) * alpha, dtype).astype(jnp.int32)
    behind = _rounded(given * alpha, dtype).astype(jnp.int32)
    return jnp.concatenate([ahead - behind, last], 1)


def _pooled(x: Array, kernel: Sequence[int], count: Sequence[int], samples: Array) -> tuple[Array, Array]:
    """Return the maxima of planes (rows of ``x``, then its spatial dims) and their flat places."""
    n, sizes = len(kernel), x.shape[1:]
    place = jnp.zeros((x.shape[0],) + (1,) * (2 * n), jnp.int32)
    for d in range(n):
        starts = _starts(samples[:, d], sizes[d], count[d], kernel[d])
        cover = starts[:, :, None] + jnp.arange(kernel[d], dtype=jnp.int32)
        shape = [1] * (2 * n)
        shape[d], shape[n + d] = count[d], kernel[d]
        place = place * sizes[d] + cover.reshape(x.shape[0], *shape)
    found = jnp.take_along_axis(x.reshape(x.shape[0], -1), place.reshape(x.shape[0], -1), 1)
    begin = (np.asarray(-np.inf, x.dtype), np.asarray(_NOWHERE, np.int32))
    return tuple(jax.lax.reduce((found.reshape(place.shape), place), begin, better, range(n + 1, 2 * n + 1)))  # type: ignore[return-value]


def _file(n: int, op: Any, backward: Any, order: Sequence[int]) -> None:
    @lowering(op)
    def forward_lowering(
        self: Array, kernel_size: list[int], output_size: list[int], random_samples: Array
    ) -> tuple[Array, Array]:
        """The largest element of each window and its place in the flattened spatial dims."""
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            raise Unsupported("torch has no kernel for complex numbers, which have no order, and says so")
        lead, planes = self.shape[:-n], math.prod(self.shape[:-n])
        shape = (*lead, *output_size)
        if 0 in shape:
            return jnp.zeros(shape, self.dtype), jnp.zeros(shape, jnp.int64)
        # Of samples for a batch, one without a batch dim takes the first.
        samples = random_samples.reshape(-1, n)[:planes, list(order)]
        x = self.reshape(planes, *self.shape[-n:])
        values, places = _pooled(x, kernel_size, output_size, samples)
        return values.reshape(shape), places.reshape(shape).astype(jnp.int64)

    @lowering(backward)
    def backward_lowering(
        grad_output: Array, self: Array, kernel_size: list[int], output_size: list[int], indices: Array
    ) -> Array:
        """Each window's gradient, added where its maximum was."""
        return scatter_grad(grad_output, self, indices, n)


# A sample names the last dim first in two dims, but not in three.
_file(2, aten.fractional_max_pool2d.default, aten.fractional_max_pool2d_backward.default, (1, 0))
_file(3, aten.fractional_max_pool3d.default, aten.fractional_max_pool3d_backward.default, (0, 1, 2))
