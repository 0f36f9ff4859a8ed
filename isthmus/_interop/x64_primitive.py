"""One JAX primitive, ``isthmus``, that holds a program with 64-bit types inside a program without them.

Why it exists
-------------
torch's integers have 64 bits: ``torch.arange(3)`` and every index is int64. Most users of JAX leave its 64-bit types
off (``jax_enable_x64=False``), and then JAX truncates int64 to int32. Isthmus traces torch code with the types on
(``scoped_x64``), which is enough for a program that runs at once. It is not enough inside ``jax.jit`` or ``jax.grad``:
JAX traces first, and transforms and compiles the equations later, when the user's setting is off again. A rule of JAX
that then makes an int64 constant or zero gets an int32 one, which does not fit the equation's operands.

So torch code that JAX traces with the types off becomes one equation, whose parameter is the jaxpr of the whole
program, and every rule below opens that jaxpr with 64-bit types on::

    Example:
        >>> import isthmus, torch
        >>> f = isthmus.torch_function(lambda x: x[torch.argsort(x)])
        >>> jax.make_jaxpr(f)(jnp.ones(3))
        { lambda ; a:f32[3]. let
            b:f32[3] = isthmus[jaxpr={ lambda ; c:f32[3]. let
                  d:i64[3] = ... sort ... c
                  e:f32[3] = gather ... c d
                in (e,) }] a
          in (b,) }

Operands and results of the equation have no 64-bit types, so the program around it needs none: ``torch_functions.py``,
the only caller of ``call``, converts results (``NARROW``). With the user's 64-bit types on, torch code is traced into
the surrounding program directly and this file is not used.

What the rules do
-----------------
Each builds a new function from the jaxpr, traces it with 64-bit types on, and binds the primitive again (``_bind``).

- impl and lowering: run, or lower, the jaxpr with the types on.
- batching: ``jax.vmap`` of the jaxpr; results have their batch dimension in front.
- jvp: two equations. The first returns the results and the residuals of ``jax.linearize``; the second is linear in the
  tangents, so that reverse mode can transpose it::

      out, residuals = isthmus[forward] x
      out_dot        = isthmus[linear]  residuals x_dot

- transpose: ``jax.linear_transpose`` of that second jaxpr, in the operands that are linear (``UndefinedPrimal``).
- dce: results that nothing reads are dropped from the jaxpr, with all that only they need (``prunes`` in
  ``_runtime/private.py``). Without it the equation would compute all of its results if one of them is read.

Residuals are the one place where int64 would leave the equation: an index that ``gather`` saves for backward. The
program around may stack residuals (``lax.scan``), pad them or make zeros of their dtype, with int64 not available to
it. So ``_split`` bitcasts 64-bit integers to pairs of uint32 on their way out, ``i64[3] -> u32[3, 2]``, and ``_joined``
bitcasts them back on their way in. ``Halves`` remembers the dtype in the pytree's structure.

Limits: ``jax.checkpoint`` sees one equation, to save or recompute as a whole. float64 residuals are passed on as they
are. The names ``ad``, ``batching`` and ``mlir`` come from ``jax.interpreters``, which JAX keeps stable for primitives
outside of it but does not document (checked with JAX 0.10).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from isthmus._runtime.compiler import abstract, scoped_x64
from isthmus._runtime.mesh_axes import varying_alike, varying_axes
from isthmus._runtime.private import prunes, without_dead_code

Array = jax.Array
Function = Callable[..., Any]


def call(function: Function, *arrays: Array) -> Any:
    """Call a function with 64-bit types on, as one equation of the program that JAX is tracing.

    The function returns a pytree of arrays without 64-bit types; that tree is returned, with tracers for leaves.
    """
    return _bind(function, arrays)


def _bind(function: Function, arrays: Sequence[Array]) -> Any:
    """Trace a function of arrays, bind the primitive to the jaxpr, and return the results in the function's pytree."""
    with scoped_x64():
        traced, result = jax.make_jaxpr(function, return_shape=True)(*[abstract(array) for array in arrays])
    # Arrays the function closes over may be tracers of the program around: they become operands.
    inner = traced.jaxpr.replace(constvars=(), invars=[*traced.jaxpr.constvars, *traced.jaxpr.invars])
    # Derivatives compute tangents of integers, whose dtype float0 no compiler knows; nothing reads them.
    jaxpr = ClosedJaxpr(without_dead_code(inner), ())
    outputs = _primitive.bind(*varying_alike([*traced.consts, *arrays]), jaxpr=jaxpr)
    return jax.tree.unflatten(jax.tree.structure(result), outputs)


def _run(*arrays: Array, jaxpr: ClosedJaxpr) -> list[Array]:
    with scoped_x64():
        return jaxpr_as_fun(jaxpr)(*arrays)


def _result_types(*operands: Any, jaxpr: ClosedJaxpr) -> Any:
    # The jaxpr knows nothing of mesh axes: its results vary over those of its operands (varying_alike).
    varying = next((operand for operand in operands if varying_axes(operand)), None)
    if varying is None:
        return jaxpr.out_avals
    if not hasattr(varying, "manual_axis_type"):
        return [aval.update(vma=varying.vma) for aval in jaxpr.out_avals]
    mesh = varying.sharding.mesh  # a type with axes must have a mesh, and the jaxpr's own types may have none
    return [
        aval.update(
            sharding=NamedSharding(mesh, PartitionSpec(*[None] * aval.ndim)),
            manual_axis_type=varying.manual_axis_type,
        )
        for aval in jaxpr.out_avals
    ]


