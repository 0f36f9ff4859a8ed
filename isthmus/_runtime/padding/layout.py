"""Padded arrays: what each axis consists of, where its padding is, and how one layout becomes another.

An axis of size ``s`` that is padded to 40 is one *part*, ``(s, 40)``. Merging axes (b, s) into one of size ``b*s``
keeps both parts, ``((b, 4), (s, 40))``: the array is only reshaped, and the padding is no longer at its end. An axis
along which all elements are equal, as broadcasting makes them, has length 1 until a primitive reads across it; its
layout is ``UNIFORM``.

``Padding`` has the operations that rules are made of. ``fill`` puts a value into the padding, ``relayout`` changes the
parts of an axis by a gather, ``compact`` makes it one part. Positions past the true size hold anything unless an axis
is in ``zero``: then every element that lies past the true size along that axis is zero, which saves the next mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from isthmus._runtime import compiler
from isthmus._runtime.padding.sizes import MOST_ELEMENTS, Refused, Size, Sizes, is_symbolic

Array = jax.Array


class Part(NamedTuple):
    """A factor of an axis: its true size and the padded one."""

    size: Size
    padded: int


AxisLayout: TypeAlias = tuple[Part, ...] | None
UNIFORM: AxisLayout = None


def length(axis: AxisLayout) -> int:
    """Return how many elements an axis of this layout has in the array."""
    return 1 if axis is None else math.prod(part.padded for part in axis)


def has_padding(axis: AxisLayout) -> bool:
    """Return whether an axis may have padding; a uniform one has, once it is given its length."""
    return axis is None or any(is_symbolic(part.size) for part in axis)


@dataclass(frozen=True)
class PaddedArray:
    """An array, the shape it stands for, and the layout of each axis."""

    array: Array
    shape: tuple[Size, ...]
    axes: tuple[AxisLayout, ...]
    zero: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Check that the array is as long as its layout says."""
        expected = tuple(length(axis) for axis in self.axes)
        assert self.array.shape == expected, (self.array.shape, self.shape, self.axes)
        if math.prod(expected) > MOST_ELEMENTS:
            raise Refused("layout", "a padded array has more than 2^31 elements")


def exact(array: Array) -> PaddedArray:
    """Return an array without padding as a padded one."""
    return PaddedArray(array, array.shape, tuple((Part(n, n),) for n in array.shape))


def along(vector: Array, axis: int, rank: int) -> Array:
    """Return a vector shaped to broadcast along one axis of an array of this rank."""
    return vector.reshape([-1 if i == axis else 1 for i in range(rank)])


def replaced(values: Sequence[Any], index: int, value: Any) -> tuple[Any, ...]:
    """Return ``values`` with another one at ``index``."""
    return (*values[:index], value, *values[index + 1 :])


def resized(array: Array, axis: int, size: int, value: Any = 0) -> Array:
    """Return an array that is cut or filled up at the end of an axis."""
    more = size - array.shape[axis]
    if more < 0:
        return lax.slice_in_dim(array, 0, size, axis=axis)
    if more == 0:
        return array
    config = [(0, more if i == axis else 0, 0) for i in range(array.ndim)]
    return lax.pad(array, jnp.asarray(value, array.dtype), config)


