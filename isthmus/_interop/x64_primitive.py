"""Programs with 64-bit types inside programs without: one primitive of JAX's, and what its transformations make of it.

torch's integers have 64 bits, and most users of JAX leave its 64-bit types off. JAX asks that setting again whenever it
transforms or compiles what was traced before, so code traced with them on is kept whole, and every transformation of it
is done with them on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from isthmus._runtime.compiler import abstract, scoped_x64
from isthmus._runtime.private import prunes, without_dead_code

Array = Any
Function = Callable[..., Any]


def call(function: Function, *arrays: Array) -> Any:
    """Return what a function computes with 64-bit types on; it must return a pytree of arrays without any."""
    specs: list[Any] = []

    def flat(*values: Array) -> list[Array]:
        leaves, spec = jax.tree.flatten(function(*values))
        specs.append(spec)
        return leaves

    found = _bind(flat, arrays)
    return jax.tree.unflatten(specs[-1], found)


def _bind(function: Function, arrays: Sequence[Array]) -> list[Array]:
    """Trace a function of arrays that returns a list of them, and call what was traced."""
    with scoped_x64():
        traced = jax.make_jaxpr(function)(*[abstract(array) for array in arrays])
    # Arrays that the function holds may be tracers: they become arguments.
    inner = traced.jaxpr.replace(constvars=(), invars=[*traced.jaxpr.constvars, *traced.jaxpr.invars])
    # Tangents of integers, which nothing needs, have a dtype that no compiler knows.
    return _wide.bind(*traced.consts, *arrays, jaxpr=ClosedJaxpr(without_dead_code(inner), ()))


def _run(*arrays: Array, jaxpr: ClosedJaxpr) -> list[Array]:
    with scoped_x64():
        return jaxpr_as_fun(jaxpr)(*arrays)


def _avals(*arrays: Any, jaxpr: ClosedJaxpr) -> Any:
    axes = frozenset().union(*[getattr(array, "vma", ()) for array in arrays])
    # Under shard_map results differ from device to device if any argument does.
    return [aval.update(vma=axes) for aval in jaxpr.out_avals] if axes else jaxpr.out_avals


def _lower(context: Any, *arrays: Any, jaxpr: ClosedJaxpr) -> Any:
    # What differs between devices was settled when this was traced; the program does not ask.
    local = context.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    with scoped_x64():
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(local, *arrays)


def _batch(arrays: Sequence[Array], dims: Sequence[Any], *, jaxpr: ClosedJaxpr) -> Any:
    axes = [dim if isinstance(dim, int) else None for dim in dims]
    found = _bind(jax.vmap(jaxpr_as_fun(jaxpr), in_axes=axes), arrays)
    return found, [0] * len(found)


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr) -> Any:
    """Compute the results and what their derivative needs in one call, the derivative in another: a linear one."""
    at = [n for n, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    count = len(jaxpr.out_avals)
    linear: list[Any] = []

    def forward(*arrays: Array) -> list[Array]:
        results, derivative = jax.linearize(
            partial_at(jaxpr_as_fun(jaxpr), at, arrays), *[arrays[n] for n in at]
        )
        kept, spec = jax.tree.flatten(derivative)
        linear[:] = [spec, [abstract(array) for array in kept]]
        return [*results, *[_halved(array) for array in kept]]

    found = _bind(forward, primals)
    results, kept = found[:count], found[count:]
    spec, kinds = linear

    def push(*arrays: Array) -> list[Array]:
        whole = [_joined(array, kind) for array, kind in zip(arrays, kinds, strict=False)]
        moved = jax.tree.unflatten(spec, whole)(*arrays[len(kinds) :])
        return [tangent for tangent in moved if tangent.dtype != jax.dtypes.float0]

    with scoped_x64():
        given = [ad.instantiate_zeros(tangents[n]) for n in at]
    moved = iter(_bind(push, [*kept, *given])) if at else iter(())
    return results, [_tangent(r, moved) for r in results]


def _tangent(result: Array, moved: Iterator[Array]) -> Any:
    if jax.numpy.issubdtype(result.dtype, np.inexact):
        return next(moved)
    return ad.Zero(jax.core.ShapedArray(result.shape, jax.dtypes.float0))


def partial_at(function: Function, at: Sequence[int], arrays: Sequence[Array]) -> Function:
    """Return the function of the arrays at some places alone."""

    def of(*varying: Array) -> Any:
        given = list(arrays)
        for n, value in zip(at, varying, strict=True):
            given[n] = value
        return function(*given)

    return of


def _halved(array: Array) -> Array:
    """Return 64-bit integers as pairs of 32 bits, which programs without 64-bit types can hold and stack."""
    if array.dtype.itemsize == 8 and jax.numpy.issubdtype(array.dtype, np.integer):
        return jax.lax.bitcast_convert_type(array, np.uint32)
    return array


def _joined(array: Array, kind: Any) -> Array:
    return array if array.dtype == kind.dtype else jax.lax.bitcast_convert_type(array, kind.dtype)


def _transpose(cotangents: Sequence[Any], *arrays: Any, jaxpr: ClosedJaxpr) -> Any:
    at = [n for n, array in enumerate(arrays) if ad.is_undefined_primal(array)]
    known = [array for n, array in enumerate(arrays) if n not in at]
    kinds = [abstract(arrays[n].aval) for n in at]
    with scoped_x64():
        given = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]

    def pull(*values: Array) -> list[Array]:
        left = iter(values[: len(known)])
        whole = [None if n in at else next(left) for n in range(len(arrays))]
        back = jax.linear_transpose(partial_at(jaxpr_as_fun(jaxpr), at, whole), *kinds)
        return list(back(list(values[len(known) :])))

    found = iter(_bind(pull, [*known, *given]))
    return [next(found) if n in at else None for n in range(len(arrays))]


_wide = Primitive("isthmus")
_wide.multiple_results = True
_wide.def_impl(_run)
_wide.def_abstract_eval(_avals)
mlir.register_lowering(_wide, _lower)
batching.primitive_batchers[_wide] = _batch
ad.primitive_jvps[_wide] = _jvp
ad.primitive_transposes[_wide] = _transpose
prunes(_wide)
