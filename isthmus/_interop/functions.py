"""``isthmus.jax_function``: JAX functions called with torch tensors, and differentiated by torch's autograd.

One call goes through three objects:

1. ``TracedCalls`` (one for each ``jax_function``) separates the arguments. Tensors, arrays and random keys become
   operands; every other leaf of the argument tree is static, compiled in, and part of the cache key.
2. ``TracedCall`` (one for each argument structure and set of static arguments) is a function of the operands alone. It
   traces that function for the operands' types and runs it as the op ``isthmus::jax`` (``traced_functions.py``).
3. If an operand requires a gradient, ``ForwardWithResiduals`` is traced instead: the function through ``jax.vjp``,
   returning its results and the residuals of its backward. ``_JaxCall``, an ``autograd.Function``, saves the residuals
   and runs backward, a second traced function, on them.

For ``f(x, y, causal=True)`` with tensors ``x`` and ``y``::

    TracedCalls.bind  ->  TracedCall(lambda x, y: f(x, y, causal=True)), [x, y]
    forward           ->  isthmus::jax([x, y], 7)          = [out, residual]
    backward          ->  isthmus::jax([residual, grad], 8) = [grad_x, grad_y]

Gradients of gradients and forward mode are ``TracedCall``s too: of the function ``gradient(operands, cotangents)``, and
of ``tangent(operands, tangents)``. They start from the operands, since residuals cannot be differentiated again.

torch's gradient of a complex value is the conjugate of JAX's, so cotangents are conjugated on their way in and out.
Used by ``custom_ops.py``, ``modules.py``, ``remat.py`` and ``isthmus/optax.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, Literal
from jax.tree_util import PyTreeDef
from torch import Tensor

from isthmus._caches import LruCache
from isthmus._device.core.derivatives import conjugated
from isthmus._device.torch_glue.private import hide_from_dynamo, in_forward_mode
from isthmus._dynamo.private import nonstrict_trace
from isthmus._graph.nodes import Type
from isthmus._interop import traced_functions
from isthmus._interop.arrays import from_jax, to_jax
from isthmus._interop.traced_functions import TracedFunction, result_types, types_of
from isthmus._interop.x64_primitive import with_fixed
from isthmus._runtime.compiler import chosen_x64
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus._runtime.private import trace_state_clean

Array = jax.Array
Function = Callable[..., Any]
# A static argument that differs in every call (a step count) would otherwise fill memory with traces.
_LIMIT = 1024
_names = itertools.count()
_calls_by_name: WeakValueDictionary[str, TracedCalls] = WeakValueDictionary()


def jax_function(function: Function) -> Function:
    """Return a JAX function that takes and returns torch tensors.

    Arguments:
        function: a function of arrays that JAX can trace. Arguments and result may be pytrees. It is traced once for
            each structure, set of shapes and dtypes, and set of values of arguments that are not arrays; those must
            be hashable.

    Returns:
        The same function on tensors. ``jax.Array``s, numpy arrays and random keys may be passed beside them; without
        any, results are on "jax". Gradients go through ``jax.vjp``, so ``jax.custom_vjp``, and Pallas kernels with
        one, are respected; gradients of gradients and ``torch.func`` transforms work too.

    Example:
        >>> import jax.numpy as jnp, torch, isthmus
        >>> softplus = isthmus.jax_function(lambda x, beta=1.0: jnp.logaddexp(beta * x, 0) / beta)
        >>> x = torch.zeros(2, device="jax", requires_grad=True)
        >>> softplus(x, beta=2.0).sum().backward()
        >>> x.grad.tolist()
        [0.5, 0.5]
    """
    calls, run = TracedCalls(function), _traced_by_name()
    name = calls.name

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return run(name, *args, **kwargs)

    call.of_isthmus = calls  # type: ignore[attr-defined]  # else nothing would hold them
    return call


@functools.cache
def _traced_by_name() -> Callable[..., Any]:
    """Return the one function that Dynamo puts into graphs as it is: it runs the calls of a name.

    Dynamo guards a function marked ``nonstrict_trace`` by its code alone (CLOSURE_MATCH, torch 2.13). One for each JAX
    function would be many with the same code, and a compiled function that is given the second would run the first. A
    string is guarded by its value, where a number may become a symbol.
    """

    def run(name: str, /, *args: Any, **kwargs: Any) -> Any:
        traced_call, operands = _calls_by_name[name].bind(args, kwargs)
        return traced_call(operands)

    hide_from_dynamo(run)  # after a graph break Dynamo would trace the code in here
    return nonstrict_trace(run)


class TracedCalls:
    """The calls of one JAX function: a ``TracedCall`` for each argument structure and set of static arguments."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.name = f"JAX function {next(_names)}"
        _calls_by_name[self.name] = self
        self._calls: LruCache[Any, TracedCall] = LruCache("calls of JAX functions", _LIMIT)

    def bind(self, args: Any, kwargs: Any) -> tuple[TracedCall, list[Tensor]]:
        """Return the function of the operands alone, and the operands as tensors."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        # A marker for every leaf: arrays by None, keys by their generator, anything else by its value.
        markers = tuple([None if isinstance(leaf, Tensor) else _marker(leaf) for leaf in leaves])
        traced_call = self._calls.get((tree, markers))
        # Arrays are operands of the function; the rest is bound into it.
        if traced_call is None:
            traced_call = TracedCall(_function_of_operands(self.function, tree, markers))
            self._calls[(tree, markers)] = traced_call
        return traced_call, [
            leaf if isinstance(leaf, Tensor) else _operand(leaf)
            for leaf, marker in zip(leaves, markers, strict=True)
            if type(marker) is not StaticArg
        ]


class StaticArg:
    """An argument that is compiled in; equal to another of the same type and value."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        # By repr, since 0.0 == -0.0, and nan != nan would miss the cache at every call.
        self.key = (type(value), repr(value) if isinstance(value, (float, complex, np.generic)) else value)
        try:
            hash(self.key)
        except TypeError:
            raise TypeError(
                f"isthmus.jax_function: an argument is a {type(value).__name__}, which is neither a tensor or an array "
                f"nor hashable, so that calls with it cannot be told apart"
            ) from None

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticArg) and self.key == other.key


