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

from isthmus._device.core import generator
from isthmus._interop.functions import jax_function
from isthmus.errors import IsthmusError

_barrier = jax_function(lambda tensors: jax.lax.optimization_barrier(tensors))


@contextlib.contextmanager
def rematerialized(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let these modules keep their arguments alone, for as long as this block lasts."""
    before = [(module, module.__dict__.get("forward")) for module in modules]
    for module in modules:
        module.forward = _again(module)
    try:
        yield
    finally:
        for module, forward in before:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _again(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward that is run once more in backward."""
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = Call(module, forward, (args, kwargs))
        parameters = [p for p in module.parameters() if p.requires_grad]
        found = _Again.apply(call, len(call.tensors), *call.tensors, *parameters)
        return pytree.tree_unflatten(list(found), call.shape)

    return run


class Call:
    """One call of a module, and the state of torch in which it was made."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], given: Any) -> None:
        self.module, self.forward = module, forward
        self.leaves, self.spec = pytree.tree_flatten(given)
        self.at = [n for n, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.tensors = [self.leaves[n] for n in self.at]
        for n in self.at:
            self.leaves[n] = None
        self.shape: Any = None
        self.random = generator.get_state()
        self.cast = torch.is_autocast_enabled("jax"), torch.get_autocast_dtype("jax")

    def run(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return what the module returns, flat."""
        given = list(self.leaves)
        for n, tensor in zip(self.at, tensors, strict=True):
            given[n] = tensor
        args, kwargs = pytree.tree_unflatten(given, self.spec)
        found, self.shape = pytree.tree_flatten(self.forward(*args, **kwargs))
        return tuple(found)

    @contextlib.contextmanager
    def again(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Any, ...]]:
        """Run once more, with the same random numbers; buffers are written to only for the time of this block."""
        enabled, dtype = self.cast
        now, buffers = generator.get_state(), [(b, b.clone()) for b in self.module.buffers()]
        generator.set_state(self.random)
        with torch.enable_grad(), torch.autocast("jax", dtype=dtype, enabled=enabled):
            found = self.run(tensors)
        generator.set_state(now)
        yield found
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _together(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return gradients that are all computed before any is used: what they are computed of is not kept for later."""
    there = iter(_barrier([t for t in tensors if t is not None]))
    return [None if t is None else next(there) for t in tensors]


class _Again(torch.autograd.Function):
    """A call that is made without gradients, and in backward once more with them."""

    @staticmethod
    def forward(ctx: Any, call: Call, count: int, *tensors: Tensor) -> Any:
        ctx.call, ctx.parameters = call, tensors[count:]
        ctx.save_for_backward(*tensors[:count])
        call.tensors = []  # saved above
        with torch.no_grad():
            return call.run(tensors[:count])

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise IsthmusError("train_step: a rematerialized module cannot be differentiated twice")
        saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[2 : 2 + len(saved)]
        behind = _barrier([*saved, *[g for g in given if g is not None]])
        tensors = [t.detach().requires_grad_(n) for t, n in zip(behind, needs, strict=False)]
        gradients = iter(behind[len(tensors) :])
        wanted = [*[t for t in tensors if t.requires_grad], *ctx.parameters]
        with ctx.call.again(tensors) as results:
            pairs = [(r, None if g is None else next(gradients)) for r, g in zip(results, given, strict=True)]
            ends = [(r, g) for r, g in pairs if isinstance(r, Tensor) and r.requires_grad and g is not None]
            pulled = torch.autograd.grad(
                [r for r, _ in ends], wanted, [g for _, g in ends], allow_unused=True
            )
        found = iter(_together(pulled))
        return None, None, *[next(found) if n else None for n in needs], *found
