"""Symbolic sizes, the range each symbol may be in, and the grid of padded sizes.

A *size* is an integer or a symbolic dimension of ``jax.export``: ``s``, ``s + 1``, ``b*s``, ``floordiv(s, 2)``. A
program is compiled for a range of each symbol, from the least size its trace allows to a bound chosen by
``bound_for``; the padded size of an expression is the largest value it takes in these ranges, rounded up to the grid::

    sizes = Sizes(symbols, {"s": 40}, per_octave=4)
    sizes.padded(s), sizes.padded(2 * s), sizes.padded(8)       # 40, 80, 8

Largest values are found by evaluating an expression for all sizes in range, since an expression such as
``s - 3*floordiv(s, 3)`` is not largest at an end of the range.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import numpy as np

from isthmus._runtime import private

Array = jax.Array
Size = Any
"""An integer or a symbolic dimension; JAX has no public name for the type of the latter."""

MOST_ELEMENTS = 2**31 - 1
"""Positions are counted in int32: an array of more elements is not padded."""
_MOST_POINTS = 2**22
"""For how many combinations of sizes an expression is evaluated to find its largest value."""


class Refused(Exception):
    """A function cannot run on padded arrays: which primitive, and why. The caller compiles exactly."""

    def __init__(self, primitive: str, reason: str) -> None:
        super().__init__(f"{primitive}: {reason}")
        self.primitive, self.reason = primitive, reason


def is_symbolic(size: Size) -> bool:
    """Return whether a size is not a number."""
    return bool(jax.export.is_symbolic_dim(size))


def _reader() -> private.SymbolicSizes:
    reader = private.symbolic_sizes()
    if reader is None:
        raise Refused("trace", "this JAX has other symbolic sizes")
    return reader


def symbols_in(sizes: Iterable[Size]) -> set[str]:
    """Return the names of all symbols in these sizes."""
    return {name for size in sizes if is_symbolic(size) for name in _reader().symbols(size)}


def evaluate(size: Size, values: Mapping[str, int]) -> int:
    """Return a size as a number, for these values of its symbols."""
    return int(_reader().evaluate(size, values)) if is_symbolic(size) else int(size)


def symbols(least: Mapping[str, int]) -> dict[str, Size]:
    """Return new symbols by their names, each with the least size it stands for.

    JAX compares sizes only as far as it can prove; with two symbols it must be stated that products grow.
    """
    _reader()
    facts = [f"{name} >= {low}" for name, low in least.items()]
    # Without these facts JAX cannot tell that b*s >= s (``InconclusiveDimensionOperation``).
    facts += [f"{a}*{b} >= {least[b]}*{a}" for a, b in itertools.permutations(least, 2)]
    dims = jax.export.symbolic_shape(",".join(least), constraints=facts)
    return dict(zip(least, dims, strict=True))


def round_up(size: int, per_octave: int) -> int:
    """Return the next padded size: with four per octave 1 ... 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ..."""
    octave = 1 << (size - 1).bit_length() >> 1  # size is in (octave, 2 * octave]
    step = max(1, octave // per_octave)
    return -(-size // step) * step


@dataclass(frozen=True)
class Symbol:
    """A symbol of a program: its dimension, the least size, and the largest ``k`` of a size ``symbol + k`` in it.

    ``grows`` says that a result is longer than what is passed in, by ``k``: a cache that gains a token with each call.
    ``most`` is the largest size that a user announced: all sizes up to it are served by one program.
    """

    name: str
    dim: Size
    least: int
    slack: int = 0
    grows: bool = False
    most: int | None = None

    def bound_for(self, size: int, per_octave: int) -> int:
        """Return the largest size that the program for ``size`` serves.

        Sizes up to ``symbol + slack`` fit the same padded size, so that a cache of s and its successor of s + 1 are
        arrays of one shape, and the first can be updated in place. What grows passes through every size of a finer
        grid, so it has powers of two.
        """
        if self.most is not None and size <= self.most:
            return self.most
        return round_up(size + self.slack, 1 if self.grows else per_octave) - self.slack


SizesKey = tuple[tuple[tuple[str, int], ...], int]
"""The largest size of each symbol, and how many padded sizes there are between powers of two."""


class Sizes:
    """The symbols of a program with the largest size of each, and what follows: padded sizes and true sizes."""

    def __init__(self, symbols: Mapping[str, Symbol], bounds: Mapping[str, int], per_octave: int) -> None:
        self.symbols, self.bounds, self.per_octave = symbols, dict(bounds), per_octave
        self._values: Mapping[str, Array] = {}
        self._largest: dict[Size, tuple[int, int]] = {}
        self._lengths: dict[tuple[Size, ...], tuple[int, ...]] = {}

    @functools.cached_property
    def key(self) -> SizesKey:
        """Return the key of a program's executable: two of these with one key share it."""
        return (tuple(sorted(self.bounds.items())), self.per_octave)

    def at(self, values: Mapping[str, Array]) -> Sizes:
        """Return the same with true sizes: scalars that are known at run time."""
        sizes = Sizes(self.symbols, self.bounds, self.per_octave)
        sizes._values, sizes._largest = values, self._largest
        return sizes

    def extremes(self, size: Size) -> tuple[int, int]:
        """Return the smallest and the largest value of a size, over all sizes of its symbols."""
        if not is_symbolic(size):
            return int(size), int(size)
        if size not in self._largest:
            self._largest[size] = self._evaluate_all(size)
        return self._largest[size]

    def largest(self, size: Size) -> int:
        """Return the largest value of a size, over all sizes of its symbols."""
        return self.extremes(size)[1]

    def _evaluate_all(self, size: Size) -> tuple[int, int]:
        names = sorted(_reader().symbols(size))
        spans = [np.arange(self.symbols[n].least, self.bounds[n] + 1, dtype=np.int64) for n in names]
        # In Python's integers: the product may not fit numpy's.
        if functools.reduce(lambda points, span: points * len(span), spans, 1) > _MOST_POINTS:
            raise Refused("trace", f"{size} has too many values to know the largest")
        grid = dict(zip(names, np.meshgrid(*spans, indexing="ij", sparse=True), strict=True))
        with jax.ensure_compile_time_eval():  # max(s, 3) is evaluated by JAX, which may be tracing here
            values = np.asarray(_reader().evaluate(size, grid))
        return int(values.min()), int(values.max())

    def padded_shape(self, shape: tuple[Size, ...]) -> tuple[int, ...]:
        """Return the shape of a padded array."""
        if shape not in self._lengths:
            self._lengths[shape] = tuple(self.padded(n) for n in shape)
        return self._lengths[shape]

    def padded(self, size: Size) -> int:
        """Return the length of a padded axis of this size."""
        if not is_symbolic(size):
            return int(size)
        names = _reader().symbols(size)
        if len(names) == 1:
            symbol = self.symbols[next(iter(names))]
            more = size - symbol.dim
            # ``s`` ... ``s + slack`` share one padded size, so that a cache and its successor are arrays of one shape.
            if not is_symbolic(more) and 0 <= more <= symbol.slack:
                return self.bounds[symbol.name] + symbol.slack
        return round_up(max(1, self.largest(size)), self.per_octave)

    def true(self, size: Size, dtype: Any = np.int32) -> Array:
        """Return a size at run time, as a scalar."""
        value = _reader().evaluate(size, self._values) if is_symbolic(size) else size
        return jax.numpy.asarray(value, dtype)


def slack_of(dim: Size, sizes: Iterable[Size]) -> int:
    """Return the largest ``k`` of a size ``dim + k`` among ``sizes``."""
    offsets = [size - dim for size in sizes if is_symbolic(size)]
    return max((int(k) for k in offsets if not is_symbolic(k)), default=0)
