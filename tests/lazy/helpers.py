"""What tests of lazy mode and ``isthmus.jit`` share: exact inputs, the mode as a fixture, counts, functions under jit.

A file whose tests all run in lazy mode imports the fixture ``lazily``, which then holds for each of them; ``check``
runs a scenario with and without jit and asks for the same observations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isthmus
from isthmus._device.checks import value_checks
from isthmus._device.core import donation
from isthmus._device.core.buffer import buffer_of
from isthmus._graph.nodes import Node


def arange(n: int, *shape: int) -> Tensor:
    """Return 0, 1, 2, ... as a float tensor on the device: sums and products of these are exact."""
    return torch.arange(float(n)).reshape(shape or (n,)).to("jax")


def held(tensor: Tensor) -> Any:
    """Return the array or the node behind a tensor, taken back from a program that keeps it."""
    return donation.settled(buffer_of(tensor))


# ---- lazy mode


@pytest.fixture(autouse=True)
def lazily(strict_fallback: None) -> Iterator[None]:
    isthmus.config.check_indices = "auto"  # as it is for users; strict_fallback resets it
    with isthmus.lazy():
        yield
        value_checks.forget()


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    isthmus.set_mode("eager")
    try:
        yield
    finally:
        isthmus.set_mode("lazy")


@contextlib.contextmanager
def setting(name: str, value: Any) -> Iterator[None]:
    before = getattr(isthmus.config, name)
    setattr(isthmus.config, name, value)
    isthmus.sync()
    try:
        yield
    finally:
        setattr(isthmus.config, name, before)
        isthmus.sync()


def pending(tensor: Tensor) -> bool:
    """Return whether the tensor has been recorded and not computed."""
    return type(held(tensor)) is Node


class Count:
    """How often something happened inside a block."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0

    def __enter__(self) -> Count:
        isthmus.sync()
        self.before = isthmus.metrics.counts().get(self.name, 0)
        return self

    def __exit__(self, *_: object) -> None:
        isthmus.sync()
        self.count = isthmus.metrics.counts().get(self.name, 0) - self.before


# ---- isthmus.jit


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