def _marker(leaf: Any) -> Any:
    """Return how an argument reaches the function: None for an array, the generator of a random key, or StaticArg."""
    if isinstance(leaf, (Tensor, np.ndarray)):
        return None
    if isinstance(leaf, jax.Array):
        return jax.random.key_impl(leaf) if _is_key(leaf) else None
    # A symbolic size is compiled in as the number it is now.
    return StaticArg(int(leaf) if isinstance(leaf, torch.SymInt) else leaf)


def _is_key(array: Array) -> bool:
    return bool(jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key))


def _operand(leaf: Any) -> Tensor:
    # torch has no dtype for keys: their words travel, and _function_of_operands makes them a key again.
    return from_jax(jax.random.key_data(leaf) if isinstance(leaf, jax.Array) and _is_key(leaf) else leaf)


def _function_of_operands(function: Function, tree: PyTreeDef, markers: Sequence[Any]) -> Function:
    """Return ``function`` with its static arguments bound, as a function of a flat list of arrays."""

    def run(*operands: Array) -> Any:
        rest = iter(operands)
        leaves = [m.value if type(m) is StaticArg else _unwrapped(next(rest), m) for m in markers]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        # A function may return Python numbers; torch gets tensors without dimensions.
        return jax.tree.map(jax.numpy.asarray, function(*args, **kwargs))

    return run


def _unwrapped(array: Array, key_impl: Any) -> Array:
    return array if key_impl is None else jax.random.wrap_key_data(array, impl=key_impl)


