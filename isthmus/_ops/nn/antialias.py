"""Resampling with an antialiasing filter: each output place sees a window as wide as its share of the input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from isthmus._ops.common import accumulation_dtype, cast
from isthmus._ops.nn.resampling import Windows, file_pair, mix_bytes, ratio
from isthmus.errors import Unsupported

Array = Any
Filter = Callable[[Any], Any]


def _triangle(x: Any) -> Any:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: Any) -> Any:
    a, x = -0.5, np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x: Any) -> Any:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


def _windows(
    size: int, count: int, scale: float | None, align: bool, width: int, filter: Filter, dtype: Any
) -> Windows:
    """Return the places and normalised weights of each output place, rounded in ``dtype`` as torch rounds."""
    step = _step(size, count, scale, align, dtype)
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


def _step(size: int, count: int, scale: float | None, align: bool, dtype: Any) -> Any:
    if align:
        return dtype(size - 1) / dtype(count - 1) if count > 1 else dtype(0)
    return ratio(size, count, scale, dtype)


def _mix(x: Array, dim: int, windows: Windows) -> Array:
    """Return the weighted sum of each window along one dim."""
    places, weights = windows
    shape = (*places.shape, *(1,) * (x.ndim - dim - 1))
    # Chosen, not multiplied by zero: an infinity beside a window must not reach it.
    seen = jnp.where((weights != 0).reshape(shape), jnp.take(x, places, axis=dim), jnp.zeros((), x.dtype))
    return (seen * weights.astype(x.dtype).reshape(shape)).sum(dim + 1)


def _function(width: int, filter: Filter) -> Callable[[Array, dict[str, Any]], Array]:
    def function(x: Array, values: dict[str, Any]) -> Array:
        size, align = values["output_size"], values["align_corners"]
        scales = [values["scales_h"], values["scales_w"]]
        if x.dtype == np.uint8:

            def windows(size: int, count: int, scale: float | None) -> Windows:
                return _windows(size, count, scale, align, width, filter, np.float64)

            return mix_bytes(x, size, scales, windows)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise Unsupported(f"torch does not mix {x.dtype}")
        dtype = np.float64 if x.dtype == np.float64 else np.float32
        x = cast(x, accumulation_dtype(x.dtype))
        for dim in (3, 2):
            # torch leaves a dim that keeps its size alone whatever its scale, but not so in the gradient.
            if x.shape[dim] != size[dim - 2] or "grad_output" in values:
                shape = (x.shape[dim], size[dim - 2], scales[dim - 2], align)
                x = _mix(x, dim, _windows(*shape, width, filter, dtype))
        return x

    return function


file_pair("_upsample_bilinear2d_aa", 2, _function(2, _triangle), ("align_corners",))
file_pair("_upsample_bicubic2d_aa", 2, _function(4, _cubic), ("align_corners",))
file_pair("_upsample_lanczos2d_aa", 2, _function(6, _lanczos), ("align_corners",))
