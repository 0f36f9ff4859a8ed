"""JAX functions called with torch tensors: one op each, differentiated by torch's autograd through ``jax.vjp``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from isthmus._caches import LruCache
from isthmus._device.core.derivatives import conjugated
from isthmus._device.torch_glue.private import hide_from_dynamo, in_forward_mode
from isthmus._dynamo.private import nonstrict_trace
from isthmus._interop import traced_functions
from isthmus._interop.arrays import from_jax, to_jax
from isthmus._interop.traced_functions import Body, Kind, kinds_of
from isthmus._interop.x64_primitive import partial_at
from isthmus._runtime.compiler import chosen_x64
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus._runtime.private import trace_state_clean

Function = Callable[..., Any]
_LIMIT = 1024  # entries of each cache below


def jax_function(function: Function) -> Function:
    """Return a JAX function as a function of torch tensors.

    Gradients go through ``jax.vjp``, so ``jax.custom_vjp`` and Pallas kernels with one are respected; gradients of
    gradients work too. The function is traced once per set of shapes, and runs in every mode.

    Arguments:
        function: a function of arrays, in pytrees if need be. Arguments that are neither tensors nor arrays are
            compiled in, and must be hashable.

    Returns:
        The function of tensors; where it is given tensors of the CPU it returns such tensors.

    Example:
        >>> import jax, torch, isthmus
        >>> gelu = isthmus.jax_function(jax.nn.gelu)
        >>> x = torch.zeros(2, device="jax", requires_grad=True)
        >>> gelu(x).sum().backward()
        >>> x.grad.tolist()
        [0.5, 0.5]
    """
    calls = Calls(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        border, tensors = calls.of(args, kwargs)
        return border(tensors)

    hide_from_dynamo(call)  # where it breaks its graph, it would look inside
    return functools.wraps(function)(nonstrict_trace(call))


class Calls:
    """The calls of one function: for each structure and set of fixed arguments, a function of the arrays alone."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.borders: LruCache[Any, Border] = LruCache("calls of JAX functions", _LIMIT)

    def of(self, args: Any, kwargs: Any) -> tuple[Border, list[Tensor]]:
        """Return the function of the arrays alone, and the arrays, as tensors."""
        leaves, spec = jax.tree.flatten((args, kwargs))
        places = tuple([None if isinstance(leaf, Tensor) else _place(leaf) for leaf in leaves])
        border = self.borders.get((spec, places))
        if border is None:
            border = self.borders[(spec, places)] = Border(_opened(self.function, spec, places))
        return border, [
            leaf if isinstance(leaf, Tensor) else _tensor(leaf)
            for leaf, place in zip(leaves, places, strict=True)
            if type(place) is not Fixed
        ]


class Fixed:
    """An argument that is compiled in, told apart by type and value."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
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
        return isinstance(other, Fixed) and self.key == other.key


def _place(leaf: Any) -> Any:
    """Return how an argument reaches the function: as an array (None), as a key of some kind, or fixed."""
    if isinstance(leaf, (Tensor, np.ndarray)):
        return None
    if isinstance(leaf, jax.Array):
        return jax.random.key_impl(leaf) if _is_key(leaf) else None
    return Fixed(int(leaf) if isinstance(leaf, torch.SymInt) else leaf)


def _is_key(array: Any) -> bool:
    return bool(jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key))


def _tensor(leaf: Any) -> Tensor:
    return from_jax(jax.random.key_data(leaf) if isinstance(leaf, jax.Array) and _is_key(leaf) else leaf)


def _opened(function: Function, spec: Any, places: Sequence[Any]) -> Function:
    """Return the function of the arrays alone."""

    def opened(*arrays: Any) -> Any:
        left = iter(arrays)
        leaves = [place.value if type(place) is Fixed else _array(next(left), place) for place in places]
        args, kwargs = jax.tree.unflatten(spec, leaves)
        return jax.tree.map(jax.numpy.asarray, function(*args, **kwargs))

    return opened


def _array(array: Any, impl: Any) -> Any:
    return array if impl is None else jax.random.wrap_key_data(array, impl=impl)


class Border:
    """A function of arrays that torch calls: its bodies, and those of its gradient."""

    def __init__(self, function: Function) -> None:
        self.function = function
        # Their keys have shapes in them; those of the other two only say which arguments have a derivative.
        self.bodies: LruCache[Any, Body] = LruCache("traced JAX functions", _LIMIT)
        self.savings: LruCache[Any, Saving] = LruCache("traced JAX functions with residuals", _LIMIT)
        self.gradients: dict[tuple[int, ...], Border] = {}
        self.tangents: dict[tuple[int, ...], Border] = {}

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Return what the function returns, with tensors for arrays."""
        forward = in_forward_mode()
        if forward or (torch.is_grad_enabled() and any([t.requires_grad for t in tensors])):
            saving = self.saving(tuple([n for n, t in enumerate(tensors) if _moves(t, forward)]), tensors)
            return jax.tree.unflatten(saving.spec, _Call.apply(self, saving, *tensors)[: saving.count])
        if not trace_state_clean():  # JAX itself differentiates what it traces
            return from_jax(self.function(*[to_jax(t) for t in tensors]))
        if not tensors:  # torch knows by a tensor where an op runs
            tensors = [torch.zeros((), device="jax")]
        body = self.body(tensors)
        found = traced_functions.call(body, tensors)
        return found[0] if body.is_single else jax.tree.unflatten(body.spec, found)

    def body(self, tensors: Sequence[Tensor]) -> Body:
        """Return the body for tensors like these."""
        key = (kinds_of(tensors), chosen_x64())
        body = self.bodies.get(key)
        if body is None:
            body = Body(self.function, key[0])
            if body.is_lasting:
                self.bodies[key] = body
        return body

    def saving(self, wanted: tuple[int, ...], tensors: Sequence[Tensor]) -> Saving:
        """Return the body that keeps what the gradient needs, for tensors like these."""
        key = (wanted, kinds_of(tensors), chosen_x64())
        saving = self.savings.get(key)
        if saving is None:
            saving = Saving(self.function, *key[:2])
            if saving.body.is_lasting:
                self.savings[key] = saving
        return saving

    def gradient(self, wanted: tuple[int, ...], count: int) -> Border:
        """Return the gradient as a function of the arrays and of the gradients of the results that have one."""
        if wanted not in self.gradients:

            def gradient(*values: Any) -> list[Any]:
                arrays, given = values[:count], iter(values[count:])
                results, pull = _pulled(self.function, wanted, arrays)
                leaves, spec = jax.tree.flatten(results)
                pulled = pull(jax.tree.unflatten(spec, [_cotangent(leaf, given) for leaf in leaves]))
                return [conjugated(array) for array in pulled]

            self.gradients[wanted] = Border(gradient)
        return self.gradients[wanted]

    def tangent(self, at: tuple[int, ...], count: int) -> Border:
        """Return the derivative as a function of the arrays and of tangents of those at some places."""
        if at not in self.tangents:

            def tangent(*values: Any) -> list[Any]:
                arrays = values[:count]
                primals, given = [arrays[n] for n in at], list(values[count:])
                _, moved = jax.jvp(partial_at(self.function, at, arrays), primals, given)
                return [leaf for leaf in jax.tree.leaves(moved) if leaf.dtype != jax.dtypes.float0]

            self.tangents[at] = Border(tangent)
        return self.tangents[at]