class TracedCall:
    """A function of arrays that torch calls on tensors, with its traces and those of its derivatives."""

    def __init__(self, function: Function) -> None:
        self.function = function
        # Their keys have shapes in them; those of the other two only say which operands have a derivative.
        self._traced: LruCache[Any, TracedFunction] = LruCache("traced JAX functions", _LIMIT)
        self._forwards: LruCache[Any, ForwardWithResiduals] = LruCache(
            "traced JAX functions with residuals", _LIMIT
        )
        self._gradients: dict[tuple[int, ...], TracedCall] = {}
        self._tangents: dict[tuple[int, ...], TracedCall] = {}

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Return the function's result, with tensors for arrays."""
        forward_mode = in_forward_mode()
        if forward_mode or (torch.is_grad_enabled() and any([t.requires_grad for t in tensors])):
            # In forward mode a tensor does not say whether it has a tangent.
            wanted = tuple([n for n, t in enumerate(tensors) if _may_have_derivative(t, forward_mode)])
            forward = self.forward_with_residuals(wanted, tensors)
            outputs = _JaxCall.apply(self, forward, *tensors)
            return jax.tree.unflatten(forward.result_tree, outputs[: len(forward.results)])
        if not trace_state_clean():
            # Inside a JAX trace the tensors hold tracers: called directly, JAX itself differentiates the function.
            return from_jax(self.function(*[to_jax(t) for t in tensors]))
        if not tensors:
            # torch chooses an op's kernel by its tensors' device; the function ignores operands it has no place for.
            tensors = [torch.zeros((), device="jax")]
        traced = self.traced(tensors)
        results = traced_functions.call(traced, tensors)
        return results[0] if traced.is_single else jax.tree.unflatten(traced.out_tree, results)

    def traced(self, tensors: Sequence[Tensor]) -> TracedFunction:
        """Return the function traced for tensors of these types."""
        key = (types_of(tensors), chosen_x64())
        traced = self._traced.get(key)
        if traced is None:
            traced = traced_functions.trace(self.function, key[0])
            # A jaxpr that closes over a tracer is good for this trace alone.
            if traced.is_cacheable:
                self._traced[key] = traced
        return traced

    def forward_with_residuals(
        self, wanted: tuple[int, ...], tensors: Sequence[Tensor]
    ) -> ForwardWithResiduals:
        """Return the forward for tensors of these types; backward gives gradients of those at ``wanted``."""
        key = (wanted, types_of(tensors), chosen_x64())
        forward = self._forwards.get(key)
        if forward is None:
            forward = trace_with_residuals(self.function, wanted, key[1])
            if forward.function.is_cacheable:
                self._forwards[key] = forward
        return forward

    def gradient(self, wanted: tuple[int, ...], count: int) -> TracedCall:
        """Return the gradient of the operands at ``wanted``, differentiable itself.

        It is a function of all ``count`` operands and of the cotangents of the results that can have one.
        """
        if wanted not in self._gradients:

            def gradient(*values: Array) -> list[Array]:
                operands, cotangents = values[:count], iter(values[count:])
                results, pull = _vjp(self.function, wanted, operands)
                leaves, tree = jax.tree.flatten(results)
                seeds = jax.tree.unflatten(tree, [_cotangent(leaf, cotangents) for leaf in leaves])
                return [conjugated(array) for array in pull(seeds)]

            self._gradients[wanted] = TracedCall(gradient)
        return self._gradients[wanted]

    def tangent(self, positions: tuple[int, ...], count: int) -> TracedCall:
        """Return the derivative as a function of all ``count`` operands and tangents of those at ``positions``."""
        if positions not in self._tangents:

            def tangent(*values: Array) -> list[Array]:
                operands, tangents = values[:count], list(values[count:])
                # The other operands are fixed: JAX differentiates what is left.
                primals = [operands[n] for n in positions]
                _, moved = jax.jvp(with_fixed(self.function, positions, operands), primals, tangents)
                return [leaf for leaf in jax.tree.leaves(moved) if leaf.dtype != jax.dtypes.float0]

            self._tangents[positions] = TracedCall(tangent)
        return self._tangents[positions]


def _may_have_derivative(tensor: Tensor, forward_mode: bool) -> bool:
    # Forward mode does not show on a tensor whether it has a tangent: torch passes the tangents to _JaxCall.jvp.
    return tensor.is_floating_point() or tensor.is_complex() if forward_mode else tensor.requires_grad


