"""Up- and downsampling: one dim at a time, from weights and places that sizes decide (numbers or symbols).

Nearest takes one input place for each output place, linear and cubic mix two and four, and an antialiasing filter sees
a window as wide as the output place's share of the input. The gradient is the transpose of the resampling.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from isthmus._graph.arguments import Value
from isthmus._graph.names import aten
from isthmus._ops.common import (
    Array,
    HostArray,
    accumulation_dtype,
    cast,
    is_dimension,
    numbers,
    transpose_of,
)
from isthmus._ops.elementwise import keyword_signature
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported

Floating = np.floating[Any]  # type: ignore[explicit-any]  # float32 or float64, as the input is
Float = type[Floating]
Taps = list[tuple[HostArray | Array, HostArray | Array]]
"""For each output place, the input places it mixes and their weights."""
TapsOf = Callable[[int, int, float | None, bool, Float], Taps]
Filter = Callable[[HostArray], HostArray]
Windows = tuple[HostArray, HostArray]
"""The same as two tables, output places by taps, in which no row has a place twice."""


AnyArray = TypeVar("AnyArray", HostArray, Array)


def _as(size: int, dtype: Float) -> Floating | Array:
    """Return a size in a float dtype."""
    return jnp.asarray(size).astype(dtype) if is_dimension(size) else dtype(size)


def ratio(size: int, count: int, scale: float | None, dtype: Float) -> Floating | Array:
    """Return input places per output place, rounded as torch rounds it."""
    if scale is not None and scale > 0:
        return dtype(1.0 / scale)
    return _as(size, dtype) / _as(count, dtype)


def _nearest(size: int, count: int, scale: float | None, exact: bool) -> HostArray | Array:
    """Return the input place of each output place; torch computes it in float32 whatever the input."""
    xp = numbers(size, count)
    places = xp.arange(count, dtype=np.float32)
    if not exact and count == size:
        return xp.arange(count)
    if not exact and count == 2 * size:
        return xp.arange(count) // 2
    step = ratio(size, count, scale, np.float32)
    source = xp.floor((places + np.float32(0.5)) * step if exact else places * step)
    nearest = xp.minimum(source.astype(np.int64), size - 1)
    if xp is np or exact or scale is None:
        return nearest
    # Symbols that are unequal as expressions may have equal values.
    counted, same, double = xp.arange(count), jnp.asarray(count) == size, jnp.asarray(count) == 2 * size
    return jnp.where(same, counted, jnp.where(double, counted // 2, nearest))


def _aligned_ratio(size: int, count: int, scale: float | None, align: bool, dtype: Float) -> Floating | Array:
    if not align:
        return ratio(size, count, scale, dtype)
    if numbers(size, count) is np:
        return dtype(size - 1) / dtype(count - 1) if count > 1 else dtype(0)
    above = jnp.asarray(count) > 1
    return jnp.where(above, _as(size - 1, dtype) / jnp.where(above, _as(count - 1, dtype), 1), dtype(0))


def _sources(size: int, count: int, scale: float | None, align: bool, dtype: Float) -> HostArray | Array:
    places = numbers(size, count).arange(count, dtype=dtype)
    step = _aligned_ratio(size, count, scale, align, dtype)
    return step * places if align else step * (places + dtype(0.5)) - dtype(0.5)


def _linear_taps(size: int, count: int, scale: float | None, align: bool, dtype: Float) -> Taps:
    xp = numbers(size, count)
    if size == count:
        return [(xp.arange(count), xp.ones(count, dtype))]
    source = xp.maximum(_sources(size, count, scale, align, dtype), dtype(0))
    low = xp.minimum(source.astype(np.int64), size - 1)
    high = xp.minimum(low + 1, size - 1)
    weight = xp.clip(source - low.astype(dtype), dtype(0), dtype(1))
    if xp is not np:
        # Sizes that are unequal as expressions may have equal values. Halves of one element, since 0 * infinity is NaN.
        same = jnp.asarray(size) == count
        low = jnp.where(same, xp.arange(count), low)
        high, weight = jnp.where(same, low, high), jnp.where(same, dtype(0.5), weight)
    return [(low, dtype(1) - weight), (high, weight)]


def _cubic_taps(size: int, count: int, scale: float | None, align: bool, dtype: Float) -> Taps:
    xp = numbers(size, count)
    source = _sources(size, count, scale, align, dtype)
    low = xp.minimum(xp.floor(source).astype(np.int64), size - 1)
    t = xp.clip(source - low.astype(dtype), dtype(0), dtype(1))
    return [(xp.clip(low + k - 1, 0, size - 1), w) for k, w in enumerate(cubic_weights(t))]


def cubic_weights(t: AnyArray) -> list[AnyArray]:
    """Return the weights of four neighbours of a point ``t`` of the way from the second to the third."""
    # Keys' parameter: torch takes -0.75 here, and -0.5 where it antialiases, as Pillow does.
    a = -0.75

    def near(x: AnyArray) -> AnyArray:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: AnyArray) -> AnyArray:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _mix(x: Array, dim: int, taps: Taps) -> Array:
    """Return the weighted sum of the taps along one dim."""
    shape = (-1,) + (1,) * (x.ndim - dim - 1)
    parts = [jnp.take(x, places, axis=dim) * w.astype(x.dtype).reshape(shape) for places, w in taps]
    return functools.reduce(jnp.add, parts)


def _take(x: Array, size: Sequence[int], scales: Sequence[float | None], exact: bool) -> Array:
    for dim, (count, scale) in enumerate(zip(size, scales, strict=True), start=2):
        if x.shape[dim] != count or exact or scale is not None:
            x = jnp.take(x, _nearest(x.shape[dim], count, scale, exact), axis=dim)
    return x


def _resample(
    taps: TapsOf, x: Array, size: Sequence[int], scales: Sequence[float | None], align: bool
) -> Array:
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    for dim, (count, scale) in enumerate(zip(size, scales, strict=True), start=2):
        x = _mix(x, dim, taps(x.shape[dim], count, scale, align, dtype))
    return x


def _windows(size: int, taps: Taps) -> Windows:
    """Return the tables of these taps: those that the border throws together become one."""
    places, weights = (np.stack([tap[i] for tap in taps], 1) for i in (0, 1))
    dense = np.zeros((places.shape[0], size))
    np.add.at(dense, (np.arange(places.shape[0])[:, None], places), weights)
    cover = places.min(1, keepdims=True) + np.arange(places.shape[1])
    inside = np.minimum(cover, size - 1)
    return inside, np.where(cover < size, np.take_along_axis(dense, inside, 1), 0.0)


def _fixed_point(weights: HostArray) -> tuple[HostArray, int]:
    """Return the weights as 16-bit integers, and by how many bits they are shifted: as many as fit."""
    bits = 0
    # The precision of torch's uint8 kernels: as many bits as let the largest weight fit an int16.
    while bits < 22 and int(0.5 + weights.max() * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    scaled = weights * (1 << bits)
    return np.trunc(np.where(scaled < 0, scaled - 0.5, scaled + 0.5)).astype(np.int32), bits


def mix_bytes(
    x: Array,
    size: Sequence[int],
    scales: Sequence[float | None],
    windows: Callable[[int, int, float | None], Windows],
) -> Array:
    """Return bytes resampled as torch does it: in fixed point, the last dim first, bytes again in between."""
    for dim in reversed(range(2, x.ndim)):
        count = size[dim - 2]
        if x.shape[dim] == count:
            continue
        places, weights = windows(x.shape[dim], count, scales[dim - 2])
        whole, bits = _fixed_point(weights)
        shape = whole.shape + (1,) * (x.ndim - dim - 1)
        total = (jnp.take(x, places, axis=dim).astype(jnp.int32) * whole.reshape(shape)).sum(dim + 1)
        rounding = (1 << bits) >> 1
        x = jnp.clip((total.astype(jnp.int32) + rounding) >> bits, 0, 255).astype(jnp.uint8)
    return x


# Antialiasing filters


def _keys_cubic(x: HostArray) -> HostArray:
    a, x = -0.5, np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _filter_windows(
    size: int, count: int, scale: float | None, align: bool, width: int, filter: Filter, dtype: Float
) -> Windows:
    """Return the places and normalised weights of each output place, rounded in ``dtype`` as torch rounds."""
    step = _aligned_ratio(size, count, scale, align, dtype)
    # Only downsampling widens the filter: upsampling interpolates.
    support = dtype(width * 0.5) * step if step >= 1 else dtype(width * 0.5)
    taps = math.ceil(support) * 2 + 1
    center = (np.float64(step) * (np.arange(count) + 0.5)).astype(dtype)
    first = np.maximum((center - support + 0.5).astype(dtype).astype(np.int64), 0)
    last = np.minimum((center + support + 0.5).astype(dtype).astype(np.int64), size)
    cover = first[:, None] + np.arange(taps)
    real = cover < np.minimum(last, first + taps)[:, None]
    inverse = dtype(1) / step if step >= 1 else dtype(1)
    away = ((cover - center[:, None] + 0.5) * inverse).astype(dtype)
    weights = np.where(real, filter(away), 0.0).astype(dtype)
    total = weights.sum(1, keepdims=True)
    return np.minimum(cover, size - 1), np.where(
        total != 0, weights / np.where(total == 0, 1, total), weights
    )


def _mix_windows(x: Array, dim: int, windows: Windows) -> Array:
    """Return the weighted sum of each window along one dim."""
    places, weights = windows
    shape = (*places.shape, *(1,) * (x.ndim - dim - 1))
    # Chosen, not multiplied by zero: an infinity beside a window must not reach it.
    seen = jnp.where((weights != 0).reshape(shape), jnp.take(x, places, axis=dim), jnp.zeros((), x.dtype))
    return (seen * weights.astype(x.dtype).reshape(shape)).sum(dim + 1)


# Registration: each resampling with its gradient

Arguments = dict[str, Value]
"""The arguments of a call by name."""
_SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}


def _register_pair(name: str, n: int, function: Callable[[Array, Arguments], Array], *options: str) -> None:
    """Register a resampling of ``n`` spatial dims and its gradient, its transpose."""
    rest = [*options, *_SCALES[n]]

    def forward(**values: Value) -> Array:
        x = values["self"]
        if 0 in x.shape:
            return jnp.zeros((*x.shape[:2], *values["output_size"]), x.dtype)
        return cast(function(x, values), x.dtype)

    def backward(**values: Value) -> Array:
        grad, shape = values["grad_output"], tuple(values["input_size"])
        if 0 in grad.shape or 0 in shape:
            return jnp.zeros(shape, grad.dtype)
        return transpose_of(lambda x: function(x, values), shape, grad.dtype, grad)

    names = ["output_size", "input_size", *rest]
    forward.__signature__ = keyword_signature(["self", "output_size", *rest])  # type: ignore[attr-defined]
    backward.__signature__ = keyword_signature(["grad_output", *names])  # type: ignore[attr-defined]
    lowering(getattr(aten, name).default)(forward)
    lowering(getattr(aten, f"{name}_backward").default, accumulate=True)(backward)


def _nearest_function(n: int, exact: bool) -> Callable[[Array, Arguments], Array]:
    return lambda x, v: _take(x, v["output_size"], [v[s] for s in _SCALES[n]], exact)


def _mixing_function(n: int, taps: TapsOf) -> Callable[[Array, Arguments], Array]:
    def function(x: Array, values: Arguments) -> Array:
        size, align, scales = values["output_size"], values["align_corners"], [values[s] for s in _SCALES[n]]
        if x.dtype == np.uint8 and n == 2:
            return mix_bytes(
                x, size, scales, lambda s, count, scale: _windows(s, taps(s, count, scale, align, np.float64))
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise Unsupported(f"torch does not mix {x.dtype}")
        return _resample(taps, cast(x, accumulation_dtype(x.dtype)), size, scales, align)

    return function


def _filter_function(width: int, filter: Filter) -> Callable[[Array, Arguments], Array]:
    def function(x: Array, values: Arguments) -> Array:
        size, align = values["output_size"], values["align_corners"]
        scales = [values["scales_h"], values["scales_w"]]
        if x.dtype == np.uint8:
            return mix_bytes(
                x,
                size,
                scales,
                lambda n, m, scale: _filter_windows(n, m, scale, align, width, filter, np.float64),
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise Unsupported(f"torch does not mix {x.dtype}")
        dtype = np.float64 if x.dtype == np.float64 else np.float32
        x = cast(x, accumulation_dtype(x.dtype))
        for dim in (3, 2):
            # torch leaves a dim that keeps its size alone whatever its scale, but not so in the gradient.
            if x.shape[dim] != size[dim - 2] or "grad_output" in values:
                shape = (x.shape[dim], size[dim - 2], scales[dim - 2], align)
                x = _mix_windows(x, dim, _filter_windows(*shape, width, filter, dtype))
        return x

    return function


for _n in (1, 2, 3):
    _register_pair(f"upsample_nearest{_n}d", _n, _nearest_function(_n, False))
    _register_pair(f"_upsample_nearest_exact{_n}d", _n, _nearest_function(_n, True))
_register_pair("upsample_linear1d", 1, _mixing_function(1, _linear_taps), "align_corners")
_register_pair("upsample_bilinear2d", 2, _mixing_function(2, _linear_taps), "align_corners")
_register_pair("upsample_trilinear3d", 3, _mixing_function(3, _linear_taps), "align_corners")
_register_pair("upsample_bicubic2d", 2, _mixing_function(2, _cubic_taps), "align_corners")
_register_pair(
    "_upsample_bilinear2d_aa", 2, _filter_function(2, lambda x: np.maximum(1 - np.abs(x), 0)), "align_corners"
)
_register_pair("_upsample_bicubic2d_aa", 2, _filter_function(4, _keys_cubic), "align_corners")
_register_pair(
    "_upsample_lanczos2d_aa",
    2,
    _filter_function(6, lambda x: np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)),
    "align_corners",
)
