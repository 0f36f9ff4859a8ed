"""Functions to put under ``isthmus.jit``, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import isthmus
from isthmus._device.core import donation
from isthmus._device.core.buffer import buffer_of


def arange(n: int, *shape: int) -> Tensor:
    """Return 0, 1, 2, ... as a float tensor on the device: sums and products of these are exact."""
    return torch.arange(float(n)).reshape(shape or (n,)).to("jax")


def held(tensor: Tensor) -> Any:
    """Return the array or the node behind a tensor, taken back from a program that keeps it."""
    return donation.settled(buffer_of(tensor))


def jit_warning() -> type[Warning]:
    from isthmus._lazy.jit import JitWarning

    return JitWarning


def replays() -> int:
    return isthmus.metrics.counts().get("replays", 0)


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


Scenario = Callable[[Any], list[Any]]


def check(scenario: Scenario) -> None:
    """Run a scenario with and without jit, and ask for the same observations and for replays."""
    wanted = scenario(plainly)
    before = replays()
    assert scenario(isthmus.jit) == wanted
    assert replays() > before


def counted(body: Callable[..., Any]) -> tuple[Any, list[int]]:
    """Return a function under jit, and a list that grows whenever its Python runs."""
    runs: list[int] = []

    @isthmus.jit
    def function(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return body(*args, **kwargs)

    return function, runs


def linear(bias: bool = False) -> nn.Linear:
    model = nn.Linear(2, 2, bias).to("jax")
    with torch.no_grad():
        model.weight.copy_(arange(4, 2, 2))
    return model


class Steps:
    """A training step of one weight whose numbers are exact: rates are powers of two."""

    def __init__(self, zero: bool = True, **options: Any) -> None:
        self.weight = nn.Parameter(arange(3) + 1)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.25, **options)
        self.zero, self.runs = zero, 0

    def step(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.zero:
            self.optimizer.zero_grad()
        loss = (self.weight * x).sum()
        loss.backward()
        self.optimizer.step()
        return loss

    def seen(self) -> list[Any]:
        gradient = self.weight.grad
        return [self.weight.tolist(), None if gradient is None else gradient.tolist()]