def _is_differentiable(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


def _vjp(function: Function, wanted: Sequence[int], operands: Sequence[Array]) -> tuple[Any, Function]:
    """Return the results, and the function from their cotangents to those of the operands at ``wanted``."""
    return jax.vjp(with_fixed(function, wanted, operands), *[operands[n] for n in wanted])  # type: ignore[no-any-return]


def _cotangent(result: Any, cotangents: Iterator[Array]) -> Any:
    """Return JAX's cotangent of a result: the next of torch's, or nothing (float0) for integers."""
    if _is_differentiable(result.dtype):
        # Conjugated on the way in: torch's gradient is the conjugate of JAX's.
        return conjugated(next(cotangents))
    return np.zeros(result.shape, jax.dtypes.float0)


@dataclass(frozen=True, eq=False)
class ForwardWithResiduals:
    """A function traced to return the residuals that its backward needs beside its results.

    Residuals are often operands (``x`` and ``y`` of ``x * y``) or results (``tanh(x)`` of tanh): those are not returned
    a second time. ``sources[i]`` says where residual ``i`` is, in the list of the operands followed by the outputs of
    ``function``. For ``lambda x, y: x * y`` the function returns one array, and ``sources`` is ``[1, 0]``.
    """

    function: TracedFunction
    wanted: tuple[int, ...]
    """The operands that backward gives gradients of."""
    results: list[Type]
    residuals: list[Type]
    sources: list[int]
    result_tree: PyTreeDef
    pull_tree: PyTreeDef
    """The structure of JAX's pullback, a pytree whose leaves are the residuals."""

    @functools.cached_property
    def is_differentiable(self) -> list[bool]:
        """For each result, whether it can have a gradient."""
        return [dtype.is_floating_point or dtype.is_complex for _, dtype in self.results]

    @functools.cached_property
    def backward(self) -> TracedFunction:
        """The traced function from residuals, then cotangents of the results that can have one, to gradients."""
        results = [jax.ShapeDtypeStruct(size, to_jax_dtype(dtype)) for size, dtype in self.results]
        cotangents = [result for result, has in zip(self.results, self.is_differentiable, strict=True) if has]

        def backward(*values: Array) -> list[Array]:
            pull = jax.tree.unflatten(self.pull_tree, values[: len(self.residuals)])
            rest = iter(values[len(self.residuals) :])
            seeds = jax.tree.unflatten(self.result_tree, [_cotangent(result, rest) for result in results])
            return [conjugated(array) for array in pull(seeds)]

        return traced_functions.trace(backward, [*self.residuals, *cotangents])


def trace_with_residuals(
    function: Function, wanted: tuple[int, ...], types: Sequence[Type]
) -> ForwardWithResiduals:
    """Trace a function for operands of these types, to be differentiated in those at ``wanted``."""
    # jax.vjp returns its pullback as a pytree: returned from the trace, its leaves are the residuals, and its structure
    # is in the structure of the result.
    jaxpr, tree = traced_functions.trace_to_jaxpr(lambda *operands: _vjp(function, wanted, operands), types)
    result_tree, pull_tree = tree.children()
    count = result_tree.num_leaves
    outputs, sources = _without_repeats(jaxpr, count)
    every = result_types(jaxpr)
    return ForwardWithResiduals(
        function=TracedFunction(jaxpr, tree, outputs),
        wanted=wanted,
        results=every[:count],
        residuals=every[count:],
        sources=sources,
        result_tree=result_tree,
        pull_tree=pull_tree,
    )


def _without_repeats(jaxpr: ClosedJaxpr, count: int) -> tuple[list[int], list[int]]:
    """Return which outputs of a jaxpr are needed if each residual is returned once, and where each residual is.

    Residuals are the outputs after the first ``count``. Places count the arguments first, then the needed outputs.
    """
    # Arguments and results are saved anyway; only other residuals are returned.
    variables: list[Any] = [*jaxpr.jaxpr.invars, *jaxpr.jaxpr.outvars[:count]]
    outputs, sources = list(range(count)), []
    for n, variable in enumerate(jaxpr.jaxpr.outvars[count:], count):
        # A Literal is a value, not a variable: nothing else refers to it.
        if isinstance(variable, Literal) or variable not in variables:
            outputs.append(n)
            sources.append(len(variables))
            variables.append(variable)
        else:
            sources.append(variables.index(variable))
    return outputs, sources


class _JaxCall(torch.autograd.Function):
    """One differentiated call: ``apply(call, forward, *operands)`` returns the results, then further residuals."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: TracedCall, forward: ForwardWithResiduals, *tensors: Tensor) -> Any:
        return tuple(traced_functions.call(forward.function, list(tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.traced_call, ctx.forward_pass, *tensors = inputs
        ctx.count = len(tensors)
        values = [*tensors, *output]
        # Operands for double backward, residuals for a single one.
        ctx.save_for_backward(*tensors, *[values[n] for n in ctx.forward_pass.sources])
        ctx.save_for_forward(*tensors)
        flags = ctx.forward_pass.is_differentiable
        residuals = output[len(flags) :]
        ctx.mark_non_differentiable(
            *[t for t, has in zip(output, flags, strict=False) if not has], *residuals
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        forward = ctx.forward_pass
        operands, residuals = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        # The outputs after the results are residuals; their gradients are left out.
        cotangents = [g for g, has in zip(gradients, forward.is_differentiable, strict=False) if has]
        if torch.is_grad_enabled():  # create_graph=True: what comes next is differentiated again
            pulled = ctx.traced_call.gradient(forward.wanted, ctx.count)([*operands, *cotangents])
        else:
            pulled = traced_functions.call(forward.backward, [*residuals, *cotangents])
        by_operand: list[Tensor | None] = [None] * ctx.count
        for n, gradient in zip(forward.wanted, pulled, strict=True):
            by_operand[n] = gradient
        return None, None, *by_operand

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        tangents = tangents[2:]  # those of call and forward
        positions = tuple([n for n, tangent in enumerate(tangents) if tangent is not None])
        tangent = ctx.traced_call.tangent(positions, ctx.count)
        moved = iter(tangent([*ctx.saved_tensors[: ctx.count], *[tangents[n] for n in positions]]))
        results = [next(moved) if has else None for has in ctx.forward_pass.is_differentiable]
        return (*results, *[None] * (len(ctx.forward_pass.function.results) - len(results)))
