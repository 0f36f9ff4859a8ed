"""JAX functions as calls of one torch op, ``isthmus::jax``: every mode that knows ops knows them, and inlines them.

A body is a JAX function traced for given shapes and dtypes, in the user's own configuration; what follows puts its
jaxpr into programs of ours, whatever their configuration is.
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
from jax.extend.core import Literal, jaxpr_as_fun
from torch import Tensor

from isthmus._device.core import mode
from isthmus._device.core.dispatch import kernel_for
from isthmus._device.torch_glue.private import are_plain, is_fake
from isthmus._dynamo import dlpack
from isthmus._graph.layout import contiguous_strides
from isthmus._ops.registry import lowering
from isthmus._runtime import compiler
from isthmus._runtime.compiler import chosen_x64
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus.errors import IsthmusError

Kind = tuple[tuple[int, ...], torch.dtype]
_numbers = itertools.count()
_bodies: WeakValueDictionary[int, Body] = WeakValueDictionary()
# A graph names a body by its number and may outlive the function it was made of.
_in_graphs: dict[int, Body] = {}


class Body:
    """A function of arrays, traced."""

    def __init__(self, function: Callable[..., Any], kinds: Sequence[Kind]) -> None:
        examples = [jax.ShapeDtypeStruct(shape, to_jax_dtype(dtype)) for shape, dtype in kinds]
        with precision_of(examples):
            self.jaxpr, found = jax.make_jaxpr(function, return_shape=True)(*examples)
        leaves, self.spec = jax.tree.flatten(found)
        self.is_single = len(leaves) == 1 and jax.tree_util.treedef_is_leaf(self.spec)
        self.results: list[Kind] = [(tuple(leaf.shape), to_torch_dtype(leaf.dtype)) for leaf in leaves]
        self.run: Callable[..., list[Any]] = jaxpr_as_fun(self.jaxpr)
        self.examples = examples
        self.batched: dict[Any, Body] = {}
        self.number = next(_numbers)
        _bodies[self.number] = self

    def leave_out_repeats(self, count: int) -> list[int]:
        """Drop results after the first ``count`` that are arguments or earlier results.

        Returned is where each of them is to be found: among the arguments and, after them, the results left.
        """
        jaxpr = self.jaxpr.jaxpr
        pool: list[Any] = [*jaxpr.invars, *jaxpr.outvars[:count]]
        left, sources = list(range(count)), []
        for n, variable in enumerate(jaxpr.outvars[count:], count):
            if isinstance(variable, Literal) or variable not in pool:
                pool.append(variable)
                left.append(n)
            sources.append(len(pool) - 1 if left[-1] == n else pool.index(variable))
        whole, results = self.run, self.results
        self.run = lambda *arrays: [value for n, value in enumerate(whole(*arrays)) if n in left]
        self.results = [results[n] for n in left]
        return sources

    @functools.cached_property
    def program(self) -> Callable[..., Any]:
        """The function compiled, for arrays of other devices than ours."""
        return compiler.build(lambda *arrays: tuple(self.run(*arrays)), self.examples).call

    @property
    def is_lasting(self) -> bool:
        """Whether the body holds nothing of a trace around it."""
        return not any(isinstance(value, jax.core.Tracer) for value in self.jaxpr.consts)


def precision_of(arrays: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which 64-bit arrays stay what they are; without any, the user's configuration rules."""
    return jax.enable_x64(chosen_x64() or any(_is_wide(a.dtype) for a in arrays))


def _is_wide(dtype: Any) -> bool:
    return np.dtype(dtype).itemsize >= 8 and np.dtype(dtype) != np.complex64


def kinds_of(tensors: Sequence[Tensor]) -> tuple[Kind, ...]:
    """Return shapes and dtypes; a size that torch.compile took for dynamic becomes the one it is."""
    kinds: Any = tuple([(t.shape, t.dtype) for t in tensors])
    try:
        hash(kinds)
    except TypeError:
        kinds = tuple([(tuple(map(int, shape)), dtype) for shape, dtype in kinds])
    return kinds


def body_of(number: int) -> Body:
    """Return the body with a number."""
    try:
        return _bodies[number]
    except KeyError:
        raise IsthmusError(
            f"isthmus::jax names the JAX function {number}, which this process does not have: a graph with a JAX "
            f"function in it cannot be saved as a graph; isthmus.export puts the function into the program"
        ) from None


def _on_meta(inputs: list[Tensor], body: int) -> list[Tensor]:
    found = body_of(body)
    device = next(t.device for t in inputs)
    if is_fake(inputs[0]):
        _in_graphs[body] = found
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in found.results]


def _elsewhere(inputs: list[Tensor], body: int) -> list[Tensor]:
    """Run a body on tensors of the CPU or of CUDA; results are theirs too."""
    found = body_of(body)
    arrays = [dlpack.arrive(t.contiguous()) for t in inputs]
    device = next((t.device for t in inputs if t.dim()), inputs[0].device)
    results = [r.block_until_ready() for r in found.program(*arrays)]
    return [dlpack.depart(r, r.shape, contiguous_strides(r.shape), device).clone() for r in results]


_library = torch.library.Library("isthmus", "DEF")
_library.define("jax(Tensor[] inputs, int body) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("jax", _on_meta, "Meta")
_library.impl("jax", _elsewhere, "CPU")
_library.impl("jax", _elsewhere, "CUDA")
_op = torch.ops.isthmus.jax.default


def call(body: Body, tensors: list[Tensor]) -> list[Tensor]:
    """Run a body on tensors, or put it into the graph that is being made."""
    if mode.current.lazy:
        _in_graphs[body.number] = body
    # The way through torch's dispatcher takes as long as the call itself.
    return (kernel_for(_op) if are_plain(tensors) else _op)(tensors, body.number)


def _batched(info: Any, in_dims: Any, inputs: list[Tensor], body: int) -> tuple[list[Tensor], list[int]]:
    """Run a body on batches, as ``jax.vmap`` does."""
    found = body_of(body)
    key = (tuple(in_dims[0]), kinds_of(inputs))
    if key not in found.batched:
        found.batched[key] = Body(jax.vmap(found.run, in_axes=key[0]), key[1])
    results = call(found.batched[key], inputs)
    return results, [0] * len(results)


torch.library.register_vmap("isthmus::jax", _batched, lib=_library)


@lowering(_op)
def _lowered(inputs: list[Any], body: int) -> list[Any]:
    return body_of(body).run(*inputs)
