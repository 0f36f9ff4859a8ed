"""JAX functions called with torch tensors: jitted, and differentiated by torch's autograd through ``jax.vjp``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from isthmus._interop.arrays import from_jax, is_wide, to_jax
from isthmus._runtime.compiler import scoped_x64

Function = Callable[..., Any]


def jax_function(function: Function, *, jit: bool = True) -> Function:
    """Return a JAX function that takes and returns torch tensors, in pytrees if need be.

    Arguments that are not tensors are passed on as they are, and compiled in. Gradients go through ``jax.vjp``, so
    ``jax.custom_vjp`` and Pallas kernels with one are respected; gradients of gradients work too.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = jax.tree.flatten((args, kwargs), is_leaf=lambda value: isinstance(value, Tensor))
        at = tuple(n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        others = tuple(None if n in at else leaf for n, leaf in enumerate(leaves))
        border = _border(function, spec, at, _Static(others), jit)
        found = _Call.apply(border, *[leaves[n] for n in at])
        return jax.tree.unflatten(border.spec, found)

    # Dynamo cannot look into JAX: it breaks its graph here.
    return torch.compiler.disable(call)  # type: ignore[no-any-return]


class _Static:
    """Arguments that are compiled in, told apart by type and value."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values
        self.key = tuple(
            (type(value), repr(value) if isinstance(value, float) else value) for value in values
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.key == other.key


@functools.lru_cache(maxsize=1024)
def _border(function: Function, spec: Any, at: tuple[int, ...], others: _Static, jit: bool) -> Border:
    return Border(function, spec, at, others.values, jit)


class Border:
    """A JAX function of flat arrays, its gradient, and how its result is put together."""

    def __init__(
        self, function: Function, spec: Any, at: tuple[int, ...], others: tuple[Any, ...], jit: bool
    ) -> None:
        self.spec: Any = None
        self.gradients: dict[tuple[int, ...], Function] = {}

        def flat(*arrays: Any) -> list[Any]:
            leaves = list(others)
            for n, array in zip(at, arrays, strict=True):
                leaves[n] = array
            args, kwargs = jax.tree.unflatten(spec, leaves)
            found, self.spec = jax.tree.flatten(function(*args, **kwargs))
            return [jax.numpy.asarray(leaf) for leaf in found]

        self.flat = flat
        wrap = jax.jit if jit else lambda f, **_: f
        self.run: Function = wrap(flat)
        self.run_saving: Function = wrap(self._saving, static_argnums=0)
        self.back: Function = wrap(lambda pull, given: pull(given))

    def _saving(self, wanted: tuple[int, ...], *arrays: Any) -> Any:
        """Return the results, and the function that pulls gradients of them back to the arrays that want one."""

        def of(*varying: Any) -> list[Any]:
            given = list(arrays)
            for n, value in zip(wanted, varying, strict=True):
                given[n] = value
            return self.flat(*given)

        return jax.vjp(of, *[arrays[n] for n in wanted])

    def gradient(self, wanted: tuple[int, ...], count: int) -> Function:
        """Return the gradient as a function of the arrays and of the gradients of the results that have one."""
        if wanted in self.gradients:
            return self.gradients[wanted]

        def gradient(*values: Any) -> list[Any]:
            arrays, given = values[:count], list(values[count:])
            results, pull = self._saving(wanted, *arrays)
            return list(pull([given.pop(0) if _varies(r) else _no_gradient(r) for r in results]))

        self.gradients[wanted] = gradient
        return gradient


def _varies(array: Any) -> bool:
    return bool(jax.numpy.issubdtype(array.dtype, jax.numpy.inexact))


def _no_gradient(array: Any) -> Any:
    return np.zeros(array.shape, jax.dtypes.float0)


def _precision(arrays: list[Any]) -> Any:
    """Return the context in which 64-bit arrays stay what they are; without any, the user's configuration rules."""
    return scoped_x64() if any(is_wide(a.dtype) for a in arrays) else contextlib.nullcontext()


class _Call(torch.autograd.Function):
    """One call; tensors in, a tuple of tensors out."""

    @staticmethod
    def forward(ctx: Any, border: Border, *tensors: Tensor) -> Any:
        arrays = [to_jax(t) for t in tensors]
        ctx.border = border
        ctx.wanted = tuple(n for n, need in enumerate(ctx.needs_input_grad[1:]) if need)
        with _precision(arrays):
            if ctx.wanted:
                found, ctx.pull = border.run_saving(ctx.wanted, *arrays)
            else:
                found = border.run(*arrays)
        ctx.save_for_backward(*tensors)
        ctx.varies = [_varies(array) for array in found]
        results = tuple(from_jax(found))
        ctx.mark_non_differentiable(*[t for t, varies in zip(results, ctx.varies, strict=True) if not varies])
        ctx.results = [(array.shape, array.dtype) for array in found]
        return results

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:  # type: ignore[override]
        tensors = ctx.saved_tensors
        found: list[Any] = [None] * (1 + len(tensors))
        kept = [g for g, varies in zip(given, ctx.varies, strict=True) if varies]
        if torch.is_grad_enabled():
            gradient = ctx.border.gradient(ctx.wanted, len(tensors))
            pulled = jax_function(gradient)(*tensors, *kept)
        else:
            pulled = from_jax(_pulled(ctx, [to_jax(g) for g in kept]))
        for n, gradient in zip(ctx.wanted, pulled, strict=True):
            found[1 + n] = gradient
        return tuple(found)


def _pulled(ctx: Any, kept: list[Any]) -> Any:
    """Return the gradients by what the forward pass kept."""
    left = iter(kept)
    given = [
        next(left) if varies else np.zeros(shape, jax.dtypes.float0)
        for varies, (shape, _) in zip(ctx.varies, ctx.results, strict=True)
    ]
    with _precision([*kept, *[leaf for leaf in jax.tree.leaves(ctx.pull) if hasattr(leaf, "dtype")]]):
        return list(ctx.border.back(ctx.pull, given))
