"""The programs of lazy mode: few, whatever varies, and they hold on to nothing."""

from __future__ import annotations

import gc
from typing import Any

import jax
import pytest
import torch
from torch import nn

import isthmus
from isthmus._graph.nodes import TABLE
from tests.lazy.helpers import (
    Count,
    arange,
    held,
    lazily,  # noqa: F401  # around every test
    setting,
)

# ---- what a program depends on


def test_the_default_dtype_is_that_of_the_recording() -> None:
    x = torch.arange(4).to("jax")
    half = x / 2
    ones = torch.ones(2, device="jax") * 3
    torch.set_default_dtype(torch.float64)
    try:
        again = x / 2
        assert (half.dtype, again.dtype, ones.dtype) == (torch.float32, torch.float64, torch.float32)
        assert half.tolist() == again.tolist() == [0, 0.5, 1, 1.5]
        assert ones.tolist() == [3, 3]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.get_default_dtype() == torch.float32


def test_the_matmul_precision_is_that_of_the_recording() -> None:
    a = arange(6, 2, 3)
    b = a.t().contiguous()
    found = []
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            found.append(torch.mm(a, b))
        nodes = [held(t) for t in found]
        torch.set_float32_matmul_precision("high")
        isthmus.sync()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert [n.call.context[1] for n in nodes] == ["highest", "medium"]
    assert lowered_text().count("precision = [HIGHEST, HIGHEST]") == 1
    assert found[0].tolist() == found[1].tolist() == [[5, 14], [14, 50]]


def last_family() -> Any:
    from isthmus._lazy import programs

    return next(reversed(programs._families.values()))


def lowered_text() -> str:
    """Return the StableHLO of the program that ran last."""
    (program,) = last_family().programs.values()
    return program.executable.lowered.as_text()


def test_sliding_slices_compile_few_programs() -> None:
    x = arange(100, 50, 2)
    with Count("compilations") as compiled:
        found = [x[i].sum().item() for i in range(50)]
    assert found == [4.0 * i + 1 for i in range(50)]
    assert compiled.count <= 3
    with Count("compilations") as compiled:
        for i in range(50):
            x[i, 1] = -1.0
            isthmus.sync()
    assert compiled.count <= 3
    assert x[:, 1].tolist() == [-1] * 50
    assert x[7, 0].item() == 14


def test_several_offsets_that_move_apart() -> None:
    x, y = arange(20), arange(20)
    for i, j in [(1, 1), (2, 1), (2, 2), (3, 4), (1, 9), (1, 1)]:
        assert (x[i : i + 3] + y[j : j + 3]).tolist() == [i + j, i + j + 2, i + j + 4]


def test_numbers_that_vary_compile_once() -> None:
    x = arange(3)
    with Count("compilations") as compiled:
        for i in range(20):
            assert (x * i + i / 2).tolist() == [i / 2, i * 1.5, i * 2.5]
    assert compiled.count == 1


@pytest.mark.parametrize(
    "number",
    [0, -0.0, float("inf"), float("nan"), True, 2**62, -(2**63), 2**63 - 1, 1e300, 1 + 2j],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool], ids=str)
def test_every_kind_of_number(number: Any, dtype: torch.dtype) -> None:
    want = torch.arange(3).to(dtype)
    got = want.to("jax")
    torch.testing.assert_close((got + number).cpu(), want + number, equal_nan=True)
    torch.testing.assert_close((got * number).cpu(), want * number, equal_nan=True)


def test_cpu_scalars_that_vary_compile_once() -> None:
    x = arange(3)
    with Count("compilations") as compiled:
        for i in range(10):
            assert (x * torch.tensor(float(i))).tolist() == [0, i, 2 * i]
    assert compiled.count == 1


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_a_learning_rate_that_changes_compiles_nothing(name: str) -> None:
    weight = nn.Parameter(arange(4))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1)

    def step(rate: float) -> None:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        (weight * weight).sum().backward()
        optimizer.step()
        isthmus.sync()

    for n in range(3):
        step(0.1 / (n + 1))
    with Count("compilations") as compiled:
        for n in range(5):
            step(0.01 / (n + 1))
    assert compiled.count == 0


