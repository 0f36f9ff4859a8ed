"""Plans: kept while they are used, and not for ever."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

import isthmus
from isthmus._device.core import plan_cache
from isthmus._runtime import memory_maps


@pytest.fixture(autouse=True)
def few(monkeypatch: Any) -> None:
    """Let eight plans be young, and the next one make all others old."""
    monkeypatch.setattr(plan_cache, "_LIMIT", 8)
    monkeypatch.setattr(plan_cache, "_count", 8)


def _count() -> int:
    return sum(len(each.young) + len(each.old) for each in plan_cache.every)


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


def test_plans_go_before_the_process_runs_out_of_memory_maps(monkeypatch: Any) -> None:
    monkeypatch.setattr(plan_cache, "_LIMIT", 10**9)
    monkeypatch.setattr(plan_cache, "_ROUND", 4)
    monkeypatch.setattr(memory_maps, "limit", lambda: 3)
    for size in range(3, 60):
        torch.ones(size, device="jax").neg()
    assert _count() <= 2 * 4 + 1


def test_programs_of_ops_with_a_size_from_values_do_not_pile_up_either() -> None:
    for size in range(3, 40):
        assert torch.ones(size, device="jax").unique().tolist() == [1.0]
    assert _count() <= 2 * 8 + 8


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells")
def test_memory_maps_are_counted() -> None:
    before = memory_maps.count()
    pages = [mmap.mmap(-1, 4096, prot=access) for access in (mmap.PROT_READ, mmap.PROT_WRITE) * 20]
    assert memory_maps.count() > before
    assert memory_maps.limit() > memory_maps.count() > 0
    del pages
