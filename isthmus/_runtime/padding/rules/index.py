"""Gather and scatter: indices are checked against true sizes, and rows of padding write nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from isthmus._runtime.padding.interpreter import Interpreter, out_shape, rule
from isthmus._runtime.padding.layout import PaddedArray, Part, has_padding, replaced, resized
from isthmus._runtime.padding.sizes import Refused, Size, is_symbolic

Array = jax.Array


def _wide(index: PaddedArray) -> Array:
    """Return indices in a dtype whose largest value is out of range of every array."""
    dtype = index.array.dtype
    if dtype.itemsize >= 4 and jnp.issubdtype(dtype, jnp.signedinteger):
        return index.array
    return index.array.astype(jnp.int32 if dtype.itemsize < 4 else jnp.int64)


def _checked(column: Array, last: Array, mode: GatherScatterMode) -> Array:
    """Return start indices as the exact program takes them, where the last legal one is ``last``."""
    if mode == GatherScatterMode.CLIP:
        return jnp.clip(column, 0, last)
    if mode == GatherScatterMode.FILL_OR_DROP:
        outside = (column < 0) | (column > last)
        return jnp.where(outside, jnp.iinfo(column.dtype).max, column)
    return column  # the program promises that indices are in range


def _known(mode: Any, name: str) -> GatherScatterMode:
    modes = (GatherScatterMode.CLIP, GatherScatterMode.FILL_OR_DROP, GatherScatterMode.PROMISE_IN_BOUNDS)
    known = next((m for m in modes if mode == m), None)
    if known is None:
        raise Refused(name, f"with mode {mode}")
    return known


def _last_start(run: Interpreter, n: Size, window: Size, dtype: Any) -> Array:
    return run.sizes.true(n, dtype) - run.sizes.true(window, dtype)


@rule("gather")
def gather(run: Interpreter, eqn: JaxprEqn, x: PaddedArray, index: PaddedArray) -> PaddedArray:
    """Read windows at indices. An axis that is read whole keeps its layout; one that is indexed is compacted."""
    numbers, windows = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    mode = _known(eqn.params["mode"], "gather")
    x, index = run.full(x), run.full(index)
    index = run.compact(index, len(index.shape) - 1)
    for i, k in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        index = run.relayout(index, k, x.axes[i])
    whole = [windows[i] == n and i not in numbers.operand_batching_dims for i, n in enumerate(x.shape)]
    for i, n in enumerate(windows):
        if not whole[i] and i not in numbers.operand_batching_dims:
            x = run.compact(x, i)
            if is_symbolic(n):  # a window is padded too, which must not push its start back
                longer = resized(x.array, i, x.array.shape[i] + run.sizes.padded(n))
                x = PaddedArray(longer, x.shape, replaced(x.axes, i, (Part(x.shape[i], longer.shape[i]),)))
    places = _wide(index)
    for k, i in enumerate(numbers.start_index_map):
        if not whole[i] and (has_padding(x.axes[i]) or is_symbolic(windows[i])):
            last = _last_start(run, x.shape[i], windows[i], places.dtype)
            places = places.at[..., k].set(_checked(places[..., k], last, mode))
    sizes = tuple(x.array.shape[i] if whole[i] else run.sizes.padded(n) for i, n in enumerate(windows))
    params = {**eqn.params, "slice_sizes": sizes, "unique_indices": False, "indices_are_sorted": False}
    array = eqn.primitive.bind(x.array, places, **params)
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window_axes = iter(
        [x.axes[i] if whole[i] else run.layout(windows[i]) for i in range(len(x.shape)) if i not in gone]
    )
    batch_axes = iter(index.axes[:-1])
    shape = out_shape(eqn)
    axes = [next(window_axes if k in numbers.offset_dims else batch_axes) for k in range(len(shape))]
    return PaddedArray(array, shape, tuple(axes))


@rule(
    "scatter",
    "scatter-add",
    "scatter_add",
    "scatter-mul",
    "scatter_mul",
    "scatter-min",
    "scatter_min",
    "scatter-max",
    "scatter_max",
    "scatter-sub",
    "scatter_sub",
)
def scatter(
    run: Interpreter, eqn: JaxprEqn, x: PaddedArray, index: PaddedArray, update: PaddedArray
) -> PaddedArray:
    """Write windows at indices; rows of padding get an index out of range, which drops them."""
    numbers, name = eqn.params["dimension_numbers"], eqn.primitive.name
    mode = _known(eqn.params["mode"], name)
    x, index, update = run.full(x), run.full(index), run.full(update)
    index = run.compact(index, len(index.shape) - 1)
    for i, k in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        index = run.relayout(index, k, x.axes[i])
    rows = [k for k in range(len(update.shape)) if k not in numbers.update_window_dims]
    for k, axis in zip(rows, index.axes[:-1], strict=True):
        update = run.relayout(update, k, axis)
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [i for i in range(len(x.shape)) if i not in gone]
    windows: dict[int, Size] = dict.fromkeys(gone, 1)
    for k, i in zip(sorted(numbers.update_window_dims), kept, strict=True):
        windows[i] = update.shape[k]
        if update.shape[k] == x.shape[i]:
            update = run.relayout(update, k, x.axes[i])
        elif is_symbolic(update.shape[k]):
            raise Refused(name, "a part of an axis that is as long as a size")
    places = _wide(index)
    for k, i in enumerate(numbers.scatter_dims_to_operand_dims):
        if windows[i] == x.shape[i]:
            last = jnp.zeros((), places.dtype)
        else:
            x = run.compact(x, i)
            last = _last_start(run, x.shape[i], windows[i], places.dtype)
        places = places.at[..., k].set(_checked(places[..., k], last, mode))
    batched = numbers.scatter_indices_batching_dims
    padded = [k for k in range(len(index.shape) - 1) if has_padding(index.axes[k]) and k not in batched]
    if padded:
        if not numbers.scatter_dims_to_operand_dims:
            raise Refused(name, "rows of padding without an index")
        places = jnp.where(run.mask(index, padded), places, jnp.iinfo(places.dtype).max)
    params = {**eqn.params, "unique_indices": False, "indices_are_sorted": False}
    params["mode"] = GatherScatterMode.FILL_OR_DROP
    return PaddedArray(eqn.primitive.bind(x.array, places, update.array, **params), x.shape, x.axes)