# ---- memory


def test_the_dead_are_not_computed() -> None:
    x = arange(5)
    with Count("programs run") as run:
        x + 1
        (x * 2).exp()
    assert run.count == 0
    y = ((x + 1) * 2).sum()
    del x
    y.item()
    graph = last_family().graph
    assert len(graph.outputs) == 1
    unused = arange(5).max(0).values  # its indices died
    assert unused.item() == 4
    assert len(last_family().graph.outputs) == 1


def test_an_endless_loop_is_cut() -> None:
    from isthmus._lazy.trace import trace

    with setting("graph_size", 50):
        x = arange(3)
        x = x + 0
        with Count("programs run") as run, Count("compilations") as compiled:
            for _ in range(500):
                x = x + 1
                assert trace.size <= 51
        assert x.tolist() == [500, 501, 502]
    assert 10 <= run.count <= 12
    assert compiled.count <= 4


def test_a_long_chain_is_no_recursion() -> None:
    x = arange(2)
    for _ in range(1500):  # Python's limit is 1000 frames
        x = x + 1
    assert x.tolist() == [1500, 1501]


def test_a_step_in_place_reuses_memory() -> None:
    weight = torch.rand(300, 7, device="jax")
    momentum = torch.zeros(300, 7, device="jax")

    def step() -> set[int]:
        momentum.mul_(0.9).add_(weight)
        weight.sub_(momentum, alpha=0.1)
        isthmus.sync()
        return {held(t).unsafe_buffer_pointer() for t in (weight, momentum)}

    step()
    first = step()
    assert all(step() == first for _ in range(3))
    kept = held(weight)
    before = float(kept[0, 0])
    step()
    assert not kept.is_deleted()
    assert float(kept[0, 0]) == before
    with setting("donate", "off"):
        assert step() != step()


def test_views_of_the_old_value_survive_donation() -> None:
    x = arange(3000)
    x.add_(0)
    isthmus.sync()
    old = x.clone()
    detached = x.detach()
    x.add_(1)
    assert (x[0].item(), old[0].item(), detached[0].item()) == (1, 0, 1)


@pytest.mark.parametrize(
    "steps", [300, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_steps_leak_nothing(steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 1)).to("jax")
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.randn(32, 5, 4).to("jax")

    def step(n: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 / (n + 1)
        optimizer.zero_grad()
        model(data[1 + n % 31]).square().mean().backward()
        optimizer.step()
        isthmus.sync()

    for n in range(10):
        step(n)
    before, compiled = alive(), isthmus.metrics.counts()["compilations"]
    for n in range(steps):
        step(n)
    assert alive() == before
    assert isthmus.metrics.counts()["compilations"] == compiled


def alive() -> tuple[int, int]:
    """Return how many nodes and arrays there are."""
    from isthmus._runtime import host_arrays

    torch.jax.synchronize()  # type: ignore[attr-defined]
    host_arrays._numbers.clear()  # a cache with a limit of its own
    gc.collect()
    return len(TABLE), len(jax.live_arrays())


def test_transposed_results_count_towards_the_limit() -> None:
    x = torch.ones(2, 3).t().to("jax")
    isthmus.sync()
    before = isthmus.metrics.counts().get("ops recorded", 0)
    y = torch.sin(torch.sin(x))
    isthmus.sync()
    assert y.stride() == (1, 3)
    assert isthmus.metrics.counts()["ops recorded"] - before == 2


def test_the_limit_is_that_of_the_config_when_recording_begins() -> None:
    isthmus.set_mode("eager")
    with setting("graph_size", 4), isthmus.lazy():
        before = isthmus.metrics.counts().get("programs run", 0)
        x = arange(3)
        for _ in range(12):
            x = x + 1
        assert isthmus.metrics.counts()["programs run"] - before >= 2
