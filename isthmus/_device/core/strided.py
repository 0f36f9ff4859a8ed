"""A view is read and written by its strides: as slices, transposes and broadcasts wherever they fit.

The value of a storage is an array of any shape; its elements in row-major order are the storage. ``read``
and ``write`` see it as a grid, a row-major array whose axes have the strides the view needs, and take a
slice of each axis. What no grid can express (windows that overlap, say) becomes a gather or a scatter.

For ``x = torch.zeros(4, 6)`` and ``x[1:, ::2].t()``, with size (3, 3), stride (2, 6) and offset 6, the grid is the
storage as (4, 6): rows 1 to 3 with step 1, columns 0 to 4 with step 2, then a transpose. XLA fuses these into the op
that reads them, while a gather on the CPU is a loop over elements.

An offset may be a run-time input, so that a sliding window compiles once: the part of the storage that the view spans
is then cut out by a dynamic slice and read as a view that starts at 0. XLA clamps a slice that runs past the end, which
would shift what is read; ``views.as_strided`` and ``buffer.check_reach`` refuse such views before.

Everything here is traced: ``slots.py`` calls it for eager plans, ``_program/evaluate.py`` for graphs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from isthmus._graph.layout import contiguous_strides, span

Array = Any
Ints = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """``shape`` of the storage as a grid, and for each grid axis the slice of it that the view takes."""

    shape: Ints
    start: Ints
    count: Ints
    step: Ints
    order: Ints  # grid axis of each view dim that is longer than one and not broadcast

    @property
    def whole(self) -> bool:
        """Whether the view takes every element of the grid."""
        return self.count == self.shape


def read(value: Array, size: Ints, stride: Ints, offset: Any = 0) -> Array:
    """Return the elements of the storage ``value`` that the view shows, in the view's shape."""
    # The usual case: the tensor is its storage.
    if tuple(value.shape) == size and stride == contiguous_strides(size) and _is_zero(offset):
        return value
    # Grids divide by sizes, and nothing is read.
    if 0 in size:
        return jnp.zeros(size, value.dtype)
    # An offset that is an input: see the module. Reads of the block begin at 0.
    if not isinstance(offset, int):
        flat = lax.dynamic_slice(value.reshape(-1), (offset,), (span(size, stride),))
        return read(flat, size, stride)
    # Dims of length one and broadcast dims (stride 0) take no axis of the grid.
    dims = [d for d, (n, s) in enumerate(zip(size, stride, strict=True)) if n > 1 and s != 0]
    grid = find_grid(tuple(value.shape), [size[d] for d in dims], [stride[d] for d in dims], offset)
    if grid is None:
        return value.reshape(-1)[_indices(size, stride, offset, math.prod(value.shape))]
    limit = [a + (n - 1) * k + 1 for a, n, k in zip(grid.start, grid.count, grid.step, strict=True)]
    block = _as_grid(value, grid)
    if not grid.whole:
        block = lax.slice(block, grid.start, limit, grid.step)
    # Axes that the view takes one element of come last, where the reshape drops them.
    rest = [axis for axis in range(len(grid.shape)) if axis not in grid.order]
    block = block.transpose([*grid.order, *rest]).reshape([size[d] for d in dims])
    # Now the dims of length one and the broadcast ones come back.
    return lax.broadcast_in_dim(block, size, dims)


def write(value: Array, new: Array, size: Ints, stride: Ints, offset: Any = 0) -> Array:
    """Return the storage ``value`` with the view's elements replaced by ``new``, of the view's shape."""
    if tuple(value.shape) == size and stride == contiguous_strides(size) and _is_zero(offset):
        return new
    if 0 in size:
        return value
    # As in ``read``: the block that the view spans is written, and put back where it was.
    if not isinstance(offset, int):
        flat = value.reshape(-1)
        part = lax.dynamic_slice(flat, (offset,), (span(size, stride),))
        return lax.dynamic_update_slice(flat, write(part, new, size, stride), (offset,)).reshape(value.shape)
    # Where the view repeats an element the last write wins, as in a loop over the view.
    last = tuple(slice(n - 1, n) if s == 0 else slice(None) for n, s in zip(size, stride, strict=True))
    new = new[last]
    dims = [d for d, (n, s) in enumerate(zip(size, stride, strict=True)) if n > 1 and s != 0]
    grid = find_grid(tuple(value.shape), [size[d] for d in dims], [stride[d] for d in dims], offset)
    if grid is None:
        flat = value.reshape(-1)
        indices = _indices(tuple(new.shape), stride, offset, flat.shape[0])
        return flat.at[indices].set(new).reshape(value.shape)
    rest = [axis for axis in range(len(grid.shape)) if axis not in grid.order]
    axes = [*grid.order, *rest]
    block = new.reshape([grid.count[axis] for axis in axes]).transpose(np.argsort(axes))
    written = block if grid.whole else _update(_as_grid(value, grid), block, grid)
    # A grid that ran past the end was padded: cut that off again.
    return written.reshape(-1)[: math.prod(value.shape)].reshape(value.shape)


