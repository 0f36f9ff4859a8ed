"""Reductions of neighbouring rows: segments given by their lengths or by where they begin and end."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import FLOATING, Array, ArrayFunction, Scalar, cast
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported

_REDUCTIONS: dict[str, ArrayFunction] = {
    "sum": jax.ops.segment_sum,
    "mean": jax.ops.segment_sum,
    "prod": jax.ops.segment_prod,
    "max": jax.ops.segment_max,
    "min": jax.ops.segment_min,
}
_JOIN = {"sum": jnp.add, "mean": jnp.add, "prod": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum}


class _Segments:
    """Rows along one dim, each with the number of the segment it is in, counted over all leading dims."""

    def __init__(
        self, data: Array, lengths: Array | None, offsets: Array | None, indices: Array | None, axis: int
    ) -> None:
        if indices is not None or (lengths is None) == (offsets is None):
            raise Unsupported("segments are given by their lengths or by their offsets")
        counted = offsets if lengths is None else lengths
        assert counted is not None
        if counted.dtype not in (jnp.int32, jnp.int64):
            raise Unsupported(f"torch counts no rows in {counted.dtype}")
        edges = offsets
        if lengths is not None:
            ends = jnp.cumsum(lengths, axis=-1)
            edges = jnp.concatenate([jnp.zeros((*lengths.shape[:-1], 1), ends.dtype), ends], -1)
        assert edges is not None
        if axis != edges.ndim - 1:
            raise Unsupported("the segments must be of the last dim that lengths or offsets have")
        self.lead, self.rows, self.inner = data.shape[:axis], data.shape[axis], data.shape[axis + 1 :]
        self.edges = edges.reshape(-1, edges.shape[-1]) if edges.size else edges.reshape(0, edges.shape[-1])
        self.count = edges.shape[-1] - 1
        self.lengths = (self.edges[:, 1:] - self.edges[:, :-1]).reshape(-1)
        # Rows before the first segment and after the last are in none.
        numbers = jax.vmap(lambda e: jnp.searchsorted(e, jnp.arange(self.rows), side="right") - 1)(self.edges)
        # Segments of all leading dims are numbered through, so that one reduction serves them.
        first = jnp.arange(self.edges.shape[0])[:, None] * self.count
        inside = (numbers >= 0) & (numbers < self.count)
        self.total = self.edges.shape[0] * self.count
        self.numbers = jnp.where(inside, numbers + first, self.total).reshape(-1)

    def reduce(self, reduction: str, rows: Array) -> Array:
        """Return each segment's reduction, the identity for an empty one."""
        return _REDUCTIONS[reduction](rows, self.numbers, self.total)

    def of_row(self, values: Array) -> Array:
        """Return for each row what its segment has, zero if it is in none."""
        return values.at[self.numbers].get(mode="fill", fill_value=0)


def _require_lengths(lengths: Array | None, offsets: Array | None, rows: int, unsafe: bool) -> None:
    if lengths is not None and not unsafe:
        require(lengths >= 0, RuntimeError, "lengths contains negative value!")
        message = "Expected all rows of lengths along axis to sum to data.size(lengths.dim()-1) when !unsafe."
        require(lengths.sum(-1) == rows, RuntimeError, f"segment_reduce(): {message}")
    if offsets is not None:
        require(offsets[..., 1:] >= offsets[..., :-1], RuntimeError, "offsets must not decrease")


@lowering(aten.segment_reduce.default, accumulate=True, dtypes=FLOATING)
def segment_reduce(
    data: Array,
    reduce: str,
    lengths: Array | None = None,
    indices: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Scalar | None = None,
) -> Array:
    """Each segment's sum, mean, product, maximum or minimum, begun at ``initial``."""
    segments = _Segments(data, lengths, offsets, indices, axis)
    _require_lengths(lengths, offsets, segments.rows, unsafe)
    shape = (*segments.lead, segments.count, *segments.inner)
    if not all(shape):
        return jnp.zeros(shape, data.dtype)
    rows = data.reshape(segments.numbers.shape[0], math.prod(segments.inner))
    reduced = segments.reduce(reduce, rows)
    if initial is not None:
        reduced = _JOIN[reduce](reduced, cast(initial, data.dtype))
    if reduce == "mean":
        count = segments.lengths[:, None].astype(data.dtype)
        empty = reduced if initial is not None else jnp.full((), jnp.nan, data.dtype)
        reduced = jnp.where(count > 0, reduced / jnp.maximum(count, 1), empty)
    return reduced.reshape(shape)


def _extreme_slope(segments: _Segments, grad: Array, output: Array, rows: Array) -> Array:
    """Return the gradient at the rows equal to their segment's extreme."""
    hit = jnp.isnan(rows) | (rows == segments.of_row(output))
    ties = segments.of_row(segments.reduce("sum", hit.astype(rows.dtype)))
    row_grads = segments.of_row(grad)
    # torch shares a gradient among equals only where it is positive.
    shared = jnp.where((ties > 1) & (row_grads > 0), row_grads / jnp.maximum(ties, 1), row_grads)
    return jnp.where(hit, shared, jnp.zeros((), rows.dtype))


def _product_slope(
    segments: _Segments, grad: Array, output: Array, rows: Array, initial: Scalar | None
) -> Array:
    """Return the gradient of each row: the product of the others in its segment."""
    zero, nan = rows == 0, jnp.isnan(rows)
    one = jnp.ones((), rows.dtype)
    start = one if initial is None else cast(initial, rows.dtype)
    others = segments.of_row(segments.reduce("prod", jnp.where(zero | nan, one, rows)) * start)
    # How many other rows of the segment are zero, and how many are nan: they decide the product of the others.
    zeros = segments.of_row(segments.reduce("sum", zero.astype(rows.dtype))) - zero
    nans = segments.of_row(segments.reduce("sum", nan.astype(rows.dtype))) - nan
    others = others * jnp.where(zeros > 0, 0 * one, one) * jnp.where(nans > 0, jnp.nan * one, one)
    divided = segments.of_row(grad * output) / jnp.where(zero, one, rows)
    return jnp.where(zero | nan, segments.of_row(grad) * others, divided)


@lowering(aten._segment_reduce_backward.default, accumulate="data", dtypes=FLOATING)
def segment_reduce_backward(
    grad: Array,
    output: Array,
    data: Array,
    reduce: str,
    lengths: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    initial: Scalar | None = None,
) -> Array:
    """The gradient of the reduction for the data; rows in no segment have none."""
    segments = _Segments(data, lengths, offsets, None, axis)
    if not data.size or not grad.size:
        return jnp.zeros(data.shape, data.dtype)
    rows = data.reshape(segments.numbers.shape[0], -1)
    grads, reduced = (a.reshape(segments.total, -1) for a in (grad, output))
    if reduce == "mean":
        grads = grads / jnp.maximum(segments.lengths, 1)[:, None].astype(data.dtype)
    if reduce in ("sum", "mean"):
        slope = segments.of_row(grads)
    elif reduce == "prod":
        slope = _product_slope(segments, grads, reduced, rows, initial)
    else:
        slope = _extreme_slope(segments, grads, reduced, rows)
    inside = (segments.numbers < segments.total)[:, None]
    return jnp.where(inside, slope, jnp.zeros((), data.dtype)).reshape(data.shape)
