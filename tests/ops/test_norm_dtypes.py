"""Norms of half types, with parameters as narrow or wider, run on the device in every mode and agree with the CPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import in_mode

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch": (lambda: nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "batch 1-D": (lambda: nn.BatchNorm1d(3), (4, 3)),
    "batch plain": (lambda: nn.BatchNorm2d(3, affine=False), (4, 3, 2, 2)),
    "batch alone": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 2, 2)),
    "instance": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (4, 3, 2, 2)),
    "group": (lambda: nn.GroupNorm(1, 3), (4, 3, 2, 2)),
    "layer": (lambda: nn.LayerNorm(3), (4, 3)),
    "rms": (lambda: nn.RMSNorm(3, eps=1e-5), (4, 3)),
}
HALVES = [torch.bfloat16, torch.float16]


def parameters() -> Iterator[Any]:
    """Yield every norm with every pair of dtypes in training and evaluation; compiled, one in three is not slow."""
    every = itertools.product(
        NORMS, HALVES, ["same", "float32"], [True, False], ["eager", "lazy", "compiled"]
    )
    for place, (name, dtype, held, training, mode) in enumerate(every):
        quick = mode == "eager" or (name in ("batch", "group") and dtype is torch.bfloat16) or place % 17 == 0
        marks = [] if quick else [pytest.mark.slow]
        label = f"{name}-{dtype}-{held}-{'train' if training else 'eval'}-{mode}"
        yield pytest.param(name, dtype, held, training, mode, id=label, marks=marks)


def step(module: nn.Module, x: Tensor, run: Callable[..., Tensor]) -> list[Tensor]:
    """Return what a norm gives, its gradients, and its statistics after."""
    x = x.detach().requires_grad_()
    out = run(x)
    out.backward(torch.arange(out.numel()).reshape(out.shape).cos().to(out.device, out.dtype))
    grads = [p.grad for p in (x, *module.parameters()) if p.grad is not None]
    return [out.detach(), *grads, *module.buffers()]


@pytest.mark.parametrize(("name", "dtype", "held", "training", "mode"), parameters())
def test_agrees_with_the_cpu(name: str, dtype: torch.dtype, held: str, training: bool, mode: str) -> None:
    make, shape = NORMS[name]
    module = make().to(dtype if held == "same" else torch.float32).train(training)
    there = copy.deepcopy(module).to("jax")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    true = copy.deepcopy(module).double()
    exact = step(true, x.double(), true)
    want = step(module, x, module)
    got = step(there, x.to("jax"), in_mode(lambda x: there(x), mode))
    for g, w, e in zip(got, want, exact, strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        if not g.is_floating_point():
            assert torch.equal(g.cpu(), w)
            continue
        # No further from the truth than the CPU, and some roundings.
        error, rounding = (w.double() - e).abs().max(), 4 * torch.finfo(dtype).eps * e.abs().max()
        assert (g.cpu().double() - e).abs().max() <= error + rounding, (g, w, e)
