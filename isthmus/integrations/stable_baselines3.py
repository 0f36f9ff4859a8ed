"""stable-baselines3: ``device="auto"``, the default of every algorithm, is this device where it would be the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch

from isthmus.integrations import offered


def device(module: ModuleType) -> None:
    """Let "auto" mean "jax" where it would mean the CPU; a device that is named is kept."""
    theirs: Callable[..., torch.device] = module.get_device

    @functools.wraps(theirs)
    def get_device(device: torch.device | str = "auto") -> torch.device:
        chosen = theirs(device)
        return torch.device("jax") if device == "auto" and chosen.type == "cpu" and offered() else chosen

    module.get_device = get_device  # type: ignore[attr-defined]


def takes() -> str:
    """Return the type of the device that "auto" means."""
    from stable_baselines3.common.utils import get_device

    return str(get_device("auto").type)
