"""Fractional max pooling: windows of one size whose starts a random sample chooses for each plane."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import Array, Ints, accumulation_dtype, cast, rounded
from isthmus._ops.nn.pooling import NOWHERE, better, empty, max_pool_backward, register
from isthmus.errors import Unsupported


def _starts(sample: Array, size: int, count: int, window: int) -> Array:
    """Return where each window starts: planes by windows; torch computes it in the dtype of the sample."""
    planes, dtype = sample.shape[0], sample.dtype
    last = jnp.full((planes, min(count, 1)), size - window, jnp.int32)
    if count <= 1:
        return last
    acc_dtype = accumulation_dtype(dtype)
    alpha = np.asarray(np.asarray(size - window, dtype) / np.asarray(count - 1, dtype), acc_dtype)
    steps, offset = np.arange(count - 1).astype(dtype).astype(acc_dtype), cast(sample, acc_dtype)[:, None]
    ahead = rounded(rounded(jnp.add(steps, offset), dtype) * alpha, dtype).astype(jnp.int32)
    behind = rounded(offset * alpha, dtype).astype(jnp.int32)
    return jnp.concatenate([ahead - behind, last], 1)


def _fractional_maxima(x: Array, kernel: Ints, count: Ints, samples: Array) -> tuple[Array, Array]:
    """Return the maxima of planes (rows of ``x``, then its spatial dims) and their flat places."""
    n, planes, sizes = len(kernel), x.shape[0], x.shape[1:]
    places = jnp.zeros((planes,) + (1,) * (2 * n), jnp.int32)
    for d in range(n):
        starts = _starts(samples[:, d], sizes[d], count[d], kernel[d])
        cover = starts[:, :, None] + jnp.arange(kernel[d], dtype=jnp.int32)
        shape = [1] * (2 * n)
        shape[d], shape[n + d] = count[d], kernel[d]
        places = places * sizes[d] + cover.reshape(planes, *shape)
    covered = jnp.take_along_axis(x.reshape(planes, -1), places.reshape(planes, -1), 1)
    start = (np.asarray(-np.inf, x.dtype), NOWHERE)
    inner = range(n + 1, 2 * n + 1)
    values, indices = jax.lax.reduce((covered.reshape(places.shape), places), start, better, inner)
    return values, indices


def _fractional_max_pool(
    n: int, self: Array, kernel_size: list[int], output_size: list[int], random_samples: Array
) -> tuple[Array, Array]:
    """The largest element of each window and its place in the flattened spatial dims."""
    if jnp.issubdtype(self.dtype, jnp.complexfloating):
        raise Unsupported("torch has no kernel for complex numbers, which have no order, and says so")
    lead, planes = self.shape[:-n], math.prod(self.shape[:-n])
    shape = (*lead, *output_size)
    if 0 in shape:
        return empty(shape, self.dtype)
    # Of samples for a batch, an input without a batch dim takes the first. In two dims a sample names the last dim
    # first, in three it does not.
    order = [1, 0] if n == 2 else [0, 1, 2]
    samples = random_samples.reshape(-1, n)[:planes, order]
    x = self.reshape(planes, *self.shape[-n:])
    values, places = _fractional_maxima(x, kernel_size, output_size, samples)
    return values.reshape(shape), places.reshape(shape).astype(jnp.int64)


register(_fractional_max_pool, aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
register(
    max_pool_backward,
    aten.fractional_max_pool2d_backward.default,
    aten.fractional_max_pool3d_backward.default,
    ignores=("kernel_size", "output_size"),
)
