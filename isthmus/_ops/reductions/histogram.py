"""Histograms: where each element falls among the edges of the bins, then a count or a sum of weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from isthmus._graph.names import aten
from isthmus._ops.common import Array, Scalar, accumulation_dtype, cast, rounded
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported


def _divided(x: Array, by: Array) -> Array:
    # XLA multiplies by the reciprocal of a broadcast divisor, which moves elements that lie on an edge.
    return jax.lax.div(x, jax.lax.optimization_barrier(jnp.broadcast_to(by, x.shape)))


def _spaced(first: Array, last: Array, count: int, dtype: DTypeLike) -> Array:
    """Return evenly spaced edges, counted from the nearer end, each product and sum rounded once as torch's are."""
    first, last = cast(first, dtype), cast(last, dtype)
    step = _divided(last - first, jnp.asarray(count - 1, dtype)).astype(jnp.float64)
    index = jnp.arange(count)
    up, down = first + step * index, last - step * (count - 1 - index)
    return cast(jnp.where(index < count // 2, up, down), dtype)


def _step(x: Array, first: Array, last: Array, bins: int) -> Array:
    """Return the bin of each element if all were equally wide, in torch's order of operations."""
    acc_dtype = accumulation_dtype(x.dtype)
    away = rounded(cast(x, acc_dtype) - cast(first, acc_dtype), x.dtype)
    scaled = rounded(away * rounded(jnp.asarray(bins, acc_dtype), x.dtype), x.dtype)
    span = rounded(cast(last, acc_dtype) - cast(first, acc_dtype), x.dtype)
    return jnp.trunc(rounded(_divided(scaled, span), x.dtype)).astype(jnp.int64)


def _near(x: Array, edges: Array) -> Array:
    """Return the bin of each element among equally spaced edges, whose rounding has the last word."""
    place = _step(x, edges[0], edges[-1], edges.shape[0] - 1)
    low = jnp.maximum(place - 1, 0)
    # The estimate may be one bin off either way, so three edges decide.
    count = jnp.zeros_like(place)
    for neighbour in (place - 1, place, place + 1):
        real = (neighbour >= 0) & (neighbour < edges.shape[0])
        count += real & (edges[jnp.clip(neighbour, 0, edges.shape[0] - 1)] <= x)
    return low + count - 1


def _bins(x: Array, edges: Array, even: bool) -> tuple[Array, Array]:
    """Return the bin of each element, the last one closed at both ends, and whether it is in any."""
    inside = (x >= edges[0]) & (x <= edges[-1])
    safe = jnp.where(inside, x, edges[0])
    place = _near(safe, edges) if even else jnp.searchsorted(edges, safe, side="right") - 1
    return jnp.clip(place, 0, edges.shape[0] - 2), inside


def _tally(place: Array, inside: Array, size: int, weight: Array | None, dtype: DTypeLike) -> Array:
    bins = jnp.where(inside, place, size)
    if weight is None:
        return cast(jnp.zeros(size, jnp.int64).at[bins].add(1, mode="drop"), dtype)
    acc_dtype = accumulation_dtype(dtype)
    return cast(
        jnp.zeros(size, acc_dtype).at[bins].add(cast(weight, acc_dtype).reshape(-1), mode="drop"), dtype
    )


def _histogram(
    points: Array, edges: Sequence[Array], even: bool, weight: Array | None, density: bool
) -> Array:
    """Return the histogram of points, one a row, over the product of the edges of each column."""
    shape = tuple(e.shape[0] - 1 for e in edges)
    place, inside = jnp.zeros(points.shape[0], jnp.int64), jnp.ones(points.shape[0], bool)
    for column, each in enumerate(edges):
        bins, within = _bins(points[:, column], each, even)
        place, inside = place * shape[column] + bins, inside & within
    hist = _tally(place, inside, math.prod(shape), weight, points.dtype).reshape(shape)
    return _density(hist, edges) if density else hist


def _density(hist: Array, edges: Sequence[Array]) -> Array:
    acc_dtype = accumulation_dtype(hist.dtype)
    density = cast(hist, acc_dtype) / cast(hist, acc_dtype).sum()
    for dim, each in enumerate(edges):
        density = density / jnp.diff(cast(each, acc_dtype)).reshape((-1,) + (1,) * (len(edges) - dim - 1))
    return cast(density, hist.dtype)


def _check(x: Array, counts: Sequence[int], weight: Array | None, shape: tuple[int, ...]) -> None:
    """Leave to torch what it refuses: it says why."""
    fits = weight is None or (weight.dtype == x.dtype and weight.shape == shape)
    if not jnp.issubdtype(x.dtype, jnp.floating) or not fits or min(counts, default=0) < 1:
        raise Unsupported("the input, the weights or the number of bins is not as it should be")


def _outer(column: Array, range: Sequence[float] | None, dim: int) -> tuple[Array, Array]:
    """Return the first and the last edge of equally wide bins, in float64."""
    first: Array | float
    last: Array | float
    if range is not None:
        first, last = range[2 * dim], range[2 * dim + 1]
        if not (math.isfinite(first) and math.isfinite(last) and first <= last):
            raise Unsupported("the range is not finite, or upside down")
    elif column.size:
        first, last = (cast(end, jnp.float64) for end in (column.min(), column.max()))
        message = f"torch.histogramdd: dimension {dim}'s range is not finite"
        require(jnp.isfinite(first) & jnp.isfinite(last), RuntimeError, message)
    else:
        first, last = 0.0, 1.0
    widen = jnp.where(jnp.equal(first, last), 0.5, 0.0)
    return first - widen, last + widen


def _even_edges(points: Array, bins: Sequence[int], range: Sequence[float] | None) -> list[Array]:
    if range is not None and len(range) != 2 * len(bins):
        raise Unsupported("a range is two numbers a column")
    columns = enumerate(bins)
    ends = [(*_outer(points[:, dim], range, dim), count + 1) for dim, count in columns]
    return [_spaced(first, last, count, points.dtype) for first, last, count in ends]


def _points(x: Array, columns: int) -> Array:
    if x.ndim < 2 or x.shape[-1] != columns:
        raise Unsupported("each point needs a coordinate for each dimension")
    return x.reshape(math.prod(x.shape[:-1]), columns)


@lowering(aten.histogram.bin_ct)
def histogram(
    self: Array,
    bins: int = 100,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> tuple[Array, Array]:
    """The histogram over equally wide bins, and their edges."""
    _check(self, [bins], weight, self.shape)
    points = self.reshape(-1, 1)
    edges = _even_edges(points, [bins], range)
    return _histogram(points, edges, True, weight, density), edges[0]


@lowering(aten.histogram.bins_tensor)
def histogram_bins(
    self: Array, bins: Array, weight: Array | None = None, density: bool = False
) -> tuple[Array, Array]:
    """The histogram over bins with these edges."""
    _check_edges(self, [bins], weight, self.shape)
    return _histogram(self.reshape(-1, 1), [bins], False, weight, density), bins


def _check_edges(x: Array, bins: Sequence[Array], weight: Array | None, shape: tuple[int, ...]) -> None:
    if any(edges.ndim != 1 or edges.dtype != x.dtype for edges in bins):
        raise Unsupported("edges are vectors of the input's dtype")
    _check(x, [edges.shape[0] - 1 for edges in bins], weight, shape)


@lowering(aten._histogramdd_bin_edges.default)
def histogramdd_bin_edges(
    self: Array,
    bins: Sequence[int],
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> list[Array]:
    """The edges of equally wide bins, for each dimension of the points."""
    _check(self, bins, weight, self.shape[:-1])
    return _even_edges(_points(self, len(bins)), bins, range)


@lowering(aten._histogramdd_from_bin_cts.default)
def histogramdd(
    self: Array,
    bins: Sequence[int],
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> Array:
    """The histogram of points over equally wide bins in each dimension."""
    _check(self, bins, weight, self.shape[:-1])
    points = _points(self, len(bins))
    return _histogram(points, _even_edges(points, bins, range), True, weight, density)


@lowering(aten._histogramdd_from_bin_tensors.default)
def histogramdd_bins(
    self: Array, bins: Sequence[Array], weight: Array | None = None, density: bool = False
) -> Array:
    """The histogram of points over bins with these edges in each dimension."""
    _check_edges(self, bins, weight, self.shape[:-1])
    return _histogram(_points(self, len(bins)), bins, False, weight, density)


@lowering(aten.histc.default)
def histc(self: Array, bins: int = 100, min: Scalar = 0, max: Scalar = 0) -> Array:
    """How many elements fall in each of equally wide bins; of a range of no width, the data's own.

    The CPU has it for floats only. Integers are counted as on CUDA: their bounds are integers and so is the arithmetic.
    """
    if self.dtype == jnp.bool_ or jnp.issubdtype(self.dtype, jnp.complexfloating) or bins < 1:
        raise Unsupported("torch refuses it")
    whole = jnp.issubdtype(self.dtype, jnp.integer)
    flat, acc_dtype = self.reshape(-1), jnp.dtype(jnp.int64) if whole else accumulation_dtype(self.dtype)
    bound_dtype = acc_dtype if whole else self.dtype  # CUDA's bounds of int8 are not int8
    first, last = cast(min, bound_dtype), cast(max, bound_dtype)
    if flat.size:
        bounded = first != last
        first = jnp.where(bounded, first, cast(flat.min(), bound_dtype))
        last = jnp.where(bounded, last, cast(flat.max(), bound_dtype))
    widen = jnp.where(first == last, 1, 0).astype(acc_dtype)
    first, last = (
        cast(cast(first, acc_dtype) - widen, bound_dtype),
        cast(cast(last, acc_dtype) + widen, bound_dtype),
    )
    finite = jnp.isfinite(first) & jnp.isfinite(last)
    require(finite, RuntimeError, "torch.histc: range of [min, max] is not finite")
    require(~finite | (first < last), RuntimeError, "torch.histc: max must be larger than min")
    flat = cast(flat, bound_dtype)
    inside = (flat >= first) & (flat <= last)
    held = jnp.where(inside, flat, first)
    place = (held - first) * bins // jnp.maximum(last - first, 1) if whole else _step(held, first, last, bins)
    return _tally(jnp.minimum(place, bins - 1), inside, bins, None, self.dtype)
