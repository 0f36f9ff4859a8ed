"""Ops whose result has as many elements as the values say: ``size`` counts, the lowering fills."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import Array, Ints, cast
from isthmus._ops.reductions.sorting import sort_with_indices
from isthmus._ops.registry import lowering


@lowering(aten.nonzero.default, size=lambda self: (self != 0).sum())
def nonzero(self: Array, size: int) -> Array:
    """The indices of every element that is not zero, one row each."""
    if not self.ndim:
        return jnp.zeros((size, 0), jnp.int64)
    return jnp.stack(jnp.nonzero(self, size=size), 1).astype(jnp.int64)


@lowering(aten.nonzero_static.default, static=["size"])
def nonzero_static(self: Array, size: int, fill_value: int = -1) -> Array:
    """The indices of the first ``size`` elements that are not zero; missing rows are ``fill_value``."""
    if not self.ndim or not self.size:  # of nothing, jnp.nonzero forgets the fill value
        return jnp.full((size, self.ndim), fill_value, jnp.int64)
    return jnp.stack(jnp.nonzero(self, size=size, fill_value=fill_value), 1).astype(jnp.int64)


@lowering(
    aten.masked_select.default,
    size=lambda self, mask: jnp.broadcast_to(mask, jnp.broadcast_shapes(self.shape, mask.shape)).sum(),
)
def masked_select(self: Array, mask: Array, size: int) -> Array:
    """The elements where the mask holds, in row-major order."""
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    flat = jnp.broadcast_to(self, shape).reshape(-1)
    (places,) = jnp.nonzero(jnp.broadcast_to(mask, shape).reshape(-1), size=size)
    return flat[places]


def _starts(differs: Array, count: int) -> Array:
    """Return where a run of equal elements begins, given whether each differs from the one before."""
    return jnp.concatenate([jnp.ones(min(count, 1), bool), differs])


def _groups(starts: Array, order: Array | None, size: int) -> tuple[Array, Array, Array]:
    """Return (first position, group of each element, size of each group) for runs in an order."""
    group = jnp.cumsum(starts) - 1
    where = jnp.arange(starts.size) if order is None else order
    # Only the start of a run writes its place; the others aim past the end and are dropped.
    first = jnp.zeros(size, jnp.int64).at[jnp.where(starts, group, size)].set(where, mode="drop")
    inverse = jnp.zeros(starts.size, jnp.int64).at[where].set(group)
    return first, inverse, jnp.zeros(size, jnp.int64).at[group].add(1)


def _answers(
    values: Array, groups: tuple[Array, Array, Array], shape: Ints, inverse: bool, counts: bool
) -> tuple[Array, Array, Array]:
    nothing = jnp.zeros(0, jnp.int64)
    return values, groups[1].reshape(shape) if inverse else nothing, groups[2] if counts else nothing


def _sorted_starts(flat: Array) -> tuple[Array, Array]:
    ordered, order = sort_with_indices(flat, 0)
    return _starts(ordered[1:] != ordered[:-1], flat.size), order


def _count_unique(self: Array, **_: object) -> Array:
    return _sorted_starts(self.reshape(-1))[0].sum()


@lowering(aten._unique2.default, size=_count_unique)
def unique(
    self: Array, size: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Array, ...]:
    """The distinct elements in order, which of them each element is, and how often each occurs."""
    flat = self.reshape(-1)
    starts, order = _sorted_starts(flat)
    groups = _groups(starts, order, size)
    return _answers(flat[groups[0]], groups, self.shape, return_inverse, return_counts)


@lowering(aten._unique.default, size=_count_unique)
def old_unique(
    self: Array, size: int, sorted: bool = True, return_inverse: bool = False
) -> tuple[Array, ...]:
    """The distinct elements in order, and which of them each element is."""
    return unique(self, size, sorted, return_inverse)[:2]


def _rows(x: Array, dim: int) -> Array:
    moved = jnp.moveaxis(x, dim, 0)
    if 0 in moved.shape[1:]:
        raise RuntimeError(
            "There are 0 sized dimensions, and they aren't selected, so unique cannot be applied"
        )
    return moved.reshape(moved.shape[0], -1) if x.size else jnp.zeros((moved.shape[0], 0), x.dtype)


def _sorted_rows(rows: Array) -> tuple[Array, Array]:
    """Return (starts of runs, order) of rows sorted lexicographically: columns from the last to the first."""
    columns = rows.shape[1]
    if not rows.size:
        return jnp.zeros(0, bool), jnp.zeros(0, int)

    def by_column(i: Array, order: Array) -> Array:
        column = jax.lax.dynamic_index_in_dim(rows, columns - 1 - i, 1, keepdims=False)
        _, places = sort_with_indices(column[order], 0)
        return order[places]

    # Radix order: a stable sort by the last column first leaves the first column to decide.
    order = jax.lax.fori_loop(0, columns, by_column, jnp.arange(rows.shape[0]))
    ordered = rows[order]
    return _starts((ordered[1:] != ordered[:-1]).any(1), rows.shape[0]), order


@lowering(
    aten.unique_dim.default,
    size=lambda self, dim, **_: _sorted_rows(_rows(self, dim))[0].sum(),
    ignores=("sorted", "return_inverse", "return_counts"),
)
def unique_dim(self: Array, dim: int, size: int) -> tuple[Array, ...]:
    """The distinct slices along a dim in lexicographic order; the inverse and the counts are always there."""
    starts, order = _sorted_rows(_rows(self, dim))
    groups = _groups(starts, order, size)
    return _answers(jnp.take(self, groups[0], dim), groups, (-1,), True, True)


def _runs(x: Array, dim: int | None) -> Array:
    rows = x.reshape(-1, 1) if dim is None else _rows(x, dim)
    return _starts((rows[1:] != rows[:-1]).any(1), rows.shape[0])


@lowering(aten.unique_consecutive.default, size=lambda self, dim=None, **_: _runs(self, dim).sum())
def unique_consecutive(
    self: Array, size: int, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Array, ...]:
    """The first of every run of equal elements or slices."""
    groups = _groups(_runs(self, dim), None, size)
    values = self.reshape(-1)[groups[0]] if dim is None else jnp.take(self, groups[0], dim)
    shape = self.shape if dim is None else (-1,)
    return _answers(values, groups, shape, return_inverse, return_counts)


def _count_bins(self: Array, minlength: int = 0, **_: object) -> Array:
    if not self.size:
        return jnp.asarray(minlength)
    # A negative size says that an element was negative, which the lowering then refuses.
    return jnp.where(self.min() < 0, -1, jnp.maximum(self.max().astype(jnp.int64) + 1, minlength))


@lowering(aten.bincount.default, size=_count_bins)
def bincount(self: Array, size: int, weights: Array | None = None, minlength: int = 0) -> Array:
    """How often each number occurs, or the sum of its weights."""
    if self.ndim != 1 or size < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if minlength < 0:
        raise RuntimeError("minlength should be >= 0")
    if weights is None or not self.size:  # torch counts nothing without looking at the weights
        return jnp.zeros(size, jnp.int64).at[self].add(1)
    dtype = np.dtype(np.float32) if weights.dtype == np.float32 else np.dtype(np.float64)
    return jnp.zeros(size, dtype).at[self].add(cast(weights, dtype))


def _count_repeats(repeats: Array, **_: object) -> Array:
    if not repeats.size:
        return jnp.zeros((), jnp.int64)
    return jnp.where(repeats.min() < 0, -1, repeats.sum())


@lowering(aten.repeat_interleave.Tensor, size=_count_repeats)
def repeat_interleave(repeats: Array, size: int, output_size: int | None = None) -> Array:
    """Every index as often as the tensor says."""
    if repeats.ndim != 1:
        raise RuntimeError("repeat_interleave only accept 1D vector as repeat")
    if size < 0:
        raise RuntimeError("repeats can not be negative")
    if output_size is not None and output_size != size:
        raise RuntimeError("allocated size does not match required size")
    return jnp.repeat(jnp.arange(repeats.size, dtype=repeats.dtype), repeats, total_repeat_length=size)
