"""Rematerialization for ``isthmus.train_step(remat=...)``: chosen modules save their arguments alone for backward.

Inside ``rematerialized(modules)`` each module's ``forward`` is an ``autograd.Function`` that runs without gradients,
saves the arguments, and in backward runs once more with gradients: activations inside it are residuals no longer.

The recorded step is one program, in which XLA and our own graph share equal computations; a second forward of the same
arguments would be merged with the first, and its activations be residuals after all. So the second one starts behind
``jax.lax.optimization_barrier``, which no pass looks through. (XLA's CPU compiler removes barriers and undoes this;
GPUs and TPUs gain the memory.) A second barrier, on the gradients, makes the recomputed activations die before the
next module's backward begins.

The second run must repeat the first: it gets the same random numbers (the generator's state is set back) and the same
autocast, and what it writes to buffers, such as batch-norm statistics, is written back as it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch import Tensor, nn

from isthmus._device.core import generator
from isthmus._device.torch_glue.pytree import TreeSpec, tree_flatten, tree_unflatten
from isthmus._interop.functions import jax_function
from isthmus.errors import IsthmusError

_barrier = jax_function(lambda tensors: jax.lax.optimization_barrier(tensors))


@contextlib.contextmanager
def rematerialized(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let these modules save their arguments alone for backward, inside this block."""
    # A forward set on the instance, by the user or by a wrapper, is put back; without one, the class's is used again.
    before = [(module, module.__dict__.get("forward")) for module in modules]
    for module in modules:
        module.forward = _rematerialized_forward(module)
    try:
        yield
    finally:
        for module, forward in before:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _rematerialized_forward(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # The call holds no tensors: autograd saves them, and frees them after backward.
        call = ModuleCall(
            module, forward, [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves], spec
        )
        parameters = [p for p in module.parameters() if p.requires_grad]
        out_spec, *outputs = _Rematerialized.apply(call, len(tensors), *tensors, *parameters)
        return tree_unflatten(outputs, out_spec)

    return run


class ModuleCall:
    """One call of a module as a function of its tensor arguments, with torch's state at the time of the call.

    ``constants`` has None for each tensor among the flattened arguments, and ``(value,)`` for any other value.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        constants: Sequence[tuple[Any] | None],
        spec: TreeSpec,
    ) -> None:
        self.module, self.forward, self.constants, self.spec = module, forward, constants, spec
        self.generator_state = generator.get_state()
        self.autocast = torch.is_autocast_enabled("jax"), torch.get_autocast_dtype("jax")

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Any], TreeSpec]:
        """Return the module's result, flattened, and its structure."""
        rest = iter(tensors)
        leaves = [next(rest) if constant is None else constant[0] for constant in self.constants]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return tree_flatten(self.forward(*args, **kwargs))

    @contextlib.contextmanager
    def run_again(self, tensors: Sequence[Tensor]) -> Iterator[list[Any]]:
        """Run with gradients and the same random numbers; what it writes to buffers is undone after this block."""
        enabled, dtype = self.autocast
        state, buffers = generator.get_state(), [(b, b.clone()) for b in self.module.buffers()]
        generator.set_state(self.generator_state)
        with torch.enable_grad(), torch.autocast("jax", dtype=dtype, enabled=enabled):
            outputs, _ = self.run(tensors)
        generator.set_state(state)
        # The backward of the caller may read buffers as this run left them, so they are restored after it.
        yield outputs
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


class _Rematerialized(torch.autograd.Function):
    """``apply(call, count, *tensors, *parameters)``, of which ``count`` are tensors; returns structure and leaves."""

    @staticmethod
    def forward(ctx: Any, call: ModuleCall, count: int, *tensors: Tensor) -> Any:
        ctx.call, ctx.parameters = call, tensors[count:]
        ctx.save_for_backward(*tensors[:count])
        with torch.no_grad():
            outputs, out_spec = call.run(tensors[:count])
        return out_spec, *outputs

    @staticmethod
    def backward(ctx: Any, _: None, *gradients: Any) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise IsthmusError("train_step: a rematerialized module cannot be differentiated twice")
        saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[2 : 2 + len(saved)]
        # Gradients are behind the barrier too: the second forward cannot start before they are there.
        behind = _barrier([*saved, *[g for g in gradients if g is not None]])
        tensors = [t.detach().requires_grad_(n) for t, n in zip(behind, needs, strict=False)]
        cotangents = iter(behind[len(tensors) :])
        wanted = [*[t for t in tensors if t.requires_grad], *ctx.parameters]
        with ctx.call.run_again(tensors) as outputs:
            pairs = [
                (out, None if g is None else next(cotangents))
                for out, g in zip(outputs, gradients, strict=True)
            ]
            ends = [(o, g) for o, g in pairs if isinstance(o, Tensor) and o.requires_grad and g is not None]
            pulled = torch.autograd.grad(
                [out for out, _ in ends], wanted, [g for _, g in ends], allow_unused=True
            )
        # Behind a barrier all of them are computed before any is used, so the activations they need are freed.
        complete = iter(_barrier([g for g in pulled if g is not None]))
        results = iter([None if g is None else next(complete) for g in pulled])
        return None, None, *[next(results) if n else None for n in needs], *results