def _pulled(function: Function, wanted: tuple[int, ...], arrays: Sequence[Any]) -> Any:
    """Return the results, and the function that pulls gradients of them back to the arrays that want one."""
    return jax.vjp(partial_at(function, wanted, arrays), *[arrays[n] for n in wanted])


def _cotangent(leaf: Any, given: Any) -> Any:
    return conjugated(next(given)) if _varies(leaf.dtype) else np.zeros(leaf.shape, jax.dtypes.float0)


def _moves(tensor: Tensor, forward: bool) -> bool:
    """Return whether a tensor may have a derivative; in forward mode only its level knows."""
    return tensor.is_floating_point() or tensor.is_complex() if forward else tensor.requires_grad


def _varies(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


class Saving:
    """A body that also returns what its gradient needs, except where that is an argument or a result already."""

    def __init__(self, function: Function, wanted: tuple[int, ...], kinds: Sequence[Kind]) -> None:
        def saving(*arrays: Any) -> list[Any]:
            results, pull = _pulled(function, wanted, arrays)
            leaves, self.spec = jax.tree.flatten(results)
            kept, self.pull = jax.tree.flatten(pull)
            self.count = len(leaves)
            return [*leaves, *kept]

        self.wanted = wanted
        self.body = body = Body(saving, kinds)
        self.results, self.kept = body.results[: self.count], body.results[self.count :]
        self.varies = [_varies(to_jax_dtype(dtype)) for _, dtype in self.results]
        self.sources = body.leave_out_repeats(self.count)
        self._back: Body | None = None

    def back(self) -> Body:
        """Return the body that takes what was kept and the gradients of results, and returns those of arguments."""
        if self._back is None:
            given = [kind for kind, varies in zip(self.results, self.varies, strict=True) if varies]

            def back(*values: Any) -> list[Any]:
                pull = jax.tree.unflatten(self.pull, values[: len(self.kept)])
                left = iter(values[len(self.kept) :])
                results = [jax.ShapeDtypeStruct(shape, to_jax_dtype(dtype)) for shape, dtype in self.results]
                pulled = pull(jax.tree.unflatten(self.spec, [_cotangent(x, left) for x in results]))
                return [conjugated(array) for array in pulled]

            self._back = Body(back, [*self.kept, *given])
        return self._back


class _Call(torch.autograd.Function):
    """One call: tensors in, the results out, and with them what their gradient needs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(border: Border, saving: Saving, *tensors: Tensor) -> Any:
        return tuple(traced_functions.call(saving.body, list(tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.border, ctx.saving, *tensors = inputs
        pool, ctx.count = [*tensors, *output], len(tensors)
        ctx.save_for_backward(*tensors, *[pool[at] for at in ctx.saving.sources])
        ctx.save_for_forward(*tensors)
        varies = [*ctx.saving.varies, *[False] * len(output)]
        ctx.mark_non_differentiable(*[t for t, v in zip(output, varies, strict=False) if not v])

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:  # type: ignore[override]
        saving = ctx.saving
        tensors, kept = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        varying = [g for g, varies in zip(given, saving.varies, strict=False) if varies]
        if torch.is_grad_enabled():
            pulled = ctx.border.gradient(saving.wanted, ctx.count)([*tensors, *varying])
        else:
            pulled = traced_functions.call(saving.back(), [*kept, *varying])
        found: list[Any] = [None] * (2 + ctx.count)
        for n, gradient in zip(saving.wanted, pulled, strict=True):
            found[2 + n] = gradient
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, *given: Any) -> Any:
        tangents = given[2:]
        at = tuple([n for n, tangent in enumerate(tangents) if tangent is not None])
        border = ctx.border.tangent(at, ctx.count)
        moved = iter(border([*ctx.saved_tensors[: ctx.count], *[tangents[n] for n in at]]))
        results = [next(moved) if varies else None for varies in ctx.saving.varies]
        return (*results, *[None] * (len(ctx.saving.body.results) - len(results)))
