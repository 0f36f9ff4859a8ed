"""Views of graphs as slices of grids, so that their sizes may be symbols.

A view is read through its size, strides and offset, and written the same way. Strides are products of sizes, so a
graph of strided reads is not linear in its sizes and no program for a range of sizes can be made of it. So
``_program/ranges.py`` has each read and write rewritten as a slice of a grid (``strided.find_grid``), whose integers
are sizes::

    as_strided(x[12, 7], size=(12, 3), stride=(7, 1), offset=2)   # x[:, 2:5]
    _read(x, shape=(12, 7), start=(0, 2), count=(12, 3), step=(1, 1), ...)

``aten.slice`` in graphs of ``torch.compile`` becomes such a read as well.

The offset of a view is a leaf, whose value the caller knows (``Offsets``): it decides which slice of the grid the view
is, so it is an integer of the rewritten graph. A view that is no slice of a grid (a diagonal, say) or that starts at a
computed place raises ``Refused``, and the graph is compiled exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from isthmus._device.core import strided
from isthmus._graph.arguments import Arguments
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Input, Leaf, Node, call_of, node
from isthmus._graph.passes.rewrite import rewrite
from isthmus._graph.size_templates import Ints
from isthmus._runtime.padding.sizes import Refused, is_symbolic

Array = jax.Array
Offsets = Callable[[Leaf], int | None]
"""Gives the value of a leaf that is the storage offset of a view, None for other leaves."""
_aten = torch.ops.aten


def without_strides(graph: Graph, offset_of: Offsets) -> Graph:
    """Return the graph with slices of grids for strided reads and writes; their offsets are integers of it."""

    def rule(call: Call, inputs: tuple[Node, ...]) -> Node | None:
        if call.op is _aten.as_strided.default:
            grid, size = _grid(call, inputs[:1], inputs[1:], offset_of)
            return node(call_of(_read, {"0": Input(0), **grid, "size": size}, call.types), inputs[0])
        if call.op is _aten.as_strided_scatter.default:
            grid, size = _grid(call, inputs[:2], inputs[2:], offset_of)
            # An element that is shown twice would be written twice.
            if 0 in dict(call.arguments)["stride"]:
                raise Refused("as_strided_scatter", "a write that is no slice")
            arguments = {"0": Input(0), "1": Input(1), **grid}
            return node(call_of(_write, arguments, call.types), *inputs[:2])
        if call.op is _aten.slice.Tensor and len(inputs) == 1:
            parts = _slice(call, inputs[0].type.size)
            return node(call_of(_read, {"0": Input(0), **parts}, call.types), inputs[0]) if parts else None
        return None

    return rewrite(graph, rule)


def _slice(call: Call, shape: Ints) -> Arguments | None:
    """Return the arguments of ``_read`` for ``aten.slice``, None for an empty one.

    Its lowering clamps the end to the length of the axis, which makes another size where one of the two is a symbol.
    """
    arguments, (result,) = dict(call.arguments), call.types
    if result is None or 0 in result.size:
        return None
    dim, step = arguments.get("dim", 0) % len(shape), arguments.get("step", 1)
    first = slice(arguments.get("start"), arguments.get("end")).indices(shape[dim])[0]
    axes = range(len(shape))
    return {
        "shape": shape,
        "start": tuple(first if d == dim else 0 for d in axes),
        "count": result.size,
        "step": tuple(step if d == dim else 1 for d in axes),
        "order": tuple(axes),
        "dims": tuple(axes),
        "size": result.size,
    }


def _grid(
    call: Call, arrays: tuple[Node, ...], offset: tuple[Node, ...], offset_of: Offsets
) -> tuple[Arguments, Ints]:
    """Return the grid of a strided call as arguments, and the size of the view."""
    arguments = dict(call.arguments)
    size, stride, start = arguments["size"], arguments["stride"], arguments.get("storage_offset", 0)
    if offset:
        leaf = offset[0].call
        known = offset_of(leaf) if isinstance(leaf, Leaf) else None
        if known is None:
            raise Refused("as_strided", "a view that starts at a computed place")
        start = known
    storage = arrays[0].type.size
    # An axis of length 1 or stride 0 shows one place of the storage, and is broadcast after the slice is read.
    dims = tuple(d for d, (n, s) in enumerate(zip(size, stride, strict=True)) if n > 1 and s != 0)
    grid = None
    if 0 not in size:
        grid = strided.find_grid(storage, [size[d] for d in dims], [stride[d] for d in dims], start)
    # A grid that covers only part of the storage would need a cut whose end is no size of the graph.
    if grid is None or math.prod(grid.shape) != math.prod(storage):
        raise Refused(str(call.op), "a view that is no slice")
    parts = {"shape": grid.shape, "start": grid.start, "count": grid.count, "step": grid.step}
    return {**parts, "order": grid.order, "dims": dims}, size


def _read(
    value: Array, shape: Ints, start: Ints, count: Ints, step: Ints, order: Ints, dims: Ints, size: Ints
) -> Array:
    """Return the slice of a grid that a view shows; ``strided.read`` for sizes that may be symbolic."""
    block = value.reshape(shape)
    for axis in _undecided(shape, count):
        places = start[axis] + step[axis] * lax.iota(np.int32, count[axis])
        block = jnp.take(block, places, axis, mode="clip")
        start, step = _without(start, axis, 0), _without(step, axis, 1)
        shape = _without(shape, axis, count[axis])
    if any(c != n for c, n in zip(count, shape, strict=True)):
        limit = [a + (n - 1) * k + 1 for a, n, k in zip(start, count, step, strict=True)]
        block = lax.slice(block, start, limit, step)
    rest = [axis for axis in range(len(shape)) if axis not in order]
    block = block.transpose([*order, *rest]).reshape([size[d] for d in dims])
    return lax.broadcast_in_dim(block, size, dims)


def _write(
    value: Array, new: Array, shape: Ints, start: Ints, count: Ints, step: Ints, order: Ints, dims: Ints
) -> Array:
    """Return a grid with the slice that a view shows replaced; ``strided.write_bits`` for symbolic sizes."""
    # As integers: on the CPU XLA moves half floats as wider ones, which changes the bits of nans.
    bits = value if value.dtype == jnp.bool_ else strided.bits_of(value)
    block = new if bits is value else strided.bits_of(new)
    axes = [*order, *[axis for axis in range(len(shape)) if axis not in order]]
    block = block.reshape([count[axis] for axis in axes]).transpose(np.argsort(axes))
    grid = bits.reshape(shape)
    if all(n == 1 for n in step) and not _undecided(shape, count):
        grid = lax.dynamic_update_slice(grid, block, [jnp.asarray(n, jnp.int32) for n in start])
    else:  # ``dynamic_update_slice`` has no steps, and asks whether the slice fits
        rows = zip(shape, start, count, step, strict=True)
        around = [(first, n - first - (many - 1) * k - 1, k - 1) for n, first, many, k in rows]
        written = lax.pad(jnp.ones(block.shape, jnp.bool_), False, around)
        grid = jnp.where(written, lax.pad(block, block.dtype.type(0), around), grid)
    grid = grid.reshape(value.shape)
    return grid if bits is value else lax.bitcast_convert_type(grid, value.dtype)


def _undecided(shape: Ints, count: Ints) -> list[int]:
    """Return the axes of a fixed length of which as many places are shown as a size says.

    A table of 512 positions of which a sentence takes the first: that a sentence is no longer, JAX does not know.
    """
    pairs = enumerate(zip(shape, count, strict=True))
    return [axis for axis, (n, c) in pairs if is_symbolic(c) and not is_symbolic(n)]


def _without(values: Ints, axis: int, value: int) -> Ints:
    """Return values with another one for an axis."""
    return (*values[:axis], value, *values[axis + 1 :])
