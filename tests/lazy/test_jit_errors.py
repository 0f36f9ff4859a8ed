"""What ``isthmus.jit`` refuses, and what it warns of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isthmus
from isthmus.errors import JitError
from tests.device.test_fallback import library
from tests.lazy.helpers import Steps, arange, jit_warning

pytestmark = pytest.mark.usefixtures("settled")


# ---- errors

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda y: y.sum().item(),
    "float": lambda y: float(y[0]),
    "bool": lambda y: 1 if (y > 0).all() else 0,
    "cpu": lambda y: y.cpu(),
    "tolist": lambda y: y.tolist(),
    "str": lambda y: str(y),
    "print": lambda y: print(y),
    "equal": lambda y: torch.equal(y, y + 1),
    "nonzero": lambda y: y.nonzero(),
    "mask": lambda y: y[y > 1],
    "unique": lambda y: torch.unique(y),
    "copy to the CPU": lambda y: torch.zeros(3).copy_(y),
    "numpy": lambda y: y.numpy(force=True),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_a_value_is_refused(read: Callable[[Tensor], Any]) -> None:
    state, x, doomed = arange(3), arange(3), [True]

    @isthmus.jit
    def f(given: Tensor) -> Tensor:
        state.add_(given)
        y = given * 2
        if doomed[0]:
            read(y + state)  # truths of arguments alone are guarded, see test_jit_guards.py
        return y + state

    for n in range(1, 3):
        with pytest.raises(JitError, match=r"value is read.*test_jit_errors\.py:\d+.*read it outside"):
            f(x)
        assert isthmus.mode() == "eager"
        assert (x.tolist(), (x + 1).tolist()) == ([0, 1, 2], [1, 2, 3])
        assert state.tolist() == [0, 1 + n, 2 + 2 * n]  # what came before the error is done, as in eager
    doomed[0] = False
    for n in range(4, 8):
        assert f(x).tolist() == [0, n + 2, 2 * n + 4]


def add_on_the_cpu(counter: Tensor, x: Tensor) -> Tensor:
    counter.add_(1)
    return x * 2


HOSTED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "changed": (add_on_the_cpu, r'add_.*changes a tensor on the CPU.*capturable=True.*move.*"jax"'),
    "computed with": (
        lambda c, x: x + (c * 2).to("jax"),
        r'mul.*computes with a tensor on the CPU.*"jax" first',
    ),
    "read": (lambda c, x: x * c[0].item(), r'computes with a tensor on the CPU.*"jax" first'),
    "numpy": (lambda c, x: x * float(c.numpy()[0]), r"a tensor on the CPU is read"),
    "drawn": (lambda c, x: x + torch.rand(3).to("jax"), r'rand.*random numbers on the CPU.*device="jax"'),
    "permuted": (lambda c, x: x[torch.randperm(3)], r'randperm.*random numbers on the CPU.*device="jax"'),
    "filled": (
        lambda c, x: x + torch.empty(3).uniform_().to("jax"),
        r'uniform_.*random numbers on the CPU.*device="jax"',
    ),
    "dropped": (
        lambda c, x: x + F.dropout(torch.ones(3)).to("jax"),
        r'random numbers on the CPU.*device="jax"',
    ),
}


@pytest.mark.parametrize(("body", "message"), HOSTED.values(), ids=HOSTED)
def test_working_on_the_cpu_is_refused(body: Callable[[Tensor, Tensor], Any], message: str) -> None:
    x, on_cpu = arange(3), torch.ones(3)
    f = isthmus.jit(lambda given: body(on_cpu, given))
    for _ in range(2):
        with pytest.raises(JitError, match=message):
            f(x)
        with pytest.raises(JitError, match=message):
            isthmus.jit(body)(on_cpu, x)
        assert on_cpu.tolist() == [1, 1, 1]
        assert (x + 1).tolist() == [1, 2, 3]
    g = isthmus.jit(lambda given: given + 1)
    assert g(x).tolist() == g(x).tolist() == [1, 2, 3]


def test_an_op_that_falls_to_the_cpu_is_refused() -> None:
    isthmus.config.fallback = "cpu"
    _keep, op = library("jitfall", "f(Tensor x) -> Tensor", lambda x: x + 1)
    state = arange(3)
    f = isthmus.jit(lambda x: op(state.add_(x)))
    for n in range(1, 3):
        with pytest.raises(JitError, match=r"jitfall\.f\.default would run on the CPU.*move it out"):
            f(arange(3))
        assert state.tolist() == [0, 1 + n, 2 + 2 * n]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax"])
def test_optimizers_that_count_on_the_cpu_are_refused(name: str) -> None:
    weight = nn.Parameter(arange(3))
    optimizer = getattr(torch.optim, name)([weight])

    def step() -> None:
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()

    f = isthmus.jit(step)
    for _ in range(2):
        with pytest.raises(JitError, match=rf"{name} counts its steps.*capturable=True"):
            f()
        assert weight.tolist() == [0, 1, 2]
    optimizer.param_groups[0]["capturable"] = True
    for _ in range(4):
        f()
    (state,) = optimizer.state.values()
    assert state["step"].item() == 4


def test_exceptions_of_the_function() -> None:
    state, fails = arange(3), [False]

    @isthmus.jit
    def f(x: Tensor) -> Tensor:
        state.add_(x)
        if fails[0]:
            raise ValueError("mine")
        return state * 2

    assert f(arange(3)).tolist() == [0, 4, 8]
    fails[0] = True
    for shape in (4, 5):
        with pytest.raises(ValueError, match="mine"):
            f(arange(shape)[:3])
    assert state.tolist() == [0, 4, 8]
    fails[0] = False
    assert f(arange(3)).tolist() == [0, 10, 20]
    assert f(arange(4)[:3]).tolist() == [0, 12, 24]
    with pytest.raises(RuntimeError, match="must match the size"):
        f(arange(4))
    assert state.tolist() == [0, 6, 12]


@pytest.mark.parametrize("when", ["now", "later"])
def test_an_index_out_of_range(when: str) -> None:
    isthmus.config.check_indices = when
    table = arange(4, 2, 2)
    f = isthmus.jit(lambda at: F.embedding(at, table) * 1)
    good, bad = (torch.tensor([0, n]).to("jax") for n in (1, 5))
    for _ in range(3):
        assert f(good).tolist() == [[0, 1], [2, 3]]
    if when == "now":
        with pytest.raises(IndexError, match="out of range"):
            f(bad)
    else:
        found = f(bad)
        with pytest.raises(IndexError, match="out of range"):
            found.tolist()
    assert f(good).tolist() == [[0, 1], [2, 3]]


# ---- tensors that go elsewhere


def test_tensors_stored_elsewhere() -> None:
    kept: list[Tensor] = []

    @isthmus.jit
    def f(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return x + 1

    def run() -> None:
        for n in range(6):
            assert f(arange(2) + n).tolist() == [n + 1, n + 2]

    with pytest.warns(jit_warning(), match=r"records .*f at every call: it keeps a tensor that it makes"):
        run()
    assert [t.tolist() for t in kept] == [[2 * n, 2 * n + 2] for n in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(arange(2))  # said once


def test_settings_changed_inside() -> None:
    steps = Steps()
    schedule = torch.optim.lr_scheduler.StepLR(steps.optimizer, 1, 0.5)

    @isthmus.jit
    def step(x: Tensor) -> Tensor:
        found = steps.step(x)
        schedule.step()
        return found

    def run() -> None:
        for _ in range(6):
            step(torch.ones(3).to("jax"))

    with pytest.warns(jit_warning(), match="it changes the settings of SGD"):
        run()
    assert steps.optimizer.param_groups[0]["lr"] == 0.25 / 64
    assert steps.weight.tolist() == [1 + i - 0.25 * (2 - 2**-5) for i in range(3)]


def test_no_warning_where_a_function_settles() -> None:
    steps = Steps(momentum=0.5)
    f = isthmus.jit(steps.step)
    with warnings.catch_warnings():
        warnings.simplefilter("error", jit_warning())
        for n in range(12):
            steps.optimizer.param_groups[0]["lr"] = 1 / (n + 1)
            f(arange(3))
