"""What the test of a family needs: its model, its data, how it is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of most families.

    Adam divides a gradient by its own size, so that one that is all rounding error, such as that of a bias ahead
    of a normalization, moves its parameter a whole step in a direction no arithmetic determines.
    """
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of families that have no gradient made of rounding errors."""
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Family:
    """A model that returns its loss and then its outputs, and what it is called with.

    A ``quick`` family runs in every test run, the others only in the full one. ``breaks`` is why Dynamo breaks
    the graph, where the model itself is written so that it must.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = momentum
    quick: bool = False
    breaks: tuple[str, ...] = ()


def tokens(shape: tuple[int, ...], g: torch.Generator, low: int = 3, high: int = 100) -> Tensor:
    """Return token ids, none of them one of the first few, which models reserve for padding and the like."""
    return torch.randint(low, high, shape, generator=g)


def classes(count: int, number: int, g: torch.Generator) -> Tensor:
    """Return ``number`` labels out of ``count`` classes."""
    return torch.randint(0, count, (number,), generator=g)
