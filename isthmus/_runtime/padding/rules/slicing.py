"""Primitives that cut, join and shift along an axis: starts and ends are true ones, and padding ends up last.

Every rule leaves a result whose elements are at its front and whose padding is at its end, because that is the only
layout in which the next rule can find them. A cut or a join at a place that is a size is therefore a dynamic slice or
update at the *true* size, which is known at run time, in an array with room for the largest one::

    concatenate([x, y])      x: s elements padded to 40, y: 1 element       result: s + 1 padded to 40
    room for x and y         [x_0 ... x_s-1, anything ...]
    write y at s             [x_0 ... x_s-1, y_0, anything ...]

What can go wrong: XLA clamps a dynamic start so that the slice fits the array, which would move it; each rule makes
the array long enough first. Steps and starts that may be negative are refused.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from isthmus._runtime.padding.interpreter import Interpreter, out_shape, rule
from isthmus._runtime.padding.layout import UNIFORM, PaddedArray, Part, has_padding, replaced, resized
from isthmus._runtime.padding.sizes import Refused, Size, is_symbolic

Array = jax.Array


def _cut(run: Interpreter, x: PaddedArray, i: int, start: Size, size: Size, step: int = 1) -> PaddedArray:
    """Return the ``size`` elements of axis ``i`` from ``start`` on, every ``step``-th of them."""
    if x.axes[i] is UNIFORM:
        axes = replaced(x.axes, i, UNIFORM if is_symbolic(size) else (Part(size, int(size)),))
        array = x.array if is_symbolic(size) else jnp.repeat(x.array, int(size), axis=i)
        return PaddedArray(array, replaced(x.shape, i, size), axes, x.zero)
    ends_alike = step == 1 and start + size == x.shape[i]  # what comes after is then the padding of x
    x = run.compact(x, i)
    padded = run.sizes.padded(size)
    # From the first element to the last one that is taken, as long as the padded result needs them.
    span = (padded - 1) * step + 1 if padded else 0
    low, high = run.sizes.extremes(start)
    if low < 0:
        raise Refused("slice", f"from {start}, which may be negative")
    array = resized(x.array, i, max(x.array.shape[i], high + span))  # a start is not to be clamped
    # ``dynamic_slice`` has no steps, so the span is cut first and stepped through after.
    if is_symbolic(start):
        array = lax.dynamic_slice_in_dim(array, run.sizes.true(start), span, axis=i)
        array = lax.slice_in_dim(array, 0, span, step, axis=i)
    else:
        array = lax.slice_in_dim(array, start, start + span, step, axis=i)
    zero = x.zero if ends_alike else x.zero - {i}
    return PaddedArray(array, replaced(x.shape, i, size), replaced(x.axes, i, run.layout(size)), zero)


@rule("slice")
def slice_(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> PaddedArray:
    """Cut each axis; a symbolic start is one that is known at run time."""
    starts, strides = eqn.params["start_indices"], eqn.params["strides"]
    for i, size in enumerate(out_shape(eqn)):
        step = 1 if strides is None else strides[i]
        whole = not is_symbolic(starts[i]) and starts[i] == 0 and step == 1 and size == x.shape[i]
        if is_symbolic(step):
            raise Refused("slice", "in steps that are a size")
        if not whole:
            x = _cut(run, x, i, starts[i], size, step)
    return x


@rule("split")
def split(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> list[PaddedArray]:
    """Cut one axis into pieces."""
    start: Size = 0
    pieces = []
    for size in eqn.params["sizes"]:
        pieces.append(_cut(run, x, eqn.params["axis"], start, size))
        start = start + size
    return pieces


@rule("dynamic_slice")
def dynamic_slice(run: Interpreter, eqn: JaxprEqn, x: PaddedArray, *starts: PaddedArray) -> PaddedArray:
    """Cut where run-time starts say, clamped to the true size as XLA clamps to the size of an array."""
    for i, (n, size) in enumerate(zip(x.shape, eqn.params["slice_sizes"], strict=True)):
        # The whole axis: its start can only be 0.
        if n == size:
            continue
        x = run.compact(x, i)
        start = _clamped(run, starts[i].array, n, size)
        padded = run.sizes.padded(size)
        array = resized(x.array, i, max(x.array.shape[i], run.sizes.largest(n) + padded))
        array = lax.dynamic_slice_in_dim(array, start, padded, axis=i)
        axes = replaced(x.axes, i, run.layout(size))
        x = PaddedArray(array, replaced(x.shape, i, size), axes, x.zero - {i})
    return x


def _clamped(run: Interpreter, start: Array, n: Size, size: Size) -> Array:
    """Return the start of ``size`` elements in ``n``, as int32."""
    last = run.sizes.true(n, start.dtype) - run.sizes.true(size, start.dtype)
    return jnp.clip(start, 0, last).astype(jnp.int32)


@rule("dynamic_update_slice")
def dynamic_update_slice(
    run: Interpreter, eqn: JaxprEqn, x: PaddedArray, update: PaddedArray, *starts: PaddedArray
) -> PaddedArray:
    """Write where run-time starts say; of an update that is padded itself only the true part is written."""
    x, update = run.full(x), run.full(update)
    begin, partial = [], []
    for i, (n, size) in enumerate(zip(x.shape, update.shape, strict=True)):
        if n == size:
            update = run.relayout(update, i, x.axes[i])
            begin.append(jnp.zeros((), jnp.int32))
            continue
        x, update = run.compact(x, i), run.compact(update, i)
        begin.append(_clamped(run, starts[i].array, n, size))
        partial += [i] if has_padding(update.axes[i]) else []
    shape = x.array.shape
    # Padding of the update would overwrite true elements behind it, so what is there is read and put back.
    if partial:
        array = x.array
        for i in partial:  # the padding of the update must not push its start back
            array = resized(array, i, array.shape[i] + update.array.shape[i])
        old = lax.dynamic_slice(array, begin, update.array.shape)
        mixed = jnp.where(run.mask(update, partial), update.array, old)
        array = lax.slice(lax.dynamic_update_slice(array, mixed, begin), [0] * len(shape), shape)
        return PaddedArray(array, x.shape, x.axes)
    zero = frozenset(i for i in x.zero if i in update.zero or not has_padding(update.axes[i]))
    return PaddedArray(lax.dynamic_update_slice(x.array, update.array, begin), x.shape, x.axes, zero)


@rule("concatenate")
def concatenate(run: Interpreter, eqn: JaxprEqn, *operands: PaddedArray) -> PaddedArray:
    """Write each array over the padding of the one before, at its true start.

    A first array that has room for all the others, such as a cache that gains a token, is updated in place.
    """
    at, shape = eqn.params["dimension"], out_shape(eqn)
    pieces = [run.compact(x, at) for x in operands]
    for i in range(len(shape)):
        if i != at:
            target = next((x.axes[i] for x in pieces if x.axes[i] is not UNIFORM), UNIFORM)
            pieces = [run.relayout(x, i, target) for x in pieces]
    zero = frozenset.intersection(*[x.zero for x in pieces]) - {at}
    axes = replaced(pieces[0].axes, at, run.layout(shape[at]))
    if not any(has_padding(x.axes[at]) for x in pieces):
        return PaddedArray(lax.concatenate([x.array for x in pieces], at), shape, axes, zero)
    # In order: each piece is written over the padding of the one before it, and only the last one's padding stays.
    padded = run.sizes.padded(shape[at])
    starts: list[Size] = [0]
    for x in pieces[:-1]:
        starts.append(starts[-1] + x.shape[at])
    room = max(
        padded, *[run.sizes.largest(s) + x.array.shape[at] for s, x in zip(starts, pieces, strict=True)]
    )
    array = resized(pieces[0].array, at, room)
    for start, x in zip(starts[1:], pieces[1:], strict=True):
        array = lax.dynamic_update_slice_in_dim(array, x.array, run.sizes.true(start), at)
    ends_in_zeros = all(at in x.zero or not has_padding(x.axes[at]) for x in pieces)
    zero |= {at} if ends_in_zeros and is_symbolic(shape[at]) else set()
    return PaddedArray(lax.slice_in_dim(array, 0, padded, axis=at), shape, axes, zero)


@rule("pad")
def pad(run: Interpreter, eqn: JaxprEqn, x: PaddedArray, value: PaddedArray) -> PaddedArray:
    """Put the value past the true end, then between, before and after the elements."""
    for i, (low, high, inner) in enumerate(eqn.params["padding_config"]):
        if any(is_symbolic(n) or n != 0 for n in (low, high, inner)):
            x = _padded_axis(run, x, value.array, i, (low, inner), out_shape(eqn)[i])
    return x


def _padded_axis(
    run: Interpreter, x: PaddedArray, value: Array, i: int, config: tuple[Size, Size], size: Size
) -> PaddedArray:
    low, inner = config
    least, most = run.sizes.extremes(low)
    if is_symbolic(inner) or (is_symbolic(low) and least < 0):
        raise Refused("pad", "by a size that may be negative, or between elements by a size")
    # The value is put into the padding too: what lies past the true end becomes the high side of the result.
    x = run.fill(run.compact(x, i), [i], value)
    zeros = [(0, 0, 0)] * x.array.ndim
    array = x.array if inner == 0 else lax.pad(x.array, value, replaced(zeros, i, (0, 0, inner)))
    padded = run.sizes.padded(size)
    if not is_symbolic(low):
        array = lax.pad(array, value, replaced(zeros, i, (low, 0, 0)))
    else:
        room = replaced(array.shape, i, max(padded, most + array.shape[i]))
        array = lax.dynamic_update_slice_in_dim(jnp.broadcast_to(value, room), array, run.sizes.true(low), i)
    axes = replaced(x.axes, i, run.layout(size))
    return PaddedArray(resized(array, i, padded, value), replaced(x.shape, i, size), axes)


@rule("rev")
def rev(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> PaddedArray:
    """Reverse; the padding of a padded axis comes first then, and is shifted back to the end."""
    for i in eqn.params["dimensions"]:
        if x.axes[i] is UNIFORM:
            continue
        x = run.compact(x, i)
        array = lax.rev(x.array, (i,))
        if has_padding(x.axes[i]):
            n = x.array.shape[i]
            # Twice as long, so that the start, which is anything up to n, is not clamped.
            array = resized(array, i, 2 * n)
            array = lax.dynamic_slice_in_dim(array, n - run.sizes.true(x.shape[i]), n, axis=i)
        x = PaddedArray(array, x.shape, x.axes, x.zero - {i})
    return x
