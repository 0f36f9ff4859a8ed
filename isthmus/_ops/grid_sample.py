"""Sampling at the points of a grid: the gradient is JAX's own of formulas with torch's kinks."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import accumulation_dtype, cast
from isthmus._ops.registry import lowering
from isthmus._ops.resampling import cubic_weights

Array = Any
_ZEROS, _BORDER = 0, 1
_BILINEAR, _NEAREST = 0, 1


def _unnormalize(x: Array, size: int, align: bool) -> Array:
    """Return coordinates in [-1, 1] as places."""
    return (x + 1) / 2 * (size - 1) if align else ((x + 1) * size - 1) / 2


def _clip(x: Array, size: int) -> Array:
    # By choices, not by minimum and maximum: at the border torch's gradient is zero, not a half.
    return jnp.where(x <= 0, jnp.zeros_like(x), jnp.where(x >= size - 1, jnp.full_like(x, size - 1), x))


def _reflect(x: Array, size: int, align: bool) -> Array:
    twice_low, twice_high = (0, 2 * (size - 1)) if align else (-1, 2 * size - 1)
    if twice_low == twice_high:
        return jnp.zeros_like(x)
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    away = x - low
    away = jnp.where(away < 0, -away, away)
    flips = jax.lax.stop_gradient(jnp.floor(away / span))
    extra = away - flips * span
    return jnp.where(flips % 2 == 0, extra + low, span - extra + low)


def _place(x: Array, size: int, padding_mode: int, align: bool) -> Array:
    if padding_mode == _ZEROS:
        return x
    return _clip(x if padding_mode == _BORDER else _reflect(x, size, align), size)


def _gather(image: Array, places: list[Array]) -> Array:
    """Return the elements of one image (C, spatial) at whole places, zero where one is outside."""
    sizes = image.shape[1:]
    inside = jnp.ones(places[0].shape, bool)
    indices = []
    for place, size in zip(places, sizes, strict=True):
        inside &= (place >= 0) & (place <= size - 1)
        indices.append(jnp.clip(place, 0, size - 1).astype(jnp.int32))
    return jnp.where(inside, image[(slice(None), *indices)], jnp.zeros((), image.dtype))


def _linear(image: Array, points: list[Array]) -> Array:
    total = None
    lows = [jax.lax.stop_gradient(jnp.floor(p)) for p in points]
    for corner in itertools.product((0, 1), repeat=len(points)):
        weight = None
        for point, low, high in zip(points, lows, corner, strict=True):
            part = point - low if high else low + 1 - point
            weight = part if weight is None else weight * part
        value = _gather(image, [low + high for low, high in zip(lows, corner, strict=True)]) * weight
        total = value if total is None else total + value
    return total


def _cubic(image: Array, points: list[Array], padding_mode: int, align: bool) -> Array:
    lows = [jax.lax.stop_gradient(jnp.floor(p)) for p in points]
    weights = [cubic_weights(p - low) for p, low in zip(points, lows, strict=True)]
    sizes, total = image.shape[1:], None
    for taps in itertools.product(range(4), repeat=2):
        places = [
            jax.lax.stop_gradient(_place(low + tap - 1, size, padding_mode, align))
            for low, tap, size in zip(lows, taps, sizes, strict=True)
        ]
        value = _gather(image, places) * (weights[0][taps[0]] * weights[1][taps[1]])
        total = value if total is None else total + value
    return total


def _sample(image: Array, grid: Array, interpolation_mode: int, padding_mode: int, align: bool) -> Array:
    """Sample one image (C, spatial) at a grid (places, coordinates); coordinates are given last dim first."""
    sizes = image.shape[1:]
    points = [_unnormalize(grid[..., len(sizes) - 1 - d], size, align) for d, size in enumerate(sizes)]
    if interpolation_mode not in (_BILINEAR, _NEAREST):
        return _cubic(image, points, padding_mode, align)
    points = [_place(p, size, padding_mode, align) for p, size in zip(points, sizes, strict=True)]
    if interpolation_mode == _NEAREST:
        return _gather(image, [jax.lax.stop_gradient(jnp.round(p)) for p in points])
    return _linear(image, points)


def _samples(input: Array, grid: Array, interpolation_mode: int, padding_mode: int, align: bool) -> Array:
    if 0 in input.shape or 0 in grid.shape:
        return jnp.zeros((*input.shape[:2], *grid.shape[1:-1]), input.dtype)
    return jax.vmap(lambda i, g: _sample(i, g, interpolation_mode, padding_mode, align))(input, grid)


def _file(op: Any, backward: Any) -> None:
    @lowering(op)
    def forward_lowering(
        input: Array, grid: Array, interpolation_mode: int, padding_mode: int, align_corners: bool
    ) -> Array:
        """The input at each point of the grid."""
        wide = accumulation_dtype(input.dtype)
        found = _samples(cast(input, wide), cast(grid, wide), interpolation_mode, padding_mode, align_corners)
        return cast(found, input.dtype)

    @lowering(backward)
    def backward_lowering(
        grad_output: Array,
        input: Array,
        grid: Array,
        interpolation_mode: int,
        padding_mode: int,
        align_corners: bool,
        output_mask: list[bool],
    ) -> tuple[Array | None, Array | None]:
        """The gradients for the input and for the grid."""
        wide = accumulation_dtype(input.dtype)
        options = (interpolation_mode, padding_mode, align_corners)
        _, transpose = jax.vjp(lambda i, g: _samples(i, g, *options), cast(input, wide), cast(grid, wide))
        for_input, for_grid = transpose(cast(grad_output, wide))
        return (cast(for_input, input.dtype) if output_mask[0] else None), cast(for_grid, grid.dtype)


_file(aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default)
_file(aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default)
