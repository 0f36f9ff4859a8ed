"""Primitives that move axes: broadcast, transpose, squeeze, reshape, iota, stack, tile, and sizes as values.

None of them computes, so none should cost a gather: layouts move with their axes, and padding stays where it is. A
reshape that merges axes keeps the parts of each (``layout.Part``), and one that splits them again finds the parts::

    reshape((b, s, 8) -> (b*s, 8))     axis 0: ((b, 4), (s, 40)), 160 long; the padding of s is between its rows
    reshape((b*s, 8) -> (b, s, 2, 4))  parts (b, 4) and (s, 40) become axes again; 8 has no padding and is split

Only where old and new parts do not fall on each other, as in ``(4*s) -> (4, s)``, are elements moved (``relayout``).

What can go wrong: a size that is 1 or 0 by chance. Axes of length 1 belong to no group of a reshape, and an array
without elements matches any grouping, so both are taken out first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from isthmus._runtime.padding.interpreter import Interpreter, out_dtype, out_shape, rule
from isthmus._runtime.padding.layout import (
    UNIFORM,
    AxisLayout,
    PaddedArray,
    Part,
    exact,
    has_padding,
    length,
)
from isthmus._runtime.padding.sizes import Refused, Size, is_symbolic


@rule("dim_as_value")
def dim_as_value(run: Interpreter, eqn: JaxprEqn) -> PaddedArray:
    """A size where a value is wanted: the true one."""
    return exact(run.sizes.true(eqn.params["dim"], out_dtype(eqn)))


@rule("broadcast_in_dim")
def broadcast_in_dim(run: Interpreter, eqn: JaxprEqn, x: PaddedArray, *sizes: PaddedArray) -> PaddedArray:
    """New symbolic axes are uniform: they take no memory until something reads across them."""
    shape, at = out_shape(eqn), tuple(eqn.params["broadcast_dimensions"])
    axes: list[AxisLayout] = []
    zero = set()
    for i, n in enumerate(shape):
        # An axis of length 1 that is stretched is a new one: its layout says nothing about the longer axis.
        source = at.index(i) if i in at and x.shape[at.index(i)] == n else None
        if source is not None:
            axes.append(x.axes[source])
            zero |= {i} if source in x.zero else set()
        else:
            axes.append(UNIFORM if is_symbolic(n) else (Part(n, int(n)),))
    array = lax.broadcast_in_dim(x.array, [length(axis) for axis in axes], at)
    return PaddedArray(array, shape, tuple(axes), frozenset(zero))


@rule("transpose")
def transpose(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> PaddedArray:
    """Move axes with their layouts."""
    return _picked(x, eqn.params["permutation"], lax.transpose(x.array, eqn.params["permutation"]))


@rule("squeeze")
def squeeze(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> PaddedArray:
    """Drop axes of length 1."""
    gone = [i % len(x.shape) for i in eqn.params["dimensions"]]
    kept = [i for i in range(len(x.shape)) if i not in gone]
    return _picked(x, kept, lax.squeeze(x.array, gone))


def _picked(x: PaddedArray, order: Sequence[int], array: object) -> PaddedArray:
    """Return ``array`` with the axes of ``x`` in this order."""
    zero = frozenset(new for new, old in enumerate(order) if old in x.zero)
    return PaddedArray(array, tuple(x.shape[i] for i in order), tuple(x.axes[i] for i in order), zero)  # type: ignore[arg-type]


@rule("iota")
def iota(run: Interpreter, eqn: JaxprEqn, *sizes: PaddedArray) -> PaddedArray:
    """Count along one axis; other symbolic axes are uniform."""
    shape, at = out_shape(eqn), eqn.params["dimension"]
    axes = tuple(run.layout(n) if i == at or not is_symbolic(n) else UNIFORM for i, n in enumerate(shape))
    array = lax.broadcasted_iota(eqn.params["dtype"], [length(axis) for axis in axes], at)
    return PaddedArray(array, shape, axes)


@rule("reshape")
def reshape(run: Interpreter, eqn: JaxprEqn, x: PaddedArray, *sizes: PaddedArray) -> PaddedArray:
    """Merge and split axes by groups of equal size: (b, s, 4) to (b*s, 2, 2) is (b, s) to (b*s) and (4) to (2, 2).

    Merging keeps the parts, so splitting again is free. A group whose parts do not fall on the new axes, such as
    (4*s) to (4, s), is brought into the new parts by a gather.
    """
    shape = out_shape(eqn)
    if eqn.params.get("dimensions") is not None:
        raise Refused("reshape", "with an order of dimensions")
    if any(not is_symbolic(n) and n == 0 for n in x.shape):
        # No elements, so any layout will do; products of 0 would match any group below.
        axes = tuple(run.layout(n) for n in shape)
        return PaddedArray(jnp.zeros([length(axis) for axis in axes], x.array.dtype), shape, axes)
    # Axes of length 1 belong to no group, so they come out before and go in after.
    olds = [i for i, n in enumerate(x.shape) if is_symbolic(n) or n != 1]
    news = [i for i, n in enumerate(shape) if is_symbolic(n) or n != 1]
    layouts: dict[int, AxisLayout] = {i: (Part(1, 1),) for i in range(len(shape))}
    zero: set[int] = set()
    x = _picked(x, olds, x.array.reshape([x.array.shape[i] for i in olds]))
    first = 0  # the first axis of the group in what is left to do
    for sources, targets in _groups([x.shape[i] for i in range(len(olds))], [shape[i] for i in news]):
        group = list(range(first, first + len(sources)))
        if len(sources) == len(targets) == 1:
            layouts[news[targets[0]]] = x.axes[first]
            zero |= {news[targets[0]]} if first in x.zero else set()
            first += 1
            continue
        x = run.full(x, group)
        # Merged padding is zero only if that of every axis in the group is.
        keeps_zero = all(i in x.zero for i in group if has_padding(x.axes[i]))
        parts = tuple(part for i in group for part in x.axes[i] or ())
        dims = [shape[news[t]] for t in targets]
        split = _regrouped(parts, dims)
        if split is None:
            x = _merged(x, group, math.prod(dims), parts)
            split = [run.layout(n) or () for n in dims]
            x = run.relayout(x, first, tuple(part for axis in split for part in axis))
            # ``relayout`` gathers, and what it leaves in padding is anything.
            keeps_zero, group = False, [first]
        for t, axis in zip(targets, split, strict=True):
            layouts[news[t]] = _tidied(axis)
            zero |= {news[t]} if keeps_zero and has_padding(axis) else set()
        first += len(group)
    axes = tuple(layouts[i] for i in range(len(shape)))
    return PaddedArray(x.array.reshape([length(axis) for axis in axes]), shape, axes, frozenset(zero))


def _merged(x: PaddedArray, group: Sequence[int], size: Size, parts: tuple[Part, ...]) -> PaddedArray:
    """Return ``x`` with neighbouring axes as one."""
    first, after = group[0], group[-1] + 1
    axes = (*x.axes[:first], parts, *x.axes[after:])
    shape = (*x.shape[:first], size, *x.shape[after:])
    return PaddedArray(x.array.reshape([length(axis) for axis in axes]), shape, axes)


def _groups(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest runs of old and of new axes that have equal products."""
    groups = []
    start, begin, product = 0, 0, 1
    for stop, n in enumerate(old, 1):
        product = product * n
        other: Size = 1
        for end in range(begin, len(new)):
            other = other * new[end]
            if other == product:
                groups.append((list(range(start, stop)), list(range(begin, end + 1))))
                start, begin, product = stop, end + 1, 1
                break
    if start < len(old) or begin < len(new):
        raise Refused("reshape", f"{tuple(old)} to {tuple(new)} has no equal products")
    return groups


