"""Sizes and strides: what a layout covers of its storage, and the shape a storage is kept in.

``Spec`` is the one record of a layout: size, strides, dtype and, where it matters, the offset. ``nodes.Type`` is the
one record of a value without a layout. The functions answer what plans, views, slots and graphs ask of strides::

    span((3, 2), (1, 3))             # 6: elements from the first to the last
    is_dense((3, 2), (1, 3))         # True: a transposed matrix has no gaps
    storage_shape((3, 2), (1, 3))    # (2, 3): the array that a storage for it holds, row by row

A storage is kept as an array whose row-major elements are the storage's, in the shape that makes reading the view a
transpose. All of it is arithmetic on tuples; torch is needed for the dtype alone, and JAX not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Spec:
    """The layout of a tensor on its storage: size, strides, dtype and the offset it starts at, in elements.

    Every layout that is stored, compared or hashed is one of these. In keys and plans the offset is left at 0, because
    it is an input of the program: a slice that slides along its storage compiles once.
    """

    size: Ints
    stride: Ints
    dtype: torch.dtype
    offset: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        """Return the layout of a tensor without its offset."""
        # Offsets are inputs of programs, so they stay out of keys.
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @classmethod
    def at(cls, tensor: torch.Tensor) -> Spec:
        """Return the layout of a tensor with its offset."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, int(tensor.storage_offset()))

    @cached_property
    def is_as_made(self) -> bool:
        """Whether torch's bare new tensor has these strides; the offset aside."""
        return is_as_made(self.size, self.stride)


def contiguous_strides(size: Sequence[int]) -> Ints:
    """Return the strides of a row-major array of this size."""
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= max(n, 1)  # torch counts an empty dim as one element wide
    return tuple(reversed(strides))


def is_as_made(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether torch's bare new tensor has this layout: a row-major one with elements.

    Of an empty tensor the strides it computes are those of no other device's.
    """
    return 0 not in size and tuple(stride) == contiguous_strides(size)


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements of storage a view covers from its first to its last."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def is_dense(size: Ints, stride: Ints) -> bool:
    """Return whether a layout fills its storage without gaps or overlaps."""
    # The stride of a dim of length one says nothing.
    order = [d for d in storage_order(size, stride) if size[d] != 1]
    dense = tuple(size[d] for d in order)
    # Without the dims of length one, a dense layout has the strides of a row-major array in some order.
    return 0 in size or tuple(stride[d] for d in order) == contiguous_strides(dense)


def storage_shape(size: Ints, stride: Ints) -> Ints:
    """Return the shape in which a new storage for this layout is kept.

    A dense layout keeps its dims in the order of their strides, so that reading it is a transpose.
    """
    if is_dense(size, stride):
        return tuple(size[d] for d in storage_order(size, stride))
    return (span(size, stride),)


def storage_order(size: Ints, stride: Ints) -> list[int]:
    """Return the dims from the largest stride to the smallest."""
    # Dims of equal strides (lengths of one, expanded dims) stay in order, so that a row-major layout is the identity.
    return sorted(range(len(size)), key=lambda d: (-stride[d], d))


def packed_strides(size: Ints, stride: Ints) -> Ints:
    """Return the strides of a layout without gaps whose dims lie in memory in the same order."""
    order = storage_order(size, stride)
    packed = dict(zip(order, contiguous_strides([size[d] for d in order]), strict=True))
    return tuple(packed[d] for d in range(len(size)))


def channels_last_strides(size: Ints) -> Ints:
    """Return the strides of (batch, channels, height, width) whose channels lie side by side in memory."""
    _, channels, height, width = size
    return (channels * height * width, 1, channels * width, channels)
