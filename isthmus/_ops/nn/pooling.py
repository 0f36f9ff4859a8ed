"""Pooling over windows: maxima with torch's choice of index, averages with torch's divisors.

Windows are of one size, or as many as the output has places (adaptive: window i goes from ``floor(i * in / out)`` to
``ceil((i + 1) * in / out)``). Gradients of maxima scatter to the index that forward returned; those of averages are the
transpose of forward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from isthmus._graph.arguments import AnyFunction
from isthmus._graph.names import aten
from isthmus._graph.private import Op
from isthmus._graph.size_guesses import room_above
from isthmus._ops.common import (
    Array,
    DType,
    HostArray,
    Ints,
    accumulation_dtype,
    cast,
    each_dim,
    numbers,
    rounded,
    transpose_of,
)
from isthmus._ops.registry import Options, lowering
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported

# The index of a place in the padding: beyond every real index, so that `better` prefers a real one of equal value.
NOWHERE = np.asarray(np.iinfo(np.int32).max, np.int32)


def register(function: AnyFunction, in_2d: Op, in_3d: Op, **options: Unpack[Options]) -> None:
    """Register ``function``, whose first parameter is the number of spatial dims, for two dims and for three."""
    for n, op in ((2, in_2d), (3, in_3d)):
        lowering(op, **options)(functools.partial(function, n))


def _strides(stride: Ints, kernel: Ints, n: int) -> list[int]:
    return each_dim(stride, n) if len(stride) else list(kernel)


def _margins(
    kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool
) -> list[tuple[int, int]]:
    """Return the padding below and above each dim that makes room for torch's number of windows."""
    rows = zip(kernel, stride, padding, dilation, strict=True)
    return [(p, room_above(k, s, p, d, ceil_mode)) for k, s, p, d in rows]


