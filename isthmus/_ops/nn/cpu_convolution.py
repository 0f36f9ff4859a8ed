"""Convolutions for which XLA has nothing but slow loops on the CPU: in groups, or of a window larger than the input.

They are taken apart into what it is fast at: one convolution for each group, or one product for each place in the
window. Depthwise ones run up to fifty times as fast, the gradient of a grouped one's weight several hundred times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from isthmus._ops.common import Array, cast
from isthmus._ops.linalg.matmul import precision
from isthmus._runtime import compiler

# Below so many products the loops are done before anything else has begun.
_FEW = 2**18
# Each adds to what XLA has to compile, in the gradient of the weight a sum.
_MOST_GROUPS = 64
_MOST_PLACES = 64
MOST_SUMS = 25


class Convolution(NamedTuple):
    """A convolution without bias as XLA takes it; the weight is (out, in each group, *window)."""

    input: Array
    weight: Array
    strides: Sequence[int]
    around: Sequence[tuple[int, int]]
    spread: Sequence[int]
    dilations: Sequence[int]
    groups: int
    dtype: Any


def whole(given: Convolution) -> Array:
    """Return a convolution as one op of XLA's."""
    return jax.lax.conv_general_dilated(
        given.input,
        given.weight,
        window_strides=given.strides,
        padding=given.around,
        lhs_dilation=given.spread,
        rhs_dilation=given.dilations,
        feature_group_count=given.groups,
        precision=precision(),
        preferred_element_type=given.dtype,
    )


def takes(given: Convolution, most: int = _MOST_PLACES) -> bool:
    """Return whether a convolution on this device is better taken apart, at most into so many places."""
    return compiler.platform() == "cpu" and is_slow(given, most)


def is_slow(given: Convolution, most: int = _MOST_PLACES) -> bool:
    """Return whether XLA has but loops for a convolution on the CPU, and enough for them to do."""
    shape, weights = given.input.shape, given.weight.shape
    if not jnp.issubdtype(given.input.dtype, jnp.floating):
        return False
    if not all(type(n) is int for n in (*shape, *weights)):
        return False  # what a program is exported for may be larger
    products = shape[0] * math.prod(shape[2:]) // math.prod(given.strides) * math.prod(weights)
    larger = any(k > n for k, n in zip(weights[2:], shape[2:], strict=True))
    splits = _in_groups(given) or math.prod(weights[2:]) <= most
    return (given.groups > 1 or larger) and products >= _FEW and splits


def _in_groups(given: Convolution) -> bool:
    return given.weight.shape[1] > 1 and 1 < given.groups <= _MOST_GROUPS


def apart(given: Convolution) -> Array:
    """Return such a convolution."""
    if not _in_groups(given):
        return _by_places(given)
    inputs, weights = jnp.split(given.input, given.groups, 1), jnp.split(given.weight, given.groups, 0)
    groups = [given._replace(input=x, weight=w, groups=1) for x, w in zip(inputs, weights, strict=True)]
    return jnp.concatenate([whole(group) for group in groups], 1)


def _by_places(given: Convolution) -> Array:
    """Return the sum, over the places in the window, of what lies there times its weight."""
    input, weight, strides, around, spread, dilations, groups, dtype = given
    inner = [(low, high, gap - 1) for (low, high), gap in zip(around, spread, strict=True)]
    padded = jax.lax.pad(input, jnp.zeros((), input.dtype), [(0, 0, 0), (0, 0, 0), *inner])
    window = weight.shape[2:]
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, window, strict=True)]
    sizes = [(n - r) // s + 1 for n, r, s in zip(padded.shape[2:], reach, strides, strict=True)]
    products = []
    for place in itertools.product(*map(range, window)):
        first = [at * d for at, d in zip(place, dilations, strict=True)]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, sizes, strides, strict=True)]
        there = jax.lax.slice(padded, [0, 0, *first], [*padded.shape[:2], *last], [1, 1, *strides])
        products.append(_product(there, weight[(..., *place)], groups, dtype))
    return jnp.asarray(sum(products))  # from 0: a sum of negative zeros is a positive one, as a dot's is


def _product(there: Array, weight: Array, groups: int, dtype: Any) -> Array:
    """Return one place's part of the result; only where a group has several inputs is there anything to sum."""
    batch, channels, *sizes = there.shape
    each = channels // groups
    if each == 1:
        there = jnp.repeat(there, weight.shape[0] // groups, 1)
        return cast(there, dtype) * cast(weight, dtype).reshape(-1, *[1] * len(sizes))
    grouped = there.reshape(batch, groups, each, math.prod(sizes))
    split = weight.reshape(groups, -1, each)
    how: dict[str, Any] = {"precision": precision(), "preferred_element_type": dtype}
    return jnp.einsum("bgil,goi->bgol", grouped, split, **how).reshape(batch, -1, *sizes)
