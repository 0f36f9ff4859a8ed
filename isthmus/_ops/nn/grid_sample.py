"""Sampling at the points of a grid: the gradient is JAX's own of formulas with torch's kinks."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import Array
from isthmus._ops.nn.resampling import cubic_weights
from isthmus._ops.registry import lowering

# torch's numbers for padding_mode and interpolation_mode.
_ZEROS, _BORDER = 0, 1
_BILINEAR, _NEAREST = 0, 1


def _unnormalize(x: Array, size: int, align: bool) -> Array:
    """Return coordinates in [-1, 1] as places."""
    return (x + 1) / 2 * (size - 1) if align else ((x + 1) * size - 1) / 2


def _clip(x: Array, size: int, lost: float) -> Array:
    """Return places moved to the border; ``lost`` is where a nan goes."""
    # By choices, not by minimum and maximum: at the border torch's gradient is zero, not a half.
    inside = jnp.where(x <= 0, jnp.zeros_like(x), jnp.where(x >= size - 1, jnp.full_like(x, size - 1), x))
    return jnp.where(jnp.isnan(x), jnp.full_like(x, lost), inside)


def _reflect(x: Array, size: int, align: bool, whole: bool) -> Array:
    """Return places reflected at the borders; ``whole`` counts the reflections in 32 bits, as torch's 3-D kernel."""
    # Borders are pixel centres or pixel edges; doubled, both are integers.
    twice_low, twice_high = (0, 2 * (size - 1)) if align else (-1, 2 * size - 1)
    if twice_low == twice_high:
        return jnp.zeros_like(x)
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    away = x - low
    away = jnp.where(away < 0, -away, away)
    # Piecewise constant: only the remainder has a gradient.
    flips = jax.lax.stop_gradient(jnp.floor(away / span))
    if whole:
        extra = jax.lax.rem(away, jnp.full_like(away, span))
        even = (flips % 2 == 0) | ~(flips < 2.0**31)  # what does not fit becomes the least integer
    else:
        extra = away - flips * span
        even = flips % 2 == 0
    return jnp.where(even, extra + low, span - extra + low)


def _place(x: Array, size: int, padding_mode: int, align: bool, lost: float | None) -> Array:
    """Return where to sample; ``lost`` is where torch's 3-D kernel looks for a nan, None asks its 2-D kernel."""
    if padding_mode == _ZEROS:
        # The 3-D kernel skips what is outside; the 2-D one multiplies by 0, which a nan survives.
        return x if lost is None else jnp.where(jnp.isnan(x), -2.0, jnp.clip(x, -2.0, size + 1.0))
    reflected = x if padding_mode == _BORDER else _reflect(x, size, align, lost is not None)
    return _clip(reflected, size, 0 if lost is None else lost)


def _gather(image: Array, places: list[Array]) -> Array:
    """Return the elements of one image (C, spatial) at whole places, zero where one is outside."""
    sizes = image.shape[1:]
    inside = jnp.ones(places[0].shape, bool)
    indices = []
    for place, size in zip(places, sizes, strict=True):
        inside &= (place >= 0) & (place <= size - 1)
        # The clip keeps the gather inside; what it reads there is masked below.
        indices.append(jnp.clip(place, 0, size - 1).astype(jnp.int32))
    return jnp.where(inside, image[(slice(None), *indices)], jnp.zeros((), image.dtype))


def _linear(image: Array, points: list[Array]) -> Array:
    lows = [jax.lax.stop_gradient(jnp.floor(p)) for p in points]
    parts = []
    for corner in itertools.product((0, 1), repeat=len(points)):
        sides = zip(points, lows, corner, strict=True)
        weights = [point - low if high else low + 1 - point for point, low, high in sides]
        places = [low + high for low, high in zip(lows, corner, strict=True)]
        parts.append(_gather(image, places) * functools.reduce(jnp.multiply, weights))
    return functools.reduce(jnp.add, parts)


def _cubic(image: Array, points: list[Array], padding_mode: int, align: bool) -> Array:
    lows = [jax.lax.stop_gradient(jnp.floor(p)) for p in points]
    weights = [cubic_weights(p - low) for p, low in zip(points, lows, strict=True)]
    sizes, parts = image.shape[1:], []
    for taps in itertools.product(range(4), repeat=2):
        places = [
            jax.lax.stop_gradient(_place(low + tap - 1, size, padding_mode, align, None))
            for low, tap, size in zip(lows, taps, sizes, strict=True)
        ]
        parts.append(_gather(image, places) * (weights[0][taps[0]] * weights[1][taps[1]]))
    return functools.reduce(jnp.add, parts)


def _sample(image: Array, grid: Array, options: tuple[int, int, bool], backward: bool) -> Array:
    """Sample one image (C, spatial) at a grid (places, coordinates); coordinates are given last dim first."""
    interpolation_mode, padding_mode, align = options
    sizes = image.shape[1:]
    points = [_unnormalize(grid[..., len(sizes) - 1 - d], size, align) for d, size in enumerate(sizes)]
    if interpolation_mode not in (_BILINEAR, _NEAREST):
        return _cubic(image, points, padding_mode, align)
    # In 3-D a nan is the last place, but its gradient goes nowhere.
    lost = [None if len(sizes) == 2 else -2.0 if backward else size - 1.0 for size in sizes]
    points = [
        _place(p, size, padding_mode, align, nan_place)
        for p, size, nan_place in zip(points, sizes, lost, strict=True)
    ]
    if interpolation_mode == _NEAREST:
        return _gather(image, [jax.lax.stop_gradient(jnp.round(p)) for p in points])
    return _linear(image, points)


def _samples(input: Array, grid: Array, options: tuple[int, int, bool], backward: bool = False) -> Array:
    if 0 in input.shape or 0 in grid.shape:
        return jnp.zeros((*input.shape[:2], *grid.shape[1:-1]), input.dtype)
    return jax.vmap(lambda i, g: _sample(i, g, options, backward))(input, grid)


@lowering(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, accumulate="input")
def grid_sampler(
    input: Array, grid: Array, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Array:
    """The input at each point of the grid."""
    return _samples(input, grid, (interpolation_mode, padding_mode, align_corners))


@lowering(
    aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default, accumulate=("input", "grid")
)
def grid_sampler_backward(
    grad_output: Array,
    input: Array,
    grid: Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: list[bool],
) -> tuple[Array | None, Array | None]:
    """The gradients for the input and for the grid."""
    options = (interpolation_mode, padding_mode, align_corners)
    _, transpose = jax.vjp(lambda i, g: _samples(i, g, options, True), input, grid)
    input_grad, grid_grad = transpose(grad_output)
    return input_grad if output_mask[0] else None, grid_grad