def _counts(
    sizes: Ints, kernel: Ints, stride: Ints, dilation: Ints, margins: Sequence[tuple[int, int]]
) -> list[int]:
    """Return how many windows fit into each dim."""
    rows = zip(sizes, kernel, stride, dilation, margins, strict=True)
    return [(n + low + high - d * (k - 1) - 1) // s + 1 for n, k, s, d, (low, high) in rows]


def better(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the larger (value, index) pair: of equals the first, of nans the last, as torch scans."""
    (x, i), (y, j) = a, b
    if jnp.issubdtype(x.dtype, jnp.floating):
        nan_x, nan_y = jnp.isnan(x), jnp.isnan(y)
        take = (y > x) & ~nan_x | (nan_y & ~nan_x) | ((x == y) & (j < i)) | (nan_x & nan_y & (j > i))
    else:
        take = (y > x) | ((x == y) & (j < i))
    return jnp.where(take, y, x), jnp.where(take, j, i)


def _lowest(dtype: DType) -> HostArray:
    floating = jnp.issubdtype(dtype, jnp.floating)
    return np.asarray(-np.inf if floating else jnp.iinfo(dtype).min, dtype)


def _positions(x: Array, n: int) -> Array:
    """Return for each element where it is in its flattened spatial dims."""
    flat = jnp.zeros((), jnp.int32)
    for size in x.shape[x.ndim - n :]:
        flat = flat[..., None] * jnp.asarray(size, jnp.int32) + jnp.arange(size, dtype=jnp.int32)
    return jnp.broadcast_to(flat, x.shape)


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> tuple[Array, Array]:
    return jnp.zeros(shape, dtype), jnp.zeros(shape, jnp.int64)


def _max_pool(
    n: int,
    self: Array,
    kernel_size: list[int],
    stride: Ints = (),
    padding: Ints = (0,),
    dilation: Ints = (1,),
    ceil_mode: bool = False,
) -> tuple[Array, Array]:
    """The largest element of each window and its place in the flattened spatial dims."""
    kernel, pad, spread = each_dim(kernel_size, n), each_dim(padding, n), each_dim(dilation, n)
    steps = _strides(stride, kernel, n)
    lead, sizes = self.shape[:-n], self.shape[-n:]
    margins = _margins(kernel, steps, pad, spread, ceil_mode)
    if 0 in lead:
        return empty((*lead, *_counts(sizes, kernel, steps, spread, margins)), self.dtype)
    # XLA's windows cover every dim; batch and channels get windows of one.
    ones, none = (1,) * len(lead), [(0, 0)] * len(lead)
    values, indices = jax.lax.reduce_window(
        (self, _positions(self, n)),
        (_lowest(self.dtype), NOWHERE),
        better,
        (*ones, *kernel),
        (*ones, *steps),
        [*none, *margins],
        window_dilation=(*ones, *spread),
    )
    return values, indices.astype(jnp.int64)


def max_pool_backward(n: int, grad_output: Array, self: Array, indices: Array) -> Array:
    """Each window's gradient, added where its maximum was."""
    if not jnp.issubdtype(self.dtype, jnp.floating):
        raise Unsupported(f"torch has no kernel for {self.dtype} and says so")
    if grad_output.size == 0:
        return jnp.zeros(self.shape, self.dtype)
    dtype = accumulation_dtype(grad_output.dtype)
    rows, area = math.prod(self.shape[:-n]), math.prod(self.shape[-n:])
    places = (jnp.arange(rows)[:, None], indices.reshape(rows, -1))
    total = jnp.zeros((rows, area), dtype).at[places].add(cast(grad_output, dtype).reshape(rows, -1))
    return cast(total.reshape(self.shape), self.dtype)


register(_max_pool, aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
_WINDOW = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
register(
    max_pool_backward,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    ignores=_WINDOW,
)


def _divisor(
    sizes: Ints,
    counts: Ints,
    kernel: Ints,
    stride: Ints,
    padding: Ints,
    include_pad: bool,
    override: int | None,
) -> HostArray | Array:
    """Return the divisor of each window's sum, as torch counts it."""
    if override is not None:
        return np.asarray(override)
    # Numbers are computed here; of sizes that are symbols the program computes them.
    xp = numbers(*sizes)
    divisor = xp.ones((), xp.int64)
    for size, count, k, s, p in zip(sizes, counts, kernel, stride, padding, strict=True):
        start = xp.arange(count) * s - p
        # A window that hangs over the padding counts it, but nothing beyond it.
        end = xp.minimum(start + k, size + p)
        if not include_pad:
            start, end = xp.maximum(start, 0), xp.minimum(end, size)
        divisor = divisor[..., None] * (end - start)
    return divisor


def avg_pool(
    x: Array,
    n: int,
    kernel: Ints,
    stride: Ints,
    padding: Ints,
    ceil_mode: bool,
    include_pad: bool,
    override: int | None,
) -> Array:
    """Return the average of each window in the dtype of ``x``, in which it is accumulated."""
    steps = _strides(stride, kernel, n)
    lead, sizes = x.shape[:-n], x.shape[-n:]
    margins = _margins(kernel, steps, padding, [1] * n, ceil_mode)
    counts = _counts(sizes, kernel, steps, [1] * n, margins)
    if 0 in lead:
        return jnp.zeros((*lead, *counts), x.dtype)
    ones, none = (1,) * len(lead), [(0, 0)] * len(lead)
    zero = np.zeros((), x.dtype)
    windows = (*ones, *kernel), (*ones, *steps), [*none, *margins]
    total = jax.lax.reduce_window(x, zero, jax.lax.add, *windows)
    if override == 0:
        raise Unsupported("a divisor of zero")
    divisor = _divisor(sizes, counts, kernel, steps, padding, include_pad, override)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return total / divisor.astype(x.dtype)
    # Integers are divided towards zero, as C does.
    return jax.lax.div(total, jnp.broadcast_to(jnp.asarray(divisor, x.dtype), total.shape))


def _avg_pool(
    n: int,
    self: Array,
    kernel_size: list[int],
    stride: Ints = (),
    padding: Ints = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    """The average of each window."""
    kernel, pad = each_dim(kernel_size, n), each_dim(padding, n)
    return avg_pool(self, n, kernel, stride, pad, ceil_mode, count_include_pad, divisor_override)


def _avg_pool_backward(
    n: int,
    grad_output: Array,
    self: Array,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Array:
    """Each window's gradient, shared by its elements."""
    if 0 in self.shape:
        return jnp.zeros(self.shape, self.dtype)
    options = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return transpose_of(lambda x: _avg_pool(n, x, *options), self.shape, self.dtype, grad_output)


register(_avg_pool, aten.avg_pool2d.default, aten.avg_pool3d.default, accumulate=True)
register(
    _avg_pool_backward, aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default, accumulate="self"
)


def _unpool(n: int, self: Array, indices: Array, output_size: list[int]) -> Array:
    """Zeros, with each element put back at its index."""
    if not jnp.issubdtype(self.dtype, jnp.floating):
        raise Unsupported(f"torch has no kernel for {self.dtype} and says so")
    rows, area = math.prod(self.shape[:-n]), math.prod(output_size)
    flat = indices.reshape(rows, math.prod(self.shape[-n:]))
    volume = "x".join(map(str, output_size))
    message = f"Found an invalid max index (output volumes are of size {volume})"
    require((flat >= 0) & (flat < area), RuntimeError, message)
    out = jnp.zeros((rows, area), self.dtype)
    out = out.at[jnp.arange(rows)[:, None], flat].set(self.reshape(flat.shape))
    return out.reshape(*self.shape[:-n], *output_size)


register(_unpool, aten.max_unpool2d.default, aten.max_unpool3d.default, ignores=("stride", "padding"))


# Adaptive pooling


def _adaptive_windows(size: int, count: int) -> tuple[HostArray | Array, HostArray | Array]:
    """Return the places each window covers, windows by places, and which of them it really does."""
    xp = numbers(size, count)
    i = xp.arange(count)
    # Floor and ceiling in integers: floats would put an edge one off for large sizes.
    start, end = i * size // count, -(-(i + 1) * size // count)
    # No window of n places in ``count`` is longer than this.
    longest = int((end - start).max(initial=1)) if xp is np else (size - 1) // count + 2
    places = start[:, None] + xp.arange(longest)
    return xp.minimum(places, size - 1), places < end[:, None]


def _spread(x: Array, dim: int, count: int) -> tuple[Array, HostArray | Array]:
    """Return ``x`` with ``dim`` split into windows and places, and the mask over those two."""
    size = x.shape[dim]
    if numbers(size, count) is np and size % count == 0:  # equal windows that do not overlap: no gather
        split = x.reshape(*x.shape[:dim], count, size // count, *x.shape[dim + 1 :])
        return split, np.ones((count, size // count), bool)
    places, valid = _adaptive_windows(size, count)
    return jnp.take(x, places, axis=dim), valid


def _shaped(mask: HostArray | Array, dim: int, ndim: int) -> HostArray | Array:
    """Return a mask over windows and places shaped to meet a tensor that has them at ``dim``."""
    return mask.reshape((1,) * dim + mask.shape + (1,) * (ndim - dim - 2))


def _adaptive_average(x: Array, output_size: Ints) -> Array:
    n = len(output_size)
    for dim, count in zip(range(x.ndim - n, x.ndim), output_size, strict=True):
        split, valid = _spread(x, dim, count)
        # Masked, not weighted by zero: an infinity outside a window must not reach it.
        total = jnp.where(_shaped(valid, dim, split.ndim), split, jnp.zeros((), x.dtype)).sum(dim + 1)
        lengths = valid.sum(1).reshape((-1,) + (1,) * (x.ndim - dim - 1))
        x = total / lengths.astype(x.dtype)
    return x


def _adaptive_avg_pool(n: int, self: Array, output_size: list[int]) -> Array:
    """The average of each window."""
    if 0 in self.shape or 0 in output_size:
        return jnp.zeros((*self.shape[:-n], *output_size), self.dtype)
    return _adaptive_average(self, output_size)


def _adaptive_avg_pool_backward(n: int, grad_output: Array, self: Array) -> Array:
    """Each window's gradient, shared by its elements."""
    if 0 in grad_output.shape:
        return jnp.zeros(self.shape, self.dtype)
    size = grad_output.shape[-n:]
    return transpose_of(lambda x: _adaptive_average(x, size), self.shape, self.dtype, grad_output)


def _adaptive_max_pool(n: int, self: Array, output_size: list[int]) -> tuple[Array, Array]:
    """The largest element of each window and its place in the flattened spatial dims."""
    if 0 in self.shape or 0 in output_size:
        return empty((*self.shape[:-n], *output_size), self.dtype)
    values, places, lowest = self, _positions(self, n), _lowest(self.dtype)
    for dim, count in zip(range(self.ndim - n, self.ndim), output_size, strict=True):
        split, valid = _spread(values, dim, count)
        indices, _ = _spread(places, dim, count)
        mask = _shaped(valid, dim, split.ndim)
        pair = (jnp.where(mask, split, lowest), jnp.where(mask, indices, NOWHERE))
        values, places = jax.lax.reduce(pair, (lowest, NOWHERE), better, (dim + 1,))
    return values, places.astype(jnp.int64)


register(
    _adaptive_avg_pool, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, accumulate=True
)
register(
    _adaptive_avg_pool_backward,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    accumulate="self",
)
register(_adaptive_max_pool, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
register(
    max_pool_backward,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
)


# Fractional max pooling: windows of one size whose starts a random sample chooses for each plane


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
