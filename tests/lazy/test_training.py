"""Training in lazy mode and under ``isthmus.jit``: eager's losses and state, and few programs.

In lazy mode each step is one program, and none is compiled after the third. Under jit the step's Python runs three
times at most, and what follows are replays.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isthmus
from tests.models import GPT, LSTM, DropoutMLP, ResNet18, SmallGPT, SmallLSTM, SmallResNet

pytestmark = pytest.mark.numerics

MODES = ["lazy", "jit"]
RATES = {"SGD": 0.05, "Adam": 3e-3, "AdamW": 3e-3}
OPTIMIZERS = list(RATES)
# Under jit a learning rate that is to be followed without recording again is a tensor on the device.
SCHEDULE = {"lazy": "schedule", "jit": "tensor schedule"}
EXACT = ["schedule", "clip", "accumulate", "ema"]
# A last bit in float32 becomes a rounding in bfloat16, and after a dozen steps another loss.
EXTRAS = [*EXACT, "bfloat16"]


def make_optimizer(name: str, parameters: Any, lr: Any, capturable: bool) -> torch.optim.Optimizer:
    """Return an optimizer; ``capturable`` keeps Adam's count of steps on the device, which jit needs."""
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-3)
    return getattr(torch.optim, name)(parameters, lr=lr, capturable=capturable)


@dataclass
class Log:
    """What a training left behind: numbers per step, and everything it changed as it is at its end."""

    losses: list[float] = field(default_factory=list)
    compilations: list[int] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)
    replays: list[int] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


class Training:
    """A model, its optimizer, and whichever extras it is trained with, from a fixed start on fixed data."""

    def __init__(self, make: Any, optimizer: str, extras: list[str], capturable: bool) -> None:
        torch.manual_seed(0)
        self.make, self.model = make, make().to("jax")
        self.extras, self.runs = extras, 0
        rate: Any = RATES[optimizer]
        if "tensor schedule" in extras:
            rate = torch.tensor(rate).to("jax")
        self.optimizer = make_optimizer(optimizer, self.model.parameters(), rate, capturable)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = copy.deepcopy(self.model)

    def step(self, *batches: tuple[Tensor, ...]) -> Tensor:
        """Train on these batches, one after the other, and return the mean of their losses."""
        self.runs += 1
        self.optimizer.zero_grad()
        total = torch.zeros((), device="jax")
        for batch in batches:
            loss = self._loss(batch) / len(batches)
            loss.backward()
            total += loss.detach()
        if "clip" in self.extras:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        if "ema" in self.extras:
            self._average()
        return total

    def _loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        half = "bfloat16" in self.extras
        with torch.autocast("jax", torch.bfloat16) if half else contextlib.nullcontext():
            return self.model(*batch)

    @torch.no_grad()
    def _average(self) -> None:
        for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(now, 0.1)

    def run(self, step: Callable[..., Tensor], steps: int) -> Log:
        """Train and return what happened."""
        log = Log()
        # Not an attribute: a batch that the step also reaches otherwise would have a recording of its own.
        g = torch.Generator().manual_seed(1)
        batches = [tuple(t.to("jax") for t in self.make.batch(g)) for _ in range(3)]
        parts = 2 if "accumulate" in self.extras else 1
        for n in range(steps):
            before = isthmus.metrics.counts()
            loss = step(*[batches[(n * parts + part) % 3] for part in range(parts)])
            log.losses.append(loss.item())  # in lazy mode this runs the step
            after = isthmus.metrics.counts()
            for name, counts in {
                "compilations": log.compilations,
                "programs run": log.programs,
                "replays": log.replays,
            }.items():
                counts.append(after.get(name, 0) - before.get(name, 0))
            if {"schedule", "tensor schedule"} & {*self.extras}:
                self.schedule.step()
        log.state = {name: tensor.cpu() for name, tensor in self._state()}
        return log

    def _state(self) -> list[tuple[str, Tensor]]:
        moments = [
            (f"{n}.{name}", value)
            for n, state in enumerate(self.optimizer.state.values())
            for name, value in state.items()
        ]
        gradients = [(f"{name}.grad", p.grad) for name, p in self.model.named_parameters()]
        averages = [(f"average.{name}", value) for name, value in self.average.state_dict().items()]
        rates = [(f"lr {n}", torch.as_tensor(g["lr"])) for n, g in enumerate(self.optimizer.param_groups)]
        return [*self.model.state_dict().items(), *averages, *moments, *gradients, *rates]


