"""What tests of lazy mode share: the mode itself, settings, and counts of what it did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

import isthmus
from isthmus._device.checks import value_checks
from isthmus._graph.nodes import Node
from tests.jitting import held


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