class Padding:
    """Operations on padded arrays for given sizes; counts the masks and gathers that padding cost."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.masks = self.relayouts = 0

    def layout(self, size: Size) -> AxisLayout:
        """Return the layout of an axis that is one part."""
        return (Part(size, self.sizes.padded(size)),)

    def full(self, x: PaddedArray, axes: Iterable[int] | None = None) -> PaddedArray:
        """Give uniform axes their length."""
        for i in range(len(x.shape)) if axes is None else axes:
            if x.axes[i] is UNIFORM:
                x = self.relayout(x, i, self.layout(x.shape[i]))
        return x

    def relayout(self, x: PaddedArray, i: int, target: AxisLayout) -> PaddedArray:
        """Return ``x`` with other parts for axis ``i``; elements move to where the new parts put them."""
        source = x.axes[i]
        if source == target or target is None:
            return x
        if source is None:
            shape = replaced(x.array.shape, i, length(target))
            return replace(x, array=jnp.broadcast_to(x.array, shape), axes=replaced(x.axes, i, target))
        # For each position of the new layout: which element belongs there, and where the old layout has it.
        place = self.place_of(source, self.index_of(target, lax.iota(jnp.int32, length(target))))
        self.relayouts += 1
        # Positions in the padding point anywhere; "clip" spares XLA a test, and padding may hold anything.
        array = jnp.take(x.array, place, axis=i, mode="clip")
        return replace(x, array=array, axes=replaced(x.axes, i, target), zero=x.zero - {i})

    def compact(self, x: PaddedArray, *axes: int) -> PaddedArray:
        """Return ``x`` with these axes one part each, so that their padding is at the end."""
        for i in axes:
            x = self.relayout(x, i, self.layout(x.shape[i]))
        return x

    def canonical(self, x: PaddedArray) -> PaddedArray:
        """Return ``x`` with every axis one part: what inputs and outputs of programs and loops are."""
        return self.compact(x, *range(len(x.shape)))

    def index_of(self, axis: tuple[Part, ...], place: Array) -> Array:
        """Return the true index of positions along an axis: for an index (i, j) of two parts, ``i * true size + j``."""
        index, stride = jnp.zeros_like(place), jnp.ones((), place.dtype)
        # The last part varies fastest; true sizes are strides of the index, padded ones of the position.
        for part in reversed(axis):
            index = index + place % part.padded * stride
            place, stride = place // part.padded, stride * self.sizes.true(part.size, place.dtype)
        return index

    def place_of(self, axis: tuple[Part, ...], index: Array) -> Array:
        """Return where along an axis the elements of these true indices are: the inverse of ``index_of``."""
        if len(axis) == 1:
            return index
        place, stride = jnp.zeros_like(index), 1
        for n, part in enumerate(reversed(axis)):
            size = jnp.maximum(self.sizes.true(part.size, index.dtype), 1)  # no division by a size of 0
            last = n == len(axis) - 1  # an index past the end stays past the end
            place = place + (index if last else index % size) * stride
            index, stride = index // size, stride * part.padded
        return place

    def valid(self, axis: tuple[Part, ...]) -> Array:
        """Return for each position along an axis whether it is in the true part."""
        place = lax.iota(jnp.int32, length(axis))
        mask = jnp.ones(place.shape, bool)
        for part in reversed(axis):
            # A static part has no padding, so it needs no comparison.
            if is_symbolic(part.size):
                mask &= place % part.padded < self.sizes.true(part.size)
            place = place // part.padded
        return mask

    def mask(self, x: PaddedArray, axes: Iterable[int]) -> Array:
        """Return for each element of ``x`` whether it is in the true part along ``axes``, in a shape to broadcast."""
        self.masks += 1
        mask = jnp.ones([1] * x.array.ndim, bool)
        for i in axes:
            layout = x.axes[i]
            assert layout is not None
            others = [k for k, n in enumerate(x.array.shape) if k != i and n > 1]
            if others and compiler.platform() == "cpu" and not compiler.is_portable():
                mask &= self._valid_at_once(x.array.shape, layout, i, others[0])
            else:
                mask &= along(self.valid(layout), i, x.array.ndim)
        return mask

    def _valid_at_once(self, shape: tuple[int, ...], layout: tuple[Part, ...], i: int, other: int) -> Array:
        """Return for each element of an array what ``valid`` says of its position along axis ``i``.

        XLA:CPU computes the operands of a select again for each of its readers if its mask is a vector, since such a
        select reads one array only. So the true size is compared as a vector along another axis, and the mask is a
        matrix: gradients of a layer, which three products and sums read, are then masked where they are computed.
        """
        place = lax.broadcasted_iota(jnp.int32, shape, i)
        mask = jnp.ones([1] * len(shape), bool)
        for n, part in reversed([*enumerate(layout)]):
            if is_symbolic(part.size):
                size = jnp.broadcast_to(self.sizes.true(part.size), (shape[other],))
                limit = along(lax.optimization_barrier(size), other, len(shape))
                mask &= (place if n == 0 else place % part.padded) < limit
            place = place // part.padded if n else place
        return mask

    def fill(self, x: PaddedArray, axes: Iterable[int], value: Any) -> PaddedArray:
        """Return ``x`` with ``value`` in the padding along these axes: a number, or a scalar array."""
        axes = tuple(axes)
        x = self.full(x, axes)
        is_zero = isinstance(value, (bool, int, float)) and value == 0
        padded = [i for i in axes if has_padding(x.axes[i]) and not (is_zero and i in x.zero)]
        if not padded:
            return x
        array = jnp.where(self.mask(x, padded), x.array, jnp.asarray(value, x.array.dtype))
        # Another value than zero is also put where only some other axis is past its end.
        return replace(x, array=array, zero=x.zero | set(padded) if is_zero else frozenset())

    def join(self, values: Sequence[PaddedArray]) -> list[PaddedArray]:
        """Return values of one shape with one layout; axes that are uniform in all of them stay so."""
        values = list(values)
        for i in range(len(values[0].shape)):
            target = next((v.axes[i] for v in values if v.axes[i] is not UNIFORM), UNIFORM)
            values = [self.relayout(v, i, target) for v in values]
        return values
