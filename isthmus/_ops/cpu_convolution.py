"""Convolutions for which XLA has nothing but slow loops on the CPU: in groups, or of a window larger than the input.

They are taken apart into what it is fast at: one convolution for each group, or one product for each place in the
window. Depthwise ones run up to fifty times as fast, the gradient of a grouped one's weight several hundred times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isthmus._ops.common import cast
from isthmus._ops.matmul import precision
from isthmus._runtime import compiler

Array = Any
# Below so many products the loops are done before anything else has begun.
_FEW = 2**18
# Each adds to what XLA has to compile.
_MOST_GROUPS = 64
_MOST_PLACES = 64


def takes(*planned: Any) -> bool:
    """Return whether a convolution on this device is better taken apart."""
    return compiler.platform() == "cpu" and is_slow(*planned)


def is_slow(input: Array, weight: Array, strides: Sequence[int], *others: Any) -> bool:
    """Return whether XLA has but loops for a convolution on the CPU, and enough for them to do."""
    groups, sizes, window = others[-2], input.shape[2:], weight.shape[2:]
    if not jnp.issubdtype(input.dtype, jnp.floating):
        return False
    if not all(type(n) is int for n in (*input.shape, *weight.shape)):
        return False  # what a program is exported for may be larger
    products = input.shape[0] * math.prod(sizes) // math.prod(strides) * math.prod(weight.shape)
    larger = any(k > n for k, n in zip(window, sizes, strict=True))
    splits = _in_groups(weight, groups) or math.prod(window) <= _MOST_PLACES
    return (groups > 1 or larger) and products >= _FEW and splits


def _in_groups(weight: Array, groups: int) -> bool:
    return weight.shape[1] > 1 and 1 < groups <= _MOST_GROUPS


def apart(
    input: Array,
    weight: Array,
    strides: Sequence[int],
    around: Sequence[tuple[int, int]],
    spread: Sequence[int],
    dilations: Sequence[int],
    groups: int,
    dtype: Any,
) -> Array:
    """Return such a convolution, with results in ``dtype``; the weight is (out, in each group, *window)."""
    if not _in_groups(weight, groups):
        return _by_places(input, weight, strides, around, spread, dilations, groups, dtype)
    how: dict[str, Any] = {"precision": precision(), "preferred_element_type": dtype}
    pairs = zip(jnp.split(input, groups, 1), jnp.split(weight, groups, 0), strict=True)
    found = [jax.lax.conv_general_dilated(a, b, strides, around, spread, dilations, **how) for a, b in pairs]
    return jnp.concatenate(found, 1)


def _by_places(
    input: Array,
    weight: Array,
    strides: Sequence[int],
    around: Sequence[tuple[int, int]],
    spread: Sequence[int],
    dilations: Sequence[int],
    groups: int,
    dtype: Any,
) -> Array:
    """Return the sum, over the places in the window, of what lies there times its weight."""
    inner = [(low, high, gap - 1) for (low, high), gap in zip(around, spread, strict=True)]
    padded = jax.lax.pad(input, jnp.zeros((), input.dtype), [(0, 0, 0), (0, 0, 0), *inner])
    window = weight.shape[2:]
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, window, strict=True)]
    sizes = [(n - r) // s + 1 for n, r, s in zip(padded.shape[2:], reach, strides, strict=True)]
    total: Array = 0
    for place in itertools.product(*map(range, window)):
        first = [at * d for at, d in zip(place, dilations, strict=True)]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, sizes, strides, strict=True)]
        there = jax.lax.slice(padded, [0, 0, *first], [*padded.shape[:2], *last], [1, 1, *strides])
        total = total + _product(there, weight[(..., *place)], groups, dtype)
    return total


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