def _lower(context: Any, *operands: Any, jaxpr: ClosedJaxpr) -> Any:
    # The jaxpr was traced without mesh axes, and lower_fun would find them in the context's types.
    local = context.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    with scoped_x64():
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(local, *operands)


def _batch(arrays: Sequence[Array], dims: Sequence[Any], *, jaxpr: ClosedJaxpr) -> Any:
    # A dim that is no int is JAX's not_mapped.
    axes = [dim if isinstance(dim, int) else None for dim in dims]
    results = _bind(jax.vmap(jaxpr_as_fun(jaxpr), in_axes=axes), arrays)
    return results, [0] * len(results)


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr) -> Any:
    """Bind the forward, which returns results and residuals, and then the derivative, which is linear in tangents."""
    varying = [n for n, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def forward(*arrays: Array) -> tuple[list[Array], Any]:
        function = with_fixed(jaxpr_as_fun(jaxpr), varying, arrays)
        results, derivative = jax.linearize(function, *[arrays[n] for n in varying])
        # The derivative is a pytree: its leaves are the residuals.
        return results, jax.tree.map(_split, derivative)

    results, derivative = _bind(forward, primals)
    residuals, tree = jax.tree.flatten(derivative)

    def linear(*arrays: Array) -> list[Array]:
        split = jax.tree.unflatten(tree, arrays[: len(residuals)])
        push = jax.tree.map(_joined, split, is_leaf=lambda node: isinstance(node, Halves))
        moved = push(*arrays[len(residuals) :])
        return [tangent for tangent in moved if tangent.dtype != jax.dtypes.float0]

    with scoped_x64():  # a zero of a 64-bit dtype would be truncated
        known = [ad.instantiate_zeros(tangents[n]) for n in varying]
    moved = iter(_bind(linear, [*residuals, *known]) if varying else ())
    return results, [next(moved) if _is_inexact(result) else _zero_tangent(result) for result in results]


def _is_inexact(array: Array) -> bool:
    return bool(jax.numpy.issubdtype(array.dtype, np.inexact))


def _zero_tangent(result: Array) -> Any:
    return ad.Zero(jax.core.ShapedArray(result.shape, jax.dtypes.float0))


def with_fixed(function: Function, positions: Sequence[int], arrays: Sequence[Any]) -> Function:
    """Return the function of the arguments at ``positions`` alone, with ``arrays`` for all others."""

    def varying_only(*varying: Array) -> Any:
        arguments = list(arrays)
        for n, value in zip(positions, varying, strict=True):
            arguments[n] = value
        return function(*arguments)

    return varying_only


@jax.tree_util.register_pytree_node_class
class Halves:
    """64-bit integers as uint32 with a last dimension of 2; a pytree with that array as its only leaf."""

    def __init__(self, pairs: Array, dtype: np.dtype[Any]) -> None:
        self.pairs, self.dtype = pairs, dtype

    def tree_flatten(self) -> tuple[tuple[Array], np.dtype[Any]]:
        """Return the array, and the dtype as structure."""
        return (self.pairs,), self.dtype

    @classmethod
    def tree_unflatten(cls, dtype: np.dtype[Any], children: tuple[Array]) -> Halves:
        """Rebuild from an array of whatever kind: JAX passes stand-ins too."""
        return cls(children[0], dtype)


def _split(array: Array) -> Array | Halves:
    """Return 64-bit integers as ``Halves``, any other array as it is."""
    if array.dtype.itemsize == 8 and jax.numpy.issubdtype(array.dtype, np.integer):
        return Halves(jax.lax.bitcast_convert_type(array, np.uint32), array.dtype)
    return array


def _joined(node: Array | Halves) -> Array:
    return jax.lax.bitcast_convert_type(node.pairs, node.dtype) if isinstance(node, Halves) else node


def _transpose(cotangents: Sequence[Any], *operands: Any, jaxpr: ClosedJaxpr) -> Any:
    """Return cotangents of the operands that are undefined, which are those the jaxpr is linear in."""
    linear = [n for n, operand in enumerate(operands) if ad.is_undefined_primal(operand)]
    known = [operand for n, operand in enumerate(operands) if n not in linear]
    types = [abstract(operands[n].aval) for n in linear]
    with scoped_x64():
        seeds = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]

    def pull(*values: Array) -> list[Array]:
        rest = iter(values[: len(known)])
        arguments = [None if n in linear else next(rest) for n in range(len(operands))]
        back = jax.linear_transpose(with_fixed(jaxpr_as_fun(jaxpr), linear, arguments), *types)
        return list(back(list(values[len(known) :])))

    pulled = dict(zip(linear, _bind(pull, [*known, *seeds]), strict=True))
    return [pulled.get(n) for n in range(len(operands))]


_primitive = Primitive("isthmus")
_primitive.multiple_results = True
_primitive.def_impl(_run)
_primitive.def_abstract_eval(_result_types)
mlir.register_lowering(_primitive, _lower)
batching.primitive_batchers[_primitive] = _batch
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
prunes(_primitive)