def _regrouped(parts: Sequence[Part], dims: Sequence[Size]) -> list[tuple[Part, ...]] | None:
    """Return the parts of each new axis, splitting static parts; None where a padded part would have to be split."""
    left, axes = list(parts), []
    for n in dims:
        axis: list[Part] = []
        product: Size = 1
        while product != n:
            if not left:
                return None
            part = left.pop(0)
            # (12) to (3, 4): static parts may be split, since they have no padding.
            divisor = _divisor(part, product, n)
            if divisor:
                left.insert(0, Part(part.size // divisor, part.size // divisor))
                part = Part(divisor, divisor)
            axis.append(part)
            product = product * part.size
        axes.append(tuple(axis))
    return None if left else axes


def _divisor(part: Part, product: Size, n: Size) -> int:
    """Return the smallest proper divisor of a static part that completes ``product`` to ``n``; 0 if there is none."""
    if is_symbolic(part.size):
        return 0
    divisors = (k for k in range(1, part.size) if part.size % k == 0)
    return next((k for k in divisors if product * k == n), 0)


def _tidied(axis: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return an axis with neighbouring static parts as one, so that equal layouts are equal tuples."""
    tidy: list[Part] = []
    for part in axis:
        if tidy and not is_symbolic(part.size) and not is_symbolic(tidy[-1].size):
            tidy[-1] = Part(tidy[-1].size * part.size, tidy[-1].padded * part.padded)
        # Parts of size 1 are left out, unless the axis has no other.
        elif is_symbolic(part.size) or part.size != 1 or len(axis) == 1:
            tidy.append(part)
    return tuple(tidy)


@rule("stack")
def stack(run: Interpreter, eqn: JaxprEqn, *operands: PaddedArray) -> PaddedArray:
    """Put arrays side by side along a new axis."""
    at = eqn.params["axis"]
    # One layout for all, or element n of one array would stand beside element m of another.
    joined = run.join(operands)
    axes = (*joined[0].axes[:at], (Part(len(joined), len(joined)),), *joined[0].axes[at:])
    return PaddedArray(jnp.stack([x.array for x in joined], at), out_shape(eqn), axes)


@rule("tile")
def tile(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> PaddedArray:
    """Repeat along static axes; a padded axis that is repeated k times has the parts (k, its parts)."""
    shape, repeats = out_shape(eqn), eqn.params["reps"]
    if any(map(is_symbolic, repeats)):
        raise Refused("tile", "as often as a size says")
    x = run.full(x, [i for i, k in enumerate(repeats) if k != 1])
    axes = []
    for k, axis, n in zip(repeats, x.axes, shape, strict=True):
        if k == 1:
            axes.append(axis)
        else:
            axes.append((Part(k, k), *(axis or ())) if has_padding(axis) else (Part(n, int(n)),))
    return replace(x, array=jnp.tile(x.array, repeats), shape=shape, axes=tuple(axes))
