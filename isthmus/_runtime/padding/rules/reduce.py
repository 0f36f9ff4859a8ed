"""Primitives that combine the elements of an axis: padding gets the neutral element first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from isthmus._runtime.padding.interpreter import Interpreter, out_shape, rule
from isthmus._runtime.padding.layout import PaddedArray, Part, has_padding
from isthmus._runtime.padding.sizes import Refused


def smallest(dtype: Any) -> Any:
    """Return the neutral element of a maximum."""
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def largest(dtype: Any) -> Any:
    """Return the neutral element of a minimum."""
    if dtype == jnp.bool_:
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


def all_bits(dtype: Any) -> Any:
    """Return the neutral element of a bitwise and."""
    if dtype == jnp.bool_:
        return True
    return jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.unsignedinteger) else -1


NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": smallest,
    "min": largest,
    "and": all_bits,
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
    # exp(-inf) is 0, so the smallest value adds nothing to the sum inside.
    "logsumexp": smallest,
}


def _without(x: PaddedArray, gone: tuple[int, ...]) -> tuple[list[Any], frozenset[int]]:
    """Return the layouts of the axes that are left, and which of them have zeros for padding."""
    kept = [i for i in range(len(x.shape)) if i not in gone]
    return [x.axes[i] for i in kept], frozenset(n for n, i in enumerate(kept) if i in x.zero)


@rule("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor")
def reduction(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> PaddedArray:
    """Reduce over true elements: the others are neutral."""
    axes, name = tuple(eqn.params["axes"]), eqn.primitive.name.removeprefix("reduce_")
    # Complex numbers have no largest or smallest element that could stand for padding.
    if name in ("max", "min") and jnp.issubdtype(x.array.dtype, jnp.complexfloating):
        raise Refused(eqn.primitive.name, "of complex numbers")
    x = run.fill(x, axes, NEUTRAL[name](x.array.dtype))
    layouts, zero = _without(x, axes)
    array = eqn.primitive.bind(x.array, **eqn.params)
    return PaddedArray(array, out_shape(eqn), tuple(layouts), zero if name == "sum" else frozenset())


@rule("argmax", "argmin")
def arg_reduction(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> PaddedArray:
    """Find the place of the extreme, and turn it into the true index where the axis is a merged one.

    Padding comes after every true element of its row, and the first of equal elements wins, so a row that is the
    neutral element throughout is right too.
    """
    (axis,) = eqn.params["axes"]
    x = run.fill(
        x, [axis], smallest(x.array.dtype) if eqn.primitive.name == "argmax" else largest(x.array.dtype)
    )
    place = eqn.primitive.bind(x.array, **eqn.params)
    layout = x.axes[axis]
    assert layout is not None
    # A merged axis (b, s) has padding inside, so a place in the array is no index of the true elements.
    index = place if len(layout) == 1 else run.index_of(layout, place)
    return PaddedArray(index, out_shape(eqn), tuple(_without(x, (axis,))[0]))


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> PaddedArray:
    """Accumulate along an axis; padding at its end comes too late to be read, unless the direction is reversed."""
    axis = eqn.params["axis"]
    x = run.full(x, [axis])
    layout = x.axes[axis]
    # Reversed, padding is read first; in a merged axis it stands between true elements.
    if has_padding(layout) and (eqn.params["reverse"] or len(layout or ()) > 1):
        x = run.fill(x, [axis], NEUTRAL[eqn.primitive.name.removeprefix("cum")](x.array.dtype))
    return PaddedArray(eqn.primitive.bind(x.array, **eqn.params), x.shape, x.axes)


@rule("sort")
def sort(run: Interpreter, eqn: JaxprEqn, *operands: PaddedArray) -> list[PaddedArray]:
    """Sort with padding last: it gets the largest key, NaN for floats, and a stable sort leaves it behind real ones."""
    axis, keys = eqn.params["dimension"], eqn.params["num_keys"]
    # ``compact``: padding inside a merged axis goes to the end, where the sort is to leave it.
    joined = run.join([run.compact(x, axis) for x in operands])
    if has_padding(joined[0].axes[axis]):
        joined = [
            run.fill(x, [axis], _last_key(x.array.dtype)) if n < keys else x for n, x in enumerate(joined)
        ]
    # Stable even if the program did not ask: a true NaN has the same key as padding and must stay before it.
    results = eqn.primitive.bind(*[x.array for x in joined], **{**eqn.params, "is_stable": True})
    return [PaddedArray(y, x.shape, x.axes) for x, y in zip(joined, results, strict=True)]


def _last_key(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(jnp.nan, jnp.nan)
    return jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else largest(dtype)


@rule("top_k")
def top_k(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> list[PaddedArray]:
    """Find the largest k; of equal elements the first, so padding is never among them."""
    axis = eqn.params.get("axis", -1) % len(x.shape)
    k = eqn.params["k"]
    # The result would have a symbolic axis whose padding is none of the input's.
    if not isinstance(k, int):
        raise Refused("top_k", "as many as a size says")
    x = run.compact(x, axis)
    x = run.fill(x, [axis], smallest(x.array.dtype))
    axes = (*x.axes[:axis], (Part(k, k),), *x.axes[axis + 1 :])
    results = eqn.primitive.bind(x.array, **eqn.params)
    return [PaddedArray(y, out_shape(eqn, n), axes) for n, y in enumerate(results)]


@rule("reduce")
def general_reduction(run: Interpreter, eqn: JaxprEqn, *operands: PaddedArray) -> list[PaddedArray]:
    """Reduce static axes by a function of the user's; its neutral element for padding is not known."""
    dims = tuple(eqn.params["dimensions"])
    count = len(operands) // 2
    joined = run.join([run.full(x) for x in operands[:count]])
    if any(has_padding(joined[0].axes[i]) for i in dims):
        raise Refused("reduce", "a padded axis by a function without a known neutral element")
    results = eqn.primitive.bind(*[x.array for x in [*joined, *operands[count:]]], **eqn.params)
    layouts = tuple(_without(joined[0], dims)[0])
    return [PaddedArray(y, out_shape(eqn, n), layouts) for n, y in enumerate(results)]