def write_bits(value: Array, new: Array, size: Ints, stride: Ints, offset: Any = 0) -> Array:
    """Do what ``write`` does and keep the bits of every nan; has no derivative."""
    # Booleans have no bits to lose, and no bitcast in XLA.
    bits = value if value.dtype == jnp.bool_ else bits_of(value)
    if bits is value:
        return write(value, new, size, stride, offset)
    return lax.bitcast_convert_type(write(bits, bits_of(new), size, stride, offset), value.dtype)


def bits_of(value: Array) -> Array:
    """Return floats of one or two bytes as integers, and booleans as bytes; other values as they are.

    On the CPU XLA moves such floats as wider ones, which changes the bits of nans: integers that lie in the same
    storage would change. Bytes seen as booleans would become zeros and ones.
    """
    if value.dtype == jnp.bool_:
        return value.astype(jnp.uint8)
    if value.dtype.itemsize > 2 or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    return lax.bitcast_convert_type(value, jnp.uint8 if value.dtype.itemsize == 1 else jnp.uint16)


def find_grid(shape: Ints, size: Sequence[int], stride: Sequence[int], offset: int) -> Grid | None:
    """Return a grid over a storage of this shape in which the view is a slice of each axis, or None."""
    # The storage's own axes come first, since a grid with its shape needs no reshape; then the view's strides beside
    # them, then those alone, then the flat storage.
    base = [s for s, n in zip(contiguous_strides(shape), shape, strict=True) if n > 1]
    for candidates in ({*base}, {*base, *stride}, {*stride}, set()):
        grid = _grid(_chain(candidates), math.prod(shape), size, stride, offset)
        if grid is not None:
            return grid
    return None


def _chain(candidates: set[int]) -> list[int]:
    """Return strides, largest first and ending in 1, each a multiple of the next."""
    chain = [1]
    for stride in sorted(candidates):
        # A stride that is no multiple of the next smaller one cannot be an axis of the same grid.
        if stride > chain[0] and stride % chain[0] == 0:
            chain.insert(0, stride)
    return chain


def _grid(
    chain: list[int], total: int, size: Sequence[int], stride: Sequence[int], offset: int
) -> Grid | None:
    # The first axis is as long as the storage needs, and may run past its end: it is padded.
    # Rounded up: the last row may be incomplete.
    shape = [-(-total // chain[0]), *[a // b for a, b in itertools.pairwise(chain)]]
    # The offset, written in the mixed base of the grid's strides: one digit per axis.
    start, left = [], offset
    for step in chain:
        start.append(left // step)
        left %= step
    count, steps, order = [1] * len(chain), [1] * len(chain), []
    for n, s in zip(size, stride, strict=True):
        # The largest step that divides the stride. Two dims on one axis, or a dim that leaves its axis, do not fit.
        axis = next(i for i, step in enumerate(chain) if s % step == 0 and s >= step)
        if axis in order or start[axis] + (n - 1) * (s // chain[axis]) >= shape[axis]:
            return None
        count[axis], steps[axis] = n, s // chain[axis]
        order.append(axis)
    if any(a >= n for a, n in zip(start, shape, strict=True)):
        return None
    return Grid(tuple(shape), tuple(start), tuple(count), tuple(steps), tuple(order))


def _as_grid(value: Array, grid: Grid) -> Array:
    if tuple(value.shape) == grid.shape:
        return value
    flat = value.reshape(-1)
    missing = math.prod(grid.shape) - flat.shape[0]
    if missing:
        flat = jnp.pad(flat, (0, missing))
    return flat.reshape(grid.shape)


def _update(base: Array, block: Array, grid: Grid) -> Array:
    # Steps of one: the block is a window, which XLA writes in place if the storage is donated.
    if all(step == 1 for step in grid.step):
        return lax.dynamic_update_slice(base, block, grid.start)
    # A scatter is a loop on the CPU: spread the block over the grid and select instead.
    config = [
        (a, length - a - (n - 1) * k - 1, k - 1)
        for a, n, k, length in zip(grid.start, grid.count, grid.step, grid.shape, strict=True)
    ]
    spread = lax.pad(block, jnp.zeros((), block.dtype), config)
    mask = lax.pad(jnp.ones(block.shape, bool), jnp.zeros((), bool), config)
    return jnp.where(mask, spread, base)


def _indices(size: Ints, stride: Ints, offset: int, total: int) -> Array:
    # Half the memory of int64, where that can count the elements.
    dtype = jnp.int32 if total < 2**31 else jnp.int64
    index = jnp.full(size, offset, dtype)
    for dim, step in enumerate(stride):
        index = index + lax.broadcasted_iota(dtype, size, dim) * jnp.asarray(step, dtype)
    return index


def _is_zero(offset: Any) -> bool:
    return isinstance(offset, int) and offset == 0
