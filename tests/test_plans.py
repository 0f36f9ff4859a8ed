"""Plans: kept while they are used, and not for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import isthmus
from isthmus._device import dispatch


@pytest.fixture(autouse=True)
def few(monkeypatch: Any) -> None:
    """Let eight plans be young, and the next one make all others old."""
    monkeypatch.setattr(dispatch, "_LIMIT", 8)
    monkeypatch.setattr(dispatch, "_young", 8)


def _count() -> int:
    kernels = [kernel for kernel in dispatch._kernels.values() if isinstance(kernel, dispatch.Kernel)]
    return sum(len(kernel.plans) + len(kernel.old) for kernel in kernels)


def test_shapes_that_never_come_back_do_not_pile_up() -> None:
    torch.ones(2, device="jax").neg().neg_()  # the first makes room
    for size in range(3, 60):
        x = torch.ones(size, device="jax")
        assert (x.neg() + x).tolist() == [0.0] * size
    assert _count() <= 2 * 8 + 8  # and those of ops that copy a result to the host


def test_a_plan_in_use_is_not_compiled_again() -> None:
    hot = torch.arange(1000.0).to("jax")
    assert hot.neg()[1].item() == -1
    before = isthmus.metrics.counts()["compilations"]
    for size in range(3, 40):
        torch.arange(float(size)).to("jax").cos()
        hot.neg()
    cold = 37
    assert isthmus.metrics.counts()["compilations"] - before <= cold
    assert hot.neg()[1].item() == -1
