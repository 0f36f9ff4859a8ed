"""Rematerialization: modules that keep their arguments alone for backward and compute the rest again.

A program computes nothing twice: what would be computed again the same way is found and shared. So what is
computed again starts from arguments behind a barrier, which nothing looks through.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from isthmus._device import generator
from isthmus._interop.functions import jax_function

_barrier = jax_function(lambda tensors: jax.lax.optimization_barrier(tensors))


@contextlib.contextmanager
def rematerialized(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let these modules keep their arguments alone, for as long as this block lasts."""
    before = [(module, module.__dict__.get("forward")) for module in modules]
    for module in modules:
        module.forward = _again(module.forward)
    try:
        yield
    finally:
        for module, forward in before:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward that is run once more in backward."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        shape: list[Any] = []

        def of(*tensors: Tensor) -> tuple[Any, ...]:
            given = list(leaves)
            for n, tensor in zip(at, tensors, strict=True):
                given[n] = tensor
            args, kwargs = pytree.tree_unflatten(given, spec)
            found, shape[:] = _flat(forward(*args, **kwargs))
            return tuple(found)

        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # torch only asks for gradients of what depends on a tensor that has one; parameters are none of these.
        found = _Again.apply(of, torch.ones((), device="jax", requires_grad=True), *[leaves[n] for n in at])
        return pytree.tree_unflatten(list(found), shape[0])

    return run


def _flat(result: Any) -> tuple[list[Any], list[Any]]:
    leaves, spec = pytree.tree_flatten(result)
    return leaves, [spec]


class _Again(torch.autograd.Function):
    """A function that is run without gradients, and in backward once more with them."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.function, ctx.random = function, generator.get_state()
        ctx.save_for_backward(*tensors)
        with torch.no_grad():
            return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:  # type: ignore[override]
        needs = ctx.needs_input_grad[2:]
        behind = _barrier([*ctx.saved_tensors, *[g for g in given if g is not None]])
        tensors = [t.detach().requires_grad_(n) for t, n in zip(behind, needs, strict=False)]
        gradients = iter(behind[len(tensors) :])
        now = generator.get_state()
        generator.set_state(ctx.random)
        with torch.enable_grad():
            results = ctx.function(*tensors)
        generator.set_state(now)
        pairs = [(r, None if g is None else next(gradients)) for r, g in zip(results, given, strict=True)]
        wanted = [(r, g) for r, g in pairs if isinstance(r, Tensor) and r.requires_grad and g is not None]
        torch.autograd.backward([r for r, _ in wanted], [g for _, g in wanted])
        return None, None, *[t.grad if n else None for t, n in zip(tensors, needs, strict=True)]