def compare(mode: str, make: Any, optimizer: str, extras: list[str], steps: int) -> tuple[Training, Log]:
    """Train eagerly and in a mode, ask for the same numbers, and return the latter training."""
    eagerly = Training(make, optimizer, extras, capturable=mode == "jit")
    eager = eagerly.run(eagerly.step, steps)
    assert eager.losses[3] != eager.losses[0]  # the same batches again: it learns
    isthmus.metrics.clear()
    # Made after that ran: making it seeds the generator that dropout draws from.
    with isthmus.lazy() if mode == "lazy" else contextlib.nullcontext():
        training = Training(make, optimizer, extras, capturable=mode == "jit")
        step = training.step if mode == "lazy" else isthmus.jit(training.step)
        log = training.run(step, steps)
    assert not isthmus.metrics.fallbacks()
    # One program adds in another order than many do, at most a few last bits per step; no weight has a gradient that
    # is zero but for rounding (no bias before a norm or in a key), which Adam would blow up to a whole step.
    torch.testing.assert_close(torch.tensor(log.losses), torch.tensor(eager.losses), rtol=1e-5, atol=1e-6)
    assert log.state.keys() == eager.state.keys()
    for name, want in eager.state.items():
        torch.testing.assert_close(
            log.state[name], want, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    return training, log


def check(mode: str, make: Any, optimizer: str, extras: list[str], steps: int) -> None:
    """Compare with eager, and ask for as few programs and as little Python as the mode promises."""
    extras = [SCHEDULE[mode] if extra == "schedule" else extra for extra in extras]
    if optimizer == "SGD":  # it reads the value of a learning rate that is a tensor, whatever its device
        extras = [extra for extra in extras if extra != "tensor schedule"]
    training, log = compare(mode, make, optimizer, extras, steps)
    assert sum(log.compilations[3:]) == 0
    if mode == "lazy":
        assert log.programs == [1] * steps
    else:
        assert training.runs <= 3
        assert log.replays[3:] == [1] * (steps - 3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extras", [[], EXTRAS], ids=["plain", "all"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_mlp(optimizer: str, extras: list[str], mode: str) -> None:
    check(mode, DropoutMLP, optimizer, extras, 20)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", EXTRAS)
def test_mlp_with_one_extra(extra: str, mode: str) -> None:
    check(mode, DropoutMLP, "AdamW", [extra], 20)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_learning_rate_that_is_a_float_is_recorded_again_by_jit(optimizer: str) -> None:
    training, log = compare("jit", DropoutMLP, optimizer, ["schedule", "clip"], 20)
    assert training.runs == 20
    assert sum(log.compilations[3:]) == 0
    assert sum(log.replays) == 0


QUICK = {
    "SmallResNet": (SmallResNet, "SGD"),
    "SmallLSTM": (SmallLSTM, "Adam"),
    "SmallGPT": (SmallGPT, "AdamW"),
}
MODELS = {"SmallResNet": SmallResNet, "LSTM": LSTM, "GPT": GPT}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", QUICK)
def test_model(name: str, mode: str) -> None:
    make, optimizer = QUICK[name]
    check(mode, make, optimizer, EXTRAS, 6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["LSTM", "GPT"])
def test_larger_model(name: str, mode: str) -> None:
    check(mode, MODELS[name], "AdamW" if name == "GPT" else "Adam", EXTRAS, 6)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extras", [[], EXACT], ids=["plain", "all"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_model_longer(name: str, optimizer: str, extras: list[str], mode: str) -> None:
    check(mode, MODELS[name], optimizer, extras, 20)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_model_longer_in_bfloat16(name: str, optimizer: str) -> None:
    check("lazy", MODELS[name], optimizer, EXTRAS, 20)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extra", EXACT)
@pytest.mark.parametrize("name", MODELS)
def test_model_with_one_extra(name: str, extra: str) -> None:
    check("lazy", MODELS[name], "AdamW", [extra], 20)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resnet18(optimizer: str) -> None:
    check("lazy", ResNet18, optimizer, EXACT, 20)
