"""Shapes: joining, repeating, padding, triangles and diagonals, writes into views and their gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import EllipsisType

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from isthmus._graph.names import aten
from isthmus._ops.common import (
    NO_OPMATH,
    Array,
    HostArray,
    Ints,
    Number,
    Scalar,
    cast,
    promote,
    transpose_of,
    wrap_dim,
)
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require

Position = tuple[EllipsisType, HostArray, HostArray]


@lowering(aten.cat.default)
def cat(tensors: list[Array], dim: int = 0) -> Array:
    """Tensors joined along a dim, in the dtype they promote to."""
    _, dtype = promote(*tensors, kind=NO_OPMATH)
    # Since before it had empty tensors of other shapes, torch skips a tensor of shape (0,).
    joined = [t for t in tensors if t.shape != (0,)] or tensors[:1]
    return jnp.concatenate([cast(t, dtype) for t in joined], wrap_dim(dim, joined[0].ndim))


@lowering(aten.stack.default)
def stack(tensors: list[Array], dim: int = 0) -> Array:
    """Tensors joined along a new dim, in the dtype they promote to."""
    _, dtype = promote(*tensors, kind=NO_OPMATH)
    return jnp.stack([cast(t, dtype) for t in tensors], wrap_dim(dim, tensors[0].ndim + 1))


@lowering(aten.flip.default)
def flip(self: Array, dims: Ints) -> Array:
    """The elements in reverse order along dims."""
    return jnp.flip(self, tuple(wrap_dim(d, self.ndim) for d in dims)) if self.ndim else self


@lowering(aten.roll.default)
def roll(self: Array, shifts: Ints, dims: Ints = ()) -> Array:
    """The elements moved along dims, those pushed out coming in at the other end."""
    if not self.size or not self.ndim:
        return self
    if not dims:
        return jnp.roll(self, next(iter(shifts)))
    return jnp.roll(self, tuple(shifts), tuple(wrap_dim(d, self.ndim) for d in dims))


@lowering(aten.repeat.default)
def repeat(self: Array, repeats: Ints) -> Array:
    """The tensor laid side by side along every dim."""
    return jnp.tile(self, tuple(repeats))


@lowering(aten.constant_pad_nd.default)
def constant_pad_nd(self: Array, pad: Ints, value: Scalar = 0) -> Array:
    """The tensor with a border of one value; a negative width cuts off."""
    # torch lists the last dim first.
    widths = [(0, 0, 0)] * self.ndim
    for i in range(len(pad) // 2):
        widths[self.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return jax.lax.pad(self, cast(value, self.dtype), widths)


def _border(mode: str, self: Array, padding: Ints) -> Array:
    """A border along the last dims of what is inside, reflected or its edge repeated; a negative width cuts off."""
    x = self
    rank = len(padding) // 2
    widths = [(0, 0)] * (x.ndim - rank) + [
        (padding[2 * i], padding[2 * i + 1]) for i in reversed(range(rank))
    ]
    if mode == "edge" and min(padding) < 0:
        # One end may cut off all that the other repeats, so look up each place.
        for dim, (a, b) in enumerate(widths):
            x = jnp.take(x, np.clip(np.arange(x.shape[dim] + a + b) - a, 0, x.shape[dim] - 1), axis=dim)
        return x
    cuts = tuple(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(widths, x.shape, strict=True))
    return jnp.pad(x[cuts], [(max(a, 0), max(b, 0)) for a, b in widths], mode=mode)


def _border_backward(mode: str, grad_output: Array, self: Array, padding: Ints) -> Array:
    """The gradient of a padding, its transpose."""
    return transpose_of(lambda x: _border(mode, x, padding), self.shape, self.dtype, grad_output)


for _rank in (1, 2, 3):
    for _name, _mode in ((f"reflection_pad{_rank}d", "reflect"), (f"replication_pad{_rank}d", "edge")):
        lowering(getattr(aten, _name).default)(functools.partial(_border, _mode))
        lowering(getattr(aten, f"{_name}_backward").default)(functools.partial(_border_backward, _mode))


@lowering(aten.tril.default)
def tril(self: Array, diagonal: int = 0) -> Array:
    """Zeros above a diagonal."""
    return jnp.tril(self, diagonal)


@lowering(aten.triu.default)
def triu(self: Array, diagonal: int = 0) -> Array:
    """Zeros below a diagonal."""
    return jnp.triu(self, diagonal)


def _triangle(
    indices: Callable[[int, int, int], tuple[HostArray, HostArray]],
    row: int,
    col: int,
    offset: int = 0,
    dtype: DTypeLike | int | None = None,
) -> Array:
    """Rows and columns of the elements of a triangle."""
    # The schema's default is torch's number for int64.
    dtype = np.int64 if dtype is None or isinstance(dtype, int) else dtype
    return jnp.stack([jnp.asarray(i.astype(dtype)) for i in indices(row, offset, col)])


lowering(aten.tril_indices.default)(functools.partial(_triangle, np.tril_indices))
lowering(aten.triu_indices.default)(functools.partial(_triangle, np.triu_indices))


def _on_diagonal(shape: Ints, offset: int, dim1: int, dim2: int) -> tuple[Position, list[int]]:
    """Return the index of a diagonal with its two dims moved last, and the dims in that order."""
    first, second = wrap_dim(dim1, len(shape)), wrap_dim(dim2, len(shape))
    order = [d for d in range(len(shape)) if d not in (first, second)] + [first, second]
    # A negative offset starts lower, a positive one further right.
    down, right = max(-offset, 0), max(offset, 0)
    count = max(min(shape[first] - down, shape[second] - right), 0)
    steps = np.arange(count)
    return (..., steps + down, steps + right), order


def _write_diagonal(x: Array, src: Array, offset: int, dim1: int, dim2: int) -> Array:
    position, order = _on_diagonal(x.shape, offset, dim1, dim2)
    written = x.transpose(order).at[position].set(cast(src, x.dtype), unique_indices=True)
    return written.transpose(tuple(int(i) for i in np.argsort(order)))


@lowering(aten.diag_embed.default)
def diag_embed(self: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    """Matrices of zeros with vectors on a diagonal."""
    ndim, side = self.ndim + 1, self.shape[-1] + abs(offset)
    batch = iter(self.shape[:-1])
    special = (wrap_dim(dim1, ndim), wrap_dim(dim2, ndim))
    shape = tuple(side if d in special else next(batch) for d in range(ndim))
    return _write_diagonal(jnp.zeros(shape, self.dtype), self, offset, *special)


@lowering(aten.diagonal_scatter.default)
def diagonal_scatter(self: Array, src: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """The tensor with a diagonal replaced."""
    return _write_diagonal(self, src, offset, dim1, dim2)


@lowering(aten.diagonal_backward.default)
def diagonal_backward(grad_output: Array, input_sizes: Ints, offset: int, dim1: int, dim2: int) -> Array:
    """Zeros with the gradient on a diagonal."""
    return _write_diagonal(jnp.zeros(tuple(input_sizes), grad_output.dtype), grad_output, offset, dim1, dim2)


def _index_from_front(index: Number | int, size: int) -> Array:
    """Return an index known at run time or before, counted from the front."""
    value = index.value if isinstance(index, Number) else jnp.asarray(index, jnp.int64)
    return jnp.where(value < 0, value + size, value)


def _write_slice(x: Array, part: Array, dim: int, index: Number | int) -> Array:
    axis = wrap_dim(dim, x.ndim)
    start = _index_from_front(index, x.shape[axis])
    return jax.lax.dynamic_update_index_in_dim(x, cast(part, x.dtype), start, axis)


def _write_slices(x: Array, part: Array, dim: int, start: Number | int | None, step: int) -> Array:
    """Return ``x`` with every ``step``-th slice from ``start`` replaced by those of ``part``."""
    axis = wrap_dim(dim, x.ndim)
    if not part.size:
        return x
    first = _index_from_front(0 if start is None else start, x.shape[axis])
    part = cast(part, x.dtype)
    # A contiguous write is one dynamic-update-slice, which XLA does in place; else a scatter. So is one of a size that
    # varies into a table of a fixed length, of which JAX does not know that it fits.
    size, length = part.shape[axis], x.shape[axis]
    if step == 1 and (isinstance(size, int) or not isinstance(length, int)):
        return jax.lax.dynamic_update_slice_in_dim(x, part, jnp.maximum(first, 0), axis)
    position = jnp.maximum(first, 0) + step * jnp.arange(size)
    index = (slice(None),) * axis + (position,)
    return x.at[index].set(part, unique_indices=True, indices_are_sorted=True)


@lowering(aten.select_scatter.default, dynamic=["index"])
def select_scatter(self: Array, src: Array, dim: int, index: Number | int) -> Array:
    """The tensor with one slice replaced."""
    axis = wrap_dim(dim, self.ndim)
    size, position = self.shape[axis], index.value if isinstance(index, Number) else index
    message = f"select(): index out of range for tensor of size {list(self.shape)} at dimension {axis}"
    require((position >= -size) & (position < size), IndexError, message)
    return _write_slice(self, src, dim, index)


@lowering(aten.select_backward.default, dynamic=["index"])
def select_backward(grad_output: Array, input_sizes: Ints, dim: int, index: Number | int) -> Array:
    """Zeros with the gradient in one slice; which one is a run-time value, so time steps share a program."""
    return _write_slice(jnp.zeros(tuple(input_sizes), grad_output.dtype), grad_output, dim, index)


@lowering(aten.slice_scatter.default)
def slice_scatter(
    self: Array, src: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    """The tensor with a range of slices replaced."""
    return _write_slices(self, src, dim, start, step)


@lowering(aten.slice_backward.default, dynamic=["start", "end"])
def slice_backward(
    grad_output: Array,
    input_sizes: Ints,
    dim: int,
    start: Number | int | None,
    end: Number | int | None,
    step: int,
) -> Array:
    """Zeros with the gradient in a range of slices, whose start is a run-time value."""
    return _write_slices(jnp.zeros(tuple(input_sizes), grad_output.dtype), grad_output, dim, start, step)


@lowering(aten.unfold_backward.default)
def unfold_backward(grad_in: Array, input_sizes: Ints, dim: int, size: int, step: int) -> Array:
    """The gradients of windows along a dim, added up where windows overlap."""
    # The gradient of a window over a 0-dim tensor, which has one element.
    if not input_sizes:
        return grad_in.reshape(())
    axis = wrap_dim(dim, len(input_sizes))
    starts = step * jax.lax.iota(np.int32, grad_in.shape[axis])
    windows = starts[:, None] + np.arange(size, dtype=np.int32)
    grads = jnp.moveaxis(grad_in, -1, axis + 1)
    index = (slice(None),) * axis + (windows,)
    return jnp.zeros(tuple(input_sizes), grad_in.dtype).at[index].add(grads)


def _patches(x: Array, kernel: Ints, dilation: Ints, padding: Ints, stride: Ints) -> Array:
    """Return the windows of images as columns: (batch, channels * kernel, positions)."""
    # One strided slice of the image for each place in the window.
    padded = jnp.pad(x, [(0, 0), (0, 0), (padding[0], padding[0]), (padding[1], padding[1])])
    counts = [(padded.shape[2 + d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in (0, 1)]
    taken = []
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            top, left = i * dilation[0], j * dilation[1]
            bottom, right = top + (counts[0] - 1) * stride[0] + 1, left + (counts[1] - 1) * stride[1] + 1
            taken.append(padded[:, :, top : bottom : stride[0], left : right : stride[1]])
    columns = jnp.stack(taken, 2)
    return columns.reshape(x.shape[0], x.shape[1] * len(taken), math.prod(counts))


@lowering(aten.im2col.default)
def im2col(self: Array, kernel_size: Ints, dilation: Ints, padding: Ints, stride: Ints) -> Array:
    """The windows of an image, or a batch of them, as columns."""
    images = self if self.ndim == 4 else self[None]
    columns = _patches(images, kernel_size, dilation, padding, stride)
    return columns if self.ndim == 4 else columns[0]


@lowering(aten.col2im.default)
def col2im(
    self: Array, output_size: Ints, kernel_size: Ints, dilation: Ints, padding: Ints, stride: Ints
) -> Array:
    """Columns added up into images: the transpose of ``im2col``."""
    columns = self if self.ndim == 3 else self[None]
    channels = columns.shape[1] // math.prod(kernel_size)
    shape = (columns.shape[0], channels, *output_size)
    images = transpose_of(
        lambda x: _patches(x, kernel_size, dilation, padding, stride), shape, self.dtype, columns
    )
    return images if self.ndim == 3 else images[0]


@lowering(aten.channel_shuffle.default)
def channel_shuffle(self: Array, groups: int) -> Array:
    """Channels dealt out from groups in turn."""
    batch, channels, *rest = self.shape
    grouped = self.reshape(batch, groups, channels // groups, *rest)
    return grouped.swapaxes(1, 2).reshape(self.shape)


@lowering(aten.pixel_shuffle.default)
def pixel_shuffle(self: Array, upscale_factor: int) -> Array:
    """Channels turned into finer pixels."""
    *batch, channels, height, width = self.shape
    r = upscale_factor
    split = self.reshape(*batch, channels // (r * r), r, r, height, width)
    n = len(batch)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return split.transpose(order).reshape(*batch, channels // (r * r), height * r, width * r)


@lowering(aten.pixel_unshuffle.default)
def pixel_unshuffle(self: Array, downscale_factor: int) -> Array:
    """Pixels turned into more channels."""
    *batch, channels, height, width = self.shape
    r = downscale_factor
    split = self.reshape(*batch, channels, height // r, r, width // r, r)
    n = len(batch)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return split.transpose(order).reshape(*batch, channels * r * r, height // r, width // r)
