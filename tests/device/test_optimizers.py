"""Every optimizer of torch's optim_db on the device against the CPU: five steps, state, copies of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from tests.conformance.trial import Trial
from tests.conformance.values import leaves
from tests.conformance.verdict import Entry, Verdict, chosen, judge

# Optimizers at the level users have: fused divisions and roots round otherwise.
pytestmark = pytest.mark.numerics
STEPS = 5
# It takes sparse gradients only, and the device has the strided layout only.
SPARSE = {"SparseAdam"}
# What an implementation is asked for by; "capturable" rows bring the flag with them.
FLAGS = {
    "for-loop": {"foreach": False},
    "default": {},
    "foreach": {"foreach": True},
    "capturable": {"foreach": False},
    "capturable foreach": {"foreach": True},
    "fused": {"fused": True},
    "differentiable": {"differentiable": True},
    "state": {},
}
Do = Callable[[OptimizerInfo, dict[str, Any], str], list[Any]]


def model_for(info: OptimizerInfo, place: str) -> nn.Module:
    """Return the same small model in each place."""
    torch.manual_seed(3)
    bias = info.name != "Muon"  # it takes nothing but matrices
    model = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Linear(6, 3, bias=bias))
    model = nn.Linear(4, 3) if is_chaotic(info) else model
    return model.to("cpu" if place == "wide" else place, torch.float64 if place == "wide" else torch.float32)


def is_chaotic(info: OptimizerInfo) -> bool:
    """Return whether an optimizer magnifies a rounding beyond any bound unless the problem is convex."""
    return info.name == "LBFGS"


def batch(step: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of one step."""
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 4, generator=g), torch.randn(8, 3, generator=g)
    return x.to(like.device, like.dtype), y.to(like.device, like.dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Run some steps of training."""
    for step in steps:
        x, y = batch(step, next(model.parameters()))

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters and the tensors of the state, counters apart: forms keep those differently."""
    state = optimizer.state_dict()["state"]
    kept = [v for row in state.values() for name, v in row.items() if torch.is_tensor(v) and v.ndim]
    return leaves([[p.detach() for p in model.parameters()], kept])


def trained(info: OptimizerInfo, options: dict[str, Any], place: str) -> list[Any]:
    """Return what five steps lead to."""
    model = model_for(info, place)
    optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(options))
    train(model, optimizer, range(STEPS))
    return outcome(model, optimizer)


def resumed(info: OptimizerInfo, options: dict[str, Any], place: str) -> list[Any]:
    """Return what five steps lead to when model and optimizer are saved and loaded after the second."""
    first, second = (model_for(info, place) for _ in range(2))
    optimizer = info.optim_cls(first.parameters(), **copy.deepcopy(options))
    train(first, optimizer, range(2))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    other = info.optim_cls(second.parameters(), **copy.deepcopy(options))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(second, other, range(2, STEPS))
    return outcome(second, other)


def differentiated(info: OptimizerInfo, options: dict[str, Any], place: str) -> list[Any]:
    """Return the gradient of where two steps lead by where they start."""
    like = next(model_for(info, place).parameters())
    start = torch.linspace(0.5, 1, 3, dtype=like.dtype, device=like.device).requires_grad_()
    weight = start.clone()
    optimizer = info.optim_cls([weight], **copy.deepcopy(options))
    for step in range(2):
        weight.grad = torch.linspace(1, 2 + step, 3, device=like.device, dtype=like.dtype) * start
        optimizer.step()
    (weight**2).sum().backward()
    return leaves([start.grad])


DOES: dict[str, Do] = {"state": resumed, "differentiable": differentiated}


def kinds(info: OptimizerInfo) -> Iterator[str]:
    """Yield the implementations an optimizer has, and the round trip of its state."""
    has = info.supported_impls
    yield from ("for-loop", "foreach") if "foreach" in has else ("default",)
    if info.has_capturable_arg:
        yield from ("capturable", "capturable foreach")
    yield from (impl for impl in ("differentiable", "fused") if impl in has)
    yield "state"


def rows(info: OptimizerInfo, kind: str) -> list[dict[str, Any]]:
    """Return the options of every configuration an implementation is run with."""
    # torch lists what needs an accelerator for "cuda" only.
    given = [row.kwargs for row in info.optim_inputs_func("cuda")]
    capturable = kind.startswith("capturable")
    return [row for row in given if bool(row.get("capturable")) == capturable]


def parameters() -> Iterator[Any]:
    """Yield the tests: of each optimizer's about half are not slow."""
    for place, info in enumerate(o for o in optim_db if o.name not in SPARSE):
        for turn, kind in enumerate(kinds(info)):
            entry = Entry("optim_db", info.name, kind, "float32")
            marks = [] if (place + turn) % 2 == 0 else [pytest.mark.slow]
            yield pytest.param(info, entry, id=str(entry), marks=marks)


@pytest.mark.parametrize(("info", "entry"), parameters())
def test_optimizer(info: OptimizerInfo, entry: Entry, record_property: Any, limit: int | None) -> None:
    verdict = Verdict(entry)
    do = DOES.get(entry.kind, trained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, row in enumerate(chosen(rows(info, entry.kind), entry, limit)):

            def at(place: str, row: dict[str, Any] = row) -> list[Any]:
                options = {**row, **FLAGS[entry.kind]}
                if (
                    "capturable" in row and place != "jax"
                ):  # the CPU cannot be captured: its plain loop will do
                    options |= {"capturable": False, "foreach": False}
                return do(info, options, place)

            Trial(at).run(verdict, number)
    judge(verdict, record_property)
