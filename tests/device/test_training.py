"""Small models of each family train to the same losses as on the CPU, with no op on the CPU."""

from __future__ import annotations

import gc
from typing import Any

import jax
import pytest
import torch

from isthmus._device.core.dispatch import _kernels
from isthmus._runtime import counters, host_arrays
from tests.models import MLP, MODELS, train


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_losses_equal_the_cpus(model: Any) -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2)

    want = train(model, "cpu", 20, optimizer)
    counters.clear()
    got = train(model, "jax", 20, optimizer)
    assert not counters.fallbacks
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-3, atol=2e-4)
    assert got[-1] < got[0]


def _plans() -> int:
    return sum(len(getattr(kernel, "plans", ())) for kernel in _kernels.values())


@pytest.mark.parametrize(
    "steps", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_training_leaks_nothing(steps: int) -> None:
    torch.manual_seed(0)
    model = MLP().to("jax")
    step = torch.optim.Adam(model.parameters())
    g = torch.Generator().manual_seed(1)
    batch = [t.to("jax") for t in MLP.batch(g)]

    def run() -> None:
        step.zero_grad()
        model(*batch).backward()
        step.step()

    for _ in range(5):
        run()
    arrays, plans, compilations = _live(), _plans(), counters.counts["compilations"]
    for n in range(steps):
        step.param_groups[0]["lr"] = 1e-3 / (n + 1)
        run()
    assert counters.counts["compilations"] == compilations
    assert _plans() == plans
    assert len(host_arrays._numbers) <= host_arrays._CACHE_LIMIT
    assert _live() == arrays


def _live() -> int:
    """Return how many arrays live, the cache of numbers apart, which has a limit of its own."""
    torch.jax.synchronize()
    host_arrays._numbers.clear()
    gc.collect()
    return len(jax.live_arrays())
