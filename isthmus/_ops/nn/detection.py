"""torchvision's ops for detection; each is registered once torchvision defines it, which may be never.

Regions are sampled point by point, one loop step for each point of a bin over all regions at once. How many
points a bin has may depend on the regions: the loop's length is then a run-time value, and no host reads it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import DTypeLike

from isthmus._ops.common import FLOATING, Array, ArrayFunction, HostArray, accumulation_dtype, cast, divide
from isthmus._ops.registry import lowering_when_defined
from isthmus._runtime.dtypes import to_torch_dtype

# Non-maximum suppression


def _check_boxes(dets: Array, scores: Array) -> None:
    if dets.ndim != 2:
        raise RuntimeError(f"boxes should be a 2d tensor, got {dets.ndim}D")
    if dets.shape[1] != 4:
        raise RuntimeError(f"boxes should have 4 elements in dimension 1, got {dets.shape[1]}")
    if scores.ndim != 1:
        raise RuntimeError(f"scores should be a 1d tensor, got {scores.ndim}D")
    if dets.shape[0] != scores.shape[0]:
        message = "boxes and scores should have same number of elements in dimension 0"
        raise RuntimeError(f"{message}, got {dets.shape[0]} and {scores.shape[0]}")


def _at_most(threshold: float, dtype: DTypeLike) -> HostArray:
    """Return the largest number of ``dtype`` up to ``threshold``: torchvision compares in double precision."""
    rounded = np.asarray(threshold, dtype)
    return np.nextafter(rounded, np.asarray(-np.inf, dtype)) if float(rounded) > threshold else rounded


def _keep(dets: Array, scores: Array, iou_threshold: float) -> tuple[Array, Array]:
    """Return the boxes by descending score, and which of them no better box that is kept overlaps."""
    _check_boxes(dets, scores)
    dtype = accumulation_dtype(dets.dtype)
    # Stable: of equal scores torchvision keeps the first box.
    order = jnp.argsort(scores, descending=True, stable=True)
    x1, y1, x2, y2 = (dets[order].astype(dtype)[:, i] for i in range(4))
    areas = (x2 - x1) * (y2 - y1)
    threshold = _at_most(iou_threshold, dtype)

    def suppress(i: Array, keep: Array) -> Array:
        width = jnp.minimum(x2, x2[i]) - jnp.maximum(x1, x1[i])
        height = jnp.minimum(y2, y2[i]) - jnp.maximum(y1, y1[i])
        shared = jnp.maximum(width, 0) * jnp.maximum(height, 0)
        overlaps = shared / (areas[i] + areas - shared) > threshold
        return keep & ~(keep[i] & overlaps & (jnp.arange(keep.size) > i))

    count = dets.shape[0]
    return order, jax.lax.fori_loop(0, count, suppress, jnp.ones(count, bool)) if count else order


def _count_kept(dets: Array, scores: Array, iou_threshold: float) -> Array:
    return _keep(dets, scores, iou_threshold)[1].sum()


@lowering_when_defined("torchvision::nms", size=_count_kept)
def nms(dets: Array, scores: Array, iou_threshold: float, size: int) -> Array:
    """The boxes that no better one overlaps by more than the threshold, best first."""
    order, keep = _keep(dets, scores, iou_threshold)
    (survivors,) = jnp.nonzero(keep, size=size)
    return order[survivors].astype(jnp.int64)


# Regions of interest, sampled by interpolation


class _Axis(NamedTuple):
    """One axis of every region: where its bins begin, how long they are, how many points each has."""

    start: Array
    bin: Array
    points: Array
    bins: int
    length: int


class _Sides(NamedTuple):
    """The two pixels on either side of one point of every bin, and what each counts for."""

    low: Array
    high: Array
    low_weight: Array
    high_weight: Array


def _axis(rois: Array, first: int, scale: float, bins: int, length: int, ratio: int, aligned: bool) -> _Axis:
    # Aligned regions count pixels by their centres.
    offset = 0.5 if aligned else 0.0
    start, end = (rois[:, first + i] * scale - offset for i in (0, 2))
    extent = end - start if aligned else jnp.maximum(end - start, 1)
    length_of_bin = divide(extent, jnp.asarray(bins, extent.dtype))
    points = ratio if ratio > 0 else jnp.ceil(length_of_bin)
    # A region that is nowhere has no points. It also keeps the loop over them a loop: see _each_point.
    points = jnp.where(jnp.isnan(extent), 0, points).astype(jnp.int32)
    return _Axis(start, length_of_bin, points, bins, length)


def _axes(
    rois: Array, scale: float, bins: tuple[int, int], size: tuple[int, int], ratio: int, aligned: bool
) -> tuple[_Axis, _Axis]:
    """Return the vertical and the horizontal axis: a region is (image, x1, y1, x2, y2)."""
    regions = rois.astype(accumulation_dtype(rois.dtype))
    return (
        _axis(regions, 2, scale, bins[0], size[0], ratio, aligned),
        _axis(regions, 1, scale, bins[1], size[1], ratio, aligned),
    )


def _positions(axis: _Axis, point: Array) -> Array:
    """Return where the ``point``-th point of every bin lies."""
    # A bin without points is never sampled, but must not divide by zero.
    step = axis.bin / jnp.maximum(axis.points, 1)
    return (axis.start + (point + 0.5) * step)[:, None] + jnp.arange(axis.bins) * axis.bin[:, None]


def _sides(axis: _Axis, point: Array, position: Array) -> _Sides:
    """Return the neighbours of the ``point``-th point of every bin; one too far outside counts for nothing."""
    counts = (position >= -1) & (position <= axis.length) & (point < axis.points)[:, None]
    position = jnp.maximum(position, 0)
    low = jnp.minimum(position.astype(jnp.int32), axis.length - 1)
    high = jnp.minimum(low + 1, axis.length - 1)
    beyond = jnp.where(low >= axis.length - 1, 0, position - low)
    return _Sides(low, high, jnp.where(counts, 1 - beyond, 0), jnp.where(counts, beyond, 0))


def _each_point(axes: tuple[_Axis, _Axis], total: Array, add: ArrayFunction) -> Array:
    """Return ``total`` after ``add(total, rows, columns, weight)`` for every corner of every point.

    A step computes the positions of the next one: what a loop carries is one array, where XLA may compute
    anything else twice with other rounding, and a point would weigh other pixels than it lies between.
    """
    vertical, horizontal = axes
    across = horizontal.points.max()
    count = jnp.maximum(vertical.points * horizontal.points, 1).astype(vertical.bin.dtype)

    def at(i: Array) -> tuple[Array, Array]:
        return _positions(vertical, i // across), _positions(horizontal, i % across)

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        total, down, right = state
        y, x = _sides(vertical, i // across, down), _sides(horizontal, i % across, right)
        for rows, height in ((y.low, y.low_weight), (y.high, y.high_weight)):
            for columns, width in ((x.low, x.low_weight), (x.high, x.high_weight)):
                weight = height[:, :, None] * width[:, None, :] / count[:, None, None]
                total = add(total, rows[:, :, None], columns[:, None, :], weight[..., None])
        return total, *at(i + 1)

    start = (total, *at(jnp.zeros((), jnp.int32)))
    return jax.lax.fori_loop(0, vertical.points.max() * across, step, start)[0]


def _images(rois: Array) -> Array:
    """Return the image of every region, to be broadcast over its bins."""
    return rois[:, 0].astype(jnp.int32)[:, None, None]


@lowering_when_defined("torchvision::roi_align", dtypes=FLOATING)
def roi_align(
    input: Array,
    rois: Array,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Array:
    """The mean of interpolated points in every bin of every region."""
    bins, dtype = (pooled_height, pooled_width), accumulation_dtype(input.dtype)
    if rois.shape[0] == 0 or input.size == 0:
        return jnp.zeros((rois.shape[0], input.shape[1], *bins), input.dtype)
    height, width = input.shape[2:]
    axes = _axes(rois, spatial_scale, bins, (height, width), sampling_ratio, aligned)
    pixels, images = input.transpose(0, 2, 3, 1), _images(rois)

    def add(total: Array, rows: Array, columns: Array, weight: Array) -> Array:
        return total + pixels[images, rows, columns].astype(dtype) * weight.astype(dtype)

    total = jnp.zeros((rois.shape[0], *bins, input.shape[1]), dtype)
    return cast(_each_point(axes, total, add).transpose(0, 3, 1, 2), input.dtype)


@lowering_when_defined("torchvision::_roi_align_backward", dtypes=FLOATING, accumulate="grad")
def roi_align_backward(
    grad: Array,
    rois: Array,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Array:
    """The gradient of ``roi_align``: every pixel gets its share of the bins it was part of."""
    bins = (pooled_height, pooled_width)
    total = jnp.zeros((batch_size, height, width, channels), grad.dtype)
    if rois.shape[0] and total.size:
        axes = _axes(rois, spatial_scale, bins, (height, width), sampling_ratio, aligned)
        shares, images = grad.transpose(0, 2, 3, 1), _images(rois)

        def add(total: Array, rows: Array, columns: Array, weight: Array) -> Array:
            return total.at[images, rows, columns].add(shares * weight.astype(grad.dtype))

        total = _each_point(axes, total, add)
    return total.transpose(0, 3, 1, 2)


# Regions of interest, by their largest pixel


def _round(x: Array) -> Array:
    """Round as C does: halves away from zero."""
    whole = jnp.trunc(x)
    return jnp.where(jnp.abs(x - whole) >= 0.5, whole + jnp.sign(x), whole)


def _extent(first: Array, last: Array, scale: float, bins: int, length: int) -> tuple[Array, Array]:
    """Return where every bin begins and ends along one axis, in whole pixels inside the image."""
    begin, end = _round(first * scale), _round(last * scale)
    pixels = jnp.maximum(end - begin + 1, 1)
    step = divide(pixels, jnp.asarray(bins, pixels.dtype))
    index = jnp.arange(bins)
    low = jnp.floor(index * step[:, None]) + begin[:, None]
    high = jnp.ceil((index + 1) * step[:, None]) + begin[:, None]
    low, high = (jnp.clip(edge, 0, length).astype(jnp.int32) for edge in (low, high))
    return low, high


@lowering_when_defined("torchvision::roi_pool", dtypes=FLOATING)
def roi_pool(
    input: Array, rois: Array, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[Array, Array]:
    """The largest pixel in every bin of every region, and which it is; an empty bin is 0 of none."""
    shape = (rois.shape[0], pooled_height, pooled_width, input.shape[1])
    if rois.shape[0] == 0 or input.size == 0:
        nothing = jnp.zeros((shape[0], shape[3], *shape[1:3]), input.dtype)
        return nothing, nothing.astype(jnp.int32) - (rois.shape[0] > 0)
    regions = rois.astype(accumulation_dtype(rois.dtype))
    height, width = input.shape[2:]
    top, bottom = _extent(regions[:, 2], regions[:, 4], spatial_scale, pooled_height, height)
    left, right = _extent(regions[:, 1], regions[:, 3], spatial_scale, pooled_width, width)
    pixels, images = input.transpose(0, 2, 3, 1), _images(rois)
    across = jnp.maximum((right - left).max(), 0)

    def step(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        rows, columns = (top + i // across)[:, :, None], (left + i % across)[:, None, :]
        inside = (rows < bottom[:, :, None]) & (columns < right[:, None, :])
        values = pixels[images, rows, columns]
        better = inside[..., None] & (values > state[0])
        where = (rows * width + columns)[..., None].astype(jnp.int32)
        return jnp.where(better, values, state[0]), jnp.where(better, where, state[1])

    empty = ((bottom <= top)[:, :, None] | (right <= left)[:, None, :])[..., None]
    # Not minus infinity: torchvision starts from the lowest finite number, and a bin of -inf pixels keeps it.
    lowest = jnp.where(empty, 0, torch.finfo(to_torch_dtype(input.dtype)).min).astype(input.dtype)
    start = (jnp.broadcast_to(lowest, shape), jnp.full(shape, -1, jnp.int32))
    steps = jnp.maximum((bottom - top).max(), 0) * across
    best, which = jax.lax.fori_loop(0, steps, step, start)
    return best.transpose(0, 3, 1, 2), which.transpose(0, 3, 1, 2)


@lowering_when_defined(
    "torchvision::_roi_pool_backward",
    ignores=("spatial_scale", "pooled_height", "pooled_width"),
    dtypes=FLOATING,
    accumulate="grad",
)
def roi_pool_backward(
    grad: Array,
    rois: Array,
    argmax: Array,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
) -> Array:
    """The gradient of ``roi_pool``: all of a bin's to its largest pixel."""
    total = jnp.zeros((batch_size, channels, height * width + 1), grad.dtype)
    images = rois[:, 0].astype(jnp.int32)[:, None, None, None]
    # What belongs to no pixel goes to one past the last, which is cut off.
    where = jnp.where(argmax < 0, height * width, argmax)
    total = total.at[images, jnp.arange(channels)[:, None, None], where].add(grad)
    return total[..., :-1].reshape(batch_size, channels, height, width)
