"""Convolutions that XLA is slow at: on the CPU in groups, or of a window larger than the input; on GPUs depthwise ones.

They are taken apart into what it is fast at: one convolution for each group, or one product for each place in the
window. On the CPU depthwise ones run up to fifty times as fast, the gradient of a grouped one's weight several hundred
times; on an H200 a depthwise window of 7 x 7 ran five times as fast as cuDNN's, whose gradient of the weight is better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from isthmus._ops.common import Array, accumulation_dtype, cast
from isthmus._ops.linalg.matmul import einsum, precision
from isthmus._runtime import compiler

# Below so many products the loops are done before anything else has begun.
_FEW = 2**18
# Each adds to what XLA has to compile, in the gradient of the weight a sum.
_MOST_GROUPS = 64
_MOST_PLACES = 64
_MOST_SUMS = 25


class Convolution(NamedTuple):
    """A convolution without bias as XLA takes it; the weight is (out, in each group, *window)."""

    input: Array
    weight: Array
    strides: Sequence[int]
    around: Sequence[tuple[int, int]]
    spread: Sequence[int]
    dilations: Sequence[int]
    groups: int
    dtype: DTypeLike


def whole(conv: Convolution) -> Array:
    """Return a convolution as one op of XLA's."""
    return jax.lax.conv_general_dilated(
        conv.input,
        conv.weight,
        window_strides=conv.strides,
        padding=conv.around,
        lhs_dilation=conv.spread,
        rhs_dilation=conv.dilations,
        feature_group_count=conv.groups,
        precision=precision(),
        preferred_element_type=conv.dtype,
    )


def takes(conv: Convolution) -> bool:
    """Return whether a convolution on this device is better taken apart."""
    depthwise = conv.weight.shape[1] == 1 and conv.groups > 1
    return (compiler.platform() == "cpu" or (compiler.platform() == "gpu" and depthwise)) and is_slow(conv)


def takes_for_weight(conv: Convolution) -> bool:
    """Return whether the gradient of its weight is better taken through a convolution taken apart."""
    return compiler.platform() == "cpu" and is_slow(conv, _MOST_SUMS)


def is_slow(conv: Convolution, most: int = _MOST_PLACES) -> bool:
    """Return whether XLA has but loops on the CPU, and enough for them to do; at most so many places."""
    shape, weights = conv.input.shape, conv.weight.shape
    if not jnp.issubdtype(conv.input.dtype, jnp.floating):
        return False
    if not all(type(n) is int for n in (*shape, *weights)):
        return False  # what a program is exported for may be larger
    products = shape[0] * math.prod(shape[2:]) // math.prod(conv.strides) * math.prod(weights)
    larger = any(k > n for k, n in zip(weights[2:], shape[2:], strict=True))
    splits = _in_groups(conv) or math.prod(weights[2:]) <= most
    return (conv.groups > 1 or larger) and products >= _FEW and splits


def _in_groups(conv: Convolution) -> bool:
    return conv.weight.shape[1] > 1 and 1 < conv.groups <= _MOST_GROUPS


def apart(conv: Convolution) -> Array:
    """Return a convolution as one for each group, or as a sum over the places of its window."""
    if not _in_groups(conv):
        return by_places(conv)
    inputs, weights = jnp.split(conv.input, conv.groups, 1), jnp.split(conv.weight, conv.groups, 0)
    groups = [conv._replace(input=x, weight=w, groups=1) for x, w in zip(inputs, weights, strict=True)]
    return jnp.concatenate([whole(group) for group in groups], 1)


def by_places(conv: Convolution) -> Array:
    """Return the sum, over the places in the window, of what lies there times its weight."""
    input, weight, strides, around, spread, dilations, groups, dtype = conv
    inner = [(low, high, gap - 1) for (low, high), gap in zip(around, spread, strict=True)]
    padded = jax.lax.pad(input, jnp.zeros((), input.dtype), [(0, 0, 0), (0, 0, 0), *inner])
    window = weight.shape[2:]
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, window, strict=True)]
    sizes = [(n - r) // s + 1 for n, r, s in zip(padded.shape[2:], reach, strides, strict=True)]
    # The sum is as wide as a convolution's own; each product rounded to a half type would add its error.
    acc_dtype = accumulation_dtype(dtype)
    products = []
    for place in itertools.product(*map(range, window)):
        first = [i * d for i, d in zip(place, dilations, strict=True)]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, sizes, strides, strict=True)]
        there = jax.lax.slice(padded, [0, 0, *first], [*padded.shape[:2], *last], [1, 1, *strides])
        products.append(_product(there, weight[(..., *place)], groups, acc_dtype))
    # From 0: a sum of negative zeros is a positive one, as a dot's is.
    return cast(jnp.asarray(sum(products)), dtype)


def _product(there: Array, weight: Array, groups: int, dtype: DTypeLike) -> Array:
    """Return one place's part of the result; only where a group has several inputs is there anything to sum."""
    batch, channels, *sizes = there.shape
    each = channels // groups
    if each == 1:
        there = jnp.repeat(there, weight.shape[0] // groups, 1)
        return cast(there, dtype) * cast(weight, dtype).reshape(-1, *[1] * len(sizes))
    grouped = there.reshape(batch, groups, each, math.prod(sizes))
    split = weight.reshape(groups, -1, each)
    return einsum("bgil,goi->bgol", grouped, split, dtype).reshape(batch, -1, *sizes)
