"""Up- and downsampling: one dim at a time, from weights and places known before the program runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import accumulation_dtype, cast, keyword_signature
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported

Array = Any
Taps = list[tuple[Any, Any]]
"""For each output place, the input places it mixes and their weights."""
Windows = tuple[Any, Any]
"""The same as two tables, output places by taps, in which no row has a place twice."""


def ratio(size: int, count: int, scale: float | None, dtype: Any) -> Any:
    """Return input places per output place, rounded as torch rounds it."""
    if scale is not None and scale > 0:
        return dtype(1.0 / scale)
    return dtype(size) / dtype(count)


def _nearest(size: int, count: int, scale: float | None, exact: bool) -> Any:
    """Return the input place of each output place; torch computes it in float32 whatever the input."""
    places = np.arange(count, dtype=np.float32)
    if not exact and count == size:
        return np.arange(count)
    if not exact and count == 2 * size:
        return np.arange(count) // 2
    step = ratio(size, count, scale, np.float32)
    found = np.floor((places + np.float32(0.5)) * step if exact else places * step)
    return np.minimum(found.astype(np.int64), size - 1)


def _sources(size: int, count: int, scale: float | None, align: bool, dtype: Any) -> Any:
    places = np.arange(count, dtype=dtype)
    if align:
        return (dtype(size - 1) / dtype(count - 1) if count > 1 else dtype(0)) * places
    return ratio(size, count, scale, dtype) * (places + dtype(0.5)) - dtype(0.5)


def _linear_taps(size: int, count: int, scale: float | None, align: bool, dtype: Any) -> Taps:
    if size == count:
        return [(np.arange(count), np.ones(count, dtype))]
    source = np.maximum(_sources(size, count, scale, align, dtype), dtype(0))
    low = np.minimum(source.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    weight = np.clip(source - low.astype(dtype), dtype(0), dtype(1))
    return [(low, dtype(1) - weight), (high, weight)]


def _cubic_taps(size: int, count: int, scale: float | None, align: bool, dtype: Any) -> Taps:
    source = _sources(size, count, scale, align, dtype)
    low = np.minimum(np.floor(source).astype(np.int64), size - 1)
    t = np.clip(source - low.astype(dtype), dtype(0), dtype(1))
    return [(np.clip(low + k - 1, 0, size - 1), w) for k, w in enumerate(cubic_weights(t))]


def cubic_weights(t: Any) -> list[Any]:
    """Return the weights of four neighbours of a point ``t`` of the way from the second to the third."""
    a = -0.75

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _mix(x: Array, dim: int, taps: Taps) -> Array:
    """Return the weighted sum of the taps along one dim."""
    total = None
    for places, weights in taps:
        shaped = weights.astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - dim - 1))
        part = jnp.take(x, places, axis=dim) * shaped
        total = part if total is None else total + part
    return total


def _take(x: Array, size: Sequence[int], scales: Sequence[float | None], exact: bool) -> Array:
    for dim, (count, scale) in enumerate(zip(size, scales, strict=True), start=2):
        if x.shape[dim] != count or exact or scale is not None:
            x = jnp.take(x, _nearest(x.shape[dim], count, scale, exact), axis=dim)
    return x


def _resample(
    taps: Callable[..., Taps], x: Array, size: Sequence[int], scales: Sequence[float | None], align: bool
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


def _fixed_point(weights: Any) -> tuple[Any, int]:
    """Return the weights as 16-bit integers, and by how many bits they are shifted: as many as fit."""
    bits = 0
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


_SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}


def file_pair(
    name: str, n: int, function: Callable[[Array, dict[str, Any]], Array], options: tuple[str, ...]
) -> None:
    """File a resampling and its backward, which is its transpose."""
    rest = [*options, *_SCALES[n]]

    def forward(**values: Any) -> Array:
        x = values["self"]
        if 0 in x.shape:
            return jnp.zeros((*x.shape[:2], *values["output_size"]), x.dtype)
        return cast(function(x, values), x.dtype)

    def backward(**values: Any) -> Array:
        grad, wide = values["grad_output"], accumulation_dtype(values["grad_output"].dtype)
        shape = tuple(values["input_size"])
        if 0 in grad.shape or 0 in shape:
            return jnp.zeros(shape, grad.dtype)
        like = jax.ShapeDtypeStruct(shape, wide)  # type: ignore[no-untyped-call]
        (found,) = jax.linear_transpose(lambda x: function(x, values), like)(cast(grad, wide))
        return cast(found, grad.dtype)

    forward.__doc__ = "Resample every spatial dim to ``output_size``."
    backward.__doc__ = "The gradient of the resampling for its input."
    before = ["grad_output", "output_size", "input_size", *rest]
    forward.__signature__ = keyword_signature(["self", "output_size", *rest])  # type: ignore[attr-defined]
    backward.__signature__ = keyword_signature(before)  # type: ignore[attr-defined]
    lowering(getattr(aten, name).default)(forward)
    lowering(getattr(aten, f"{name}_backward").default)(backward)


def _nearest_function(n: int, exact: bool) -> Callable[[Array, dict[str, Any]], Array]:
    return lambda x, v: _take(x, v["output_size"], [v[s] for s in _SCALES[n]], exact)


def _mixing_function(n: int, taps: Callable[..., Taps]) -> Callable[[Array, dict[str, Any]], Array]:
    def function(x: Array, values: dict[str, Any]) -> Array:
        size, scales = values["output_size"], [values[s] for s in _SCALES[n]]
        if x.dtype == np.uint8 and n == 2:

            def windows(size: int, count: int, scale: float | None) -> Windows:
                return _windows(size, taps(size, count, scale, values["align_corners"], np.float64))

            return mix_bytes(x, size, scales, windows)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise Unsupported(f"torch does not mix {x.dtype}")
        wide = cast(x, accumulation_dtype(x.dtype))
        return _resample(taps, wide, size, scales, values["align_corners"])

    return function


for _n in (1, 2, 3):
    file_pair(f"upsample_nearest{_n}d", _n, _nearest_function(_n, False), ())
    file_pair(f"_upsample_nearest_exact{_n}d", _n, _nearest_function(_n, True), ())
for _name, _n, _taps in (
    ("upsample_linear1d", 1, _linear_taps),
    ("upsample_bilinear2d", 2, _linear_taps),
    ("upsample_trilinear3d", 3, _linear_taps),
    ("upsample_bicubic2d", 2, _cubic_taps),
):
    file_pair(_name, _n, _mixing_function(_n, _taps), ("align_corners",))
