"""Small programs of real libraries, written as a user of the library writes them, with the device as the argument.

``@program(library, what)`` adds a function to ``PROGRAMS``. It takes the device's name, imports the library, and
returns tensors, or numbers computed from them, which must be the same on "cpu" and "jax". Random numbers are drawn on
the CPU and moved, since the two devices draw different ones. ``tests/integrations/try_libraries.py`` runs them and
writes docs/libraries.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Program:
    """A program of a library."""

    library: str
    """What ``pip install`` calls it."""
    what: str
    run: Callable[[str], Any]
    tolerance: float
    """How far results may be from the CPU's, relative to the largest of them."""
    settings: str
    """Variables of the environment that it needs, such as ``ISTHMUS_LIBRARIES=on``."""


PROGRAMS: dict[str, Program] = {}
"""Every program by its name, that of its function."""


def program(
    library: str, what: str, tolerance: float = 1e-4, settings: str = ""
) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Add a function to the programs."""

    def add(function: Callable[[str], Any]) -> Callable[[str], Any]:
        PROGRAMS[function.__name__] = Program(library, what, function, tolerance, settings)
        return function

    return add


def load() -> dict[str, Program]:
    """Import every module of this folder and return the programs in order."""
    for module in sorted(entry.name for entry in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{module}")
    return PROGRAMS


def seeded(*shape: int) -> torch.Tensor:
    """Return the same normal numbers for each shape, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def trained(
    model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], steps: int = 3, **settings: Any
) -> list[torch.Tensor]:
    """Train with AdamW (or ``optimizer``, made by the caller) and return the losses and the last gradients' norm."""
    optimizer = settings.get("optimizer") or torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses
