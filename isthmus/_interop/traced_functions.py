"""JAX functions as calls of one torch op, ``isthmus::jax``, so that every mode that runs ops runs them.

A JAX function is traced once for the types of its arguments. The result, a ``TracedFunction``, gets a number, and the
op takes the tensors and that number::

    traced = trace(jnp.tanh, [Type((3,), torch.float32)])
    call(traced, [x])  # torch.ops.isthmus.jax([x], traced.number)

The op is registered here with everything an op can have: a Meta kernel (the types of the jaxpr's outputs), a lowering
that inlines the jaxpr into the program around it, kernels for tensors on the CPU and on CUDA (one XLA program, memory
shared through DLPack), and a vmap rule (``jax.vmap`` of the function). Eager and lazy mode, ``isthmus.jit``,
``torch.compile`` and ``isthmus.export`` therefore need no code for JAX functions. Gradients are not in here:
``functions.py``, the main caller, puts an ``autograd.Function`` around the op. ``custom_ops.py`` inlines traced
functions in lowerings of its own.

Precision: a function is traced in the user's configuration of 64-bit types, and the jaxpr has its dtypes fixed by then,
so it means the same inside programs of ours, which are always traced with 64-bit types on.

Lifetime: the table of numbers holds functions weakly, their owner is the cache of a ``jax_function``. A graph that
names a number may outlive that cache. The nodes that lazy mode records hold a ``_Name``, an int that owns
its function, so the function goes with the last of them. torch's dispatcher makes it a plain int: functions that reach
a graph through it are held for the life of the process, as torch holds what it has compiled. A graph that is saved
and loaded by another process names a number that is not there: ``traced_function`` raises.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.tree_util import PyTreeDef
from torch import Tensor

from isthmus._caches import LruCache
from isthmus._device.core import mode
from isthmus._device.core.dispatch import kernel_for
from isthmus._device.torch_glue.private import are_plain, is_fake
from isthmus._dynamo import dlpack
from isthmus._graph.layout import contiguous_strides
from isthmus._graph.nodes import Type
from isthmus._ops.registry import lowering
from isthmus._runtime import compiler
from isthmus._runtime.compiler import chosen_x64
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus.errors import IsthmusError

Array = jax.Array
_numbers = itertools.count()
_functions: WeakValueDictionary[int, TracedFunction] = WeakValueDictionary()
# Those named by plain ints in graphs: nothing says when the last such graph is gone, so the newest stay. One that was
# dropped is missed where its graph is compiled once more, which raises (``traced_function``).
# Graphs outlive ``clear_caches``, so it passes over them.
_in_graphs: LruCache[int, TracedFunction] = LruCache("JAX functions in graphs", 4096, kept=True)
# One function sees few batch sizes at a time; each costs a trace and, on the device, a plan.
_BATCHED_LIMIT = 64


class TracedFunction:
    """A jaxpr that ``isthmus::jax`` can run, with the types of its results in torch's dtypes.

    Attributes:
        jaxpr: the whole traced function.
        out_tree: the structure of everything the jaxpr returns.
        is_single: whether that is one array and no container.
        results: the types of the arrays that ``run`` returns.
        run: a function of the arrays that returns a list of arrays; may be called on tracers.
        number: names this function in calls of the op.
    """

    def __init__(self, jaxpr: ClosedJaxpr, out_tree: PyTreeDef, outputs: Sequence[int] | None = None) -> None:
        """Wrap a jaxpr; of its results ``run`` returns those at the positions ``outputs``, by default all."""
        compute = jaxpr_as_fun(jaxpr)
        types = result_types(jaxpr)
        self.jaxpr, self.out_tree = jaxpr, out_tree
        # The structure of None is a "leaf" with no leaves.
        self.is_single = jax.tree_util.treedef_is_leaf(out_tree) and out_tree.num_leaves == 1
        self.results = types if outputs is None else [types[n] for n in outputs]
        self.run: Callable[..., list[Array]] = compute if outputs is None else _at(compute, outputs)
        self.batched: LruCache[Any, TracedFunction] = LruCache("batched JAX functions", _BATCHED_LIMIT)
        self.number = next(_numbers)
        _functions[self.number] = self

    @functools.cached_property
    def program(self) -> Callable[..., tuple[Array, ...]]:
        """The function compiled, for tensors that are not on "jax"."""
        arguments = [compiler.abstract(aval) for aval in self.jaxpr.in_avals]
        return compiler.build(lambda *arrays: tuple(self.run(*arrays)), arguments).call

    @property
    def is_cacheable(self) -> bool:
        """Whether the jaxpr closes over no tracer: one that does is valid only while the trace around it lasts."""
        return not any(isinstance(value, jax.core.Tracer) for value in self.jaxpr.consts)


class _Name(int):
    """The number of a function in an argument of a node: equal to the int, and the function lives as long as it."""

    function: TracedFunction

    def __new__(cls, function: TracedFunction) -> _Name:
        """Return the name of a function."""
        name = super().__new__(cls, function.number)
        name.function = function
        return name


def _at(function: Callable[..., list[Array]], positions: Sequence[int]) -> Callable[..., list[Array]]:
    def run(*arrays: Array) -> list[Array]:
        results = function(*arrays)
        return [results[n] for n in positions]

    return run


def result_types(jaxpr: ClosedJaxpr) -> list[Type]:
    """Return the types of a jaxpr's results."""
    return [Type(tuple(aval.shape), to_torch_dtype(aval.dtype)) for aval in jaxpr.out_avals]


def trace(function: Callable[..., Any], types: Sequence[Type]) -> TracedFunction:
    """Trace a function of arrays, which returns a pytree of arrays, for arguments of these types."""
    return TracedFunction(*trace_to_jaxpr(function, types))


def trace_to_jaxpr(function: Callable[..., Any], types: Sequence[Type]) -> tuple[ClosedJaxpr, PyTreeDef]:
    """Return the jaxpr of a function for arguments of these types, and the structure of its result."""
    arguments = [jax.ShapeDtypeStruct(size, to_jax_dtype(dtype)) for size, dtype in types]
    with x64_if_needed(arguments):
        jaxpr, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return jaxpr, jax.tree.structure(result)


def x64_if_needed(arrays: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a context with 64-bit types on if an array has one, else as the user configured them."""
    return jax.enable_x64(chosen_x64() or any(_has_64_bits(array.dtype) for array in arrays))


def _has_64_bits(dtype: Any) -> bool:
    # complex64 is a pair of 32-bit floats, which JAX has without 64-bit types.
    return np.dtype(dtype).itemsize >= 8 and np.dtype(dtype) != np.complex64


def types_of(tensors: Sequence[Tensor]) -> tuple[Type, ...]:
    """Return sizes and dtypes, as a cache key; dynamic sizes of ``torch.compile`` become the sizes of this call."""
    types = tuple([Type(t.shape, t.dtype) for t in tensors])
    try:
        hash(types)
    except TypeError:  # a SymInt has no hash; int() adds a guard on its value to the graph
        types = tuple([Type(tuple(map(int, size)), dtype) for size, dtype in types])
    return types


def traced_function(number: int) -> TracedFunction:
    """Return the function with a number."""
    try:
        return _functions[number]
    except KeyError:
        raise IsthmusError(
            f"isthmus::jax names the JAX function {number}, which this process does not have, or no longer: a graph "
            f"with a JAX function in it cannot be saved as a graph (isthmus.export puts the function into the "
            f"program), and functions of the last {_in_graphs.limit} graphs are remembered"
        ) from None


def _on_meta(inputs: list[Tensor], function: int) -> list[Tensor]:
    traced = traced_function(function)
    if is_fake(inputs[0]):  # torch.compile or torch.export is making a graph
        _in_graphs[traced.number] = traced
    return [torch.empty(size, dtype=dtype, device=inputs[0].device) for size, dtype in traced.results]


def _on_other_devices(inputs: list[Tensor], function: int) -> list[Tensor]:
    """Run a function on tensors of the CPU or of CUDA; the results are on the device of the inputs."""
    traced = traced_function(function)
    arrays = [dlpack.arrive(t.contiguous()) for t in inputs]
    # torch lets tensors without dimensions on the CPU meet tensors on CUDA: those with dimensions decide.
    device = next((t.device for t in inputs if t.dim()), inputs[0].device)
    # torch knows nothing of JAX's streams, so the arrays must be complete before torch may read their memory.
    results = [array.block_until_ready() for array in traced.program(*arrays)]
    # JAX takes its arrays for constant, and torch may write to the results: they get memory of their own.
    depart = dlpack.Departures()
    return [depart(r, r.shape, contiguous_strides(r.shape), device).clone() for r in results]


_library = torch.library.Library("isthmus", "DEF")
_library.define("jax(Tensor[] inputs, int function) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("jax", _on_meta, "Meta")
_library.impl("jax", _on_other_devices, "CPU")
_library.impl("jax", _on_other_devices, "CUDA")
_op = torch.ops.isthmus.jax.default


def call(function: TracedFunction, tensors: list[Tensor]) -> list[Tensor]:
    """Run a function on tensors, or add the call to the graph that is being recorded or traced."""
    lazy = mode.current.lazy
    # torch's dispatcher takes as long as the call itself: plain tensors on "jax" go to our kernel directly.
    if are_plain(tensors):
        return kernel_for(_op)(tensors, _Name(function) if lazy else function.number)
    if lazy:
        _in_graphs[function.number] = function
    return _op(tensors, function.number)


def _on_batches(
    info: Any, in_dims: Any, inputs: list[Tensor], function: int
) -> tuple[list[Tensor], list[int]]:
    """Run a function under ``torch.vmap``, through ``jax.vmap``; the batch is each result's first dimension."""
    traced = traced_function(function)
    key = (tuple(in_dims[0]), types_of(inputs))
    batched = traced.batched.get(key)
    if batched is None:
        batched = traced.batched[key] = trace(jax.vmap(traced.run, in_axes=key[0]), key[1])
    results = call(batched, inputs)
    return results, [0] * len(results)


torch.library.register_vmap("isthmus::jax", _on_batches, lib=_library)


@lowering(_op)
def _lowered(inputs: list[Array], function: int) -> list[Array]:
    return traced_function(function).run(*inputs)
