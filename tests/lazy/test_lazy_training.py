"""Training in lazy mode: the losses eager training has, one program a step, and none compiled after the third."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isthmus
from tests.models import LSTM, Block, ResNet


class DropoutMLP(nn.Module):
    """Random numbers and running statistics: two kinds of state beside the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(6, 8, generator=g), torch.randint(0, 4, (6,), generator=g)


class SmallResNet(ResNet):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem[0] = nn.Conv2d(3, 4, 3, padding=1, bias=False)


class ResNet18(SmallResNet):
    """Four stages of two blocks, narrow, in float64: so many norms over few samples magnify a float32's rounding."""

    def __init__(self) -> None:
        super().__init__()
        stages = [(4, 4, 1), (4, 8, 2), (8, 8, 2), (8, 8, 2)]
        self.blocks = nn.Sequential(*[nn.Sequential(Block(i, o, s), Block(o, o, 1)) for i, o, s in stages])
        self.double()

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        x, y = ResNet.batch(g)
        return x.double(), y


class Layer(nn.Module):
    """One layer of the GPT below."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        split = [
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1)
        ]
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    """A causal language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(13, 16), nn.Embedding(8, 16)
        self.layers = nn.Sequential(Layer(16, 2), Layer(16, 2))
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        given = tokens[:, :-1]
        x = self.embed(given) + self.places(torch.arange(given.shape[1], device=given.device))
        logits = self.norm(self.layers(x)) @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @staticmethod
    def batch(g: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randint(0, 13, (3, 9), generator=g),)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
}
EXTRAS = ["schedule", "clip", "accumulate", "bfloat16", "ema"]


@dataclass
class Log:
    """What a training left behind: numbers per step, and the weights and statistics at its end."""

    losses: list[float] = field(default_factory=list)
    compilations: list[int] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)
    state: list[Tensor] = field(default_factory=list)


class Training:
    """A model, its optimizer, and whichever extras it is trained with, from a fixed start on fixed data."""

    def __init__(self, make: Any, optimizer: str, extras: list[str]) -> None:
        torch.manual_seed(0)
        self.model = make().to("jax")
        self.extras = extras
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.average = copy.deepcopy(self.model)
        g = torch.Generator().manual_seed(1)
        self.batches = [tuple(t.to("jax") for t in make.batch(g)) for _ in range(3)]

    def step(self, n: int) -> Tensor:
        """Train on one batch, or on two where gradients accumulate, and return the loss."""
        parts = 2 if "accumulate" in self.extras else 1
        self.optimizer.zero_grad()
        total = torch.zeros((), device="jax")
        for part in range(parts):
            loss = self._loss(self.batches[(n * parts + part) % 3]) / parts
            loss.backward()
            total += loss.detach()
        if "clip" in self.extras:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        if "schedule" in self.extras:
            self.schedule.step()
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

    def run(self, steps: int) -> Log:
        """Train and return what happened."""
        log = Log()
        for n in range(steps):
            before = isthmus.metrics.counts()
            log.losses.append(self.step(n).item())
            after = isthmus.metrics.counts()
            log.compilations.append(after.get("compilations", 0) - before.get("compilations", 0))
            log.programs.append(after.get("programs run", 0) - before.get("programs run", 0))
        state = [*self.model.state_dict().values(), *self.average.state_dict().values()]
        log.state = [t.cpu() for t in state]
        return log


def check(make: Any, optimizer: str, extras: list[str], steps: int) -> None:
    """Train in both modes and compare."""
    eager = Training(make, optimizer, extras).run(steps)
    assert eager.losses[3] != eager.losses[0]  # the same batch again: it learns
    isthmus.metrics.clear()
    with isthmus.lazy():
        lazy = Training(make, optimizer, extras).run(steps)
    assert not isthmus.metrics.fallbacks()
    assert sum(lazy.compilations[3:]) == 0
    assert lazy.programs == [1] * steps
    # One program adds in another order than many do, at most a few last bits per step; no weight has a gradient that
    # is zero but for rounding (no bias before a norm or in a key), which Adam would blow up to a whole step.
    torch.testing.assert_close(torch.tensor(lazy.losses), torch.tensor(eager.losses), rtol=1e-5, atol=1e-6)
    for got, want in zip(lazy.state, eager.state, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("extras", [[], EXTRAS], ids=["plain", "all"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_mlp(optimizer: str, extras: list[str]) -> None:
    check(DropoutMLP, optimizer, extras, 20)


@pytest.mark.parametrize("extra", EXTRAS)
def test_mlp_with_one_extra(extra: str) -> None:
    check(DropoutMLP, "AdamW", [extra], 20)


EXACT = [extra for extra in EXTRAS if extra != "bfloat16"]
MODELS = {"SmallResNet": (SmallResNet, "SGD"), "LSTM": (LSTM, "Adam"), "GPT": (GPT, "AdamW")}


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    make, optimizer = MODELS[name]
    check(make, optimizer, EXTRAS, 6)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extras", [[], EXACT], ids=["plain", "all"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_model_longer(name: str, optimizer: str, extras: list[str]) -> None:
    check(MODELS[name][0], optimizer, extras, 20)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_model_longer_in_bfloat16(name: str, optimizer: str) -> None:
    check(MODELS[name][0], optimizer, EXTRAS, 20)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extra", EXACT)
@pytest.mark.parametrize("name", MODELS)
def test_model_with_one_extra(name: str, extra: str) -> None:
    check(MODELS[name][0], "AdamW", [extra], 20)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resnet18(optimizer: str) -> None:
    check(ResNet18, optimizer, EXACT, 20)
