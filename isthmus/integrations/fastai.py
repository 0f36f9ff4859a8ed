"""fastai: ``DataLoaders`` and ``Learner`` take the device, where ``default_device()`` would be the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from isthmus.integrations import offered


def default_device(module: ModuleType) -> None:
    """Let the search for a device end with "jax"; ``default_device(False)`` still means the CPU."""
    theirs: Callable[..., torch.device] = module.default_device

    @functools.wraps(theirs)
    def default_device(use: Any = -1) -> torch.device:
        device = theirs(use)
        # fastai keeps the last answer that was not -1: False is the CPU, on purpose.
        found = device.type == "cpu" and module.defaults.use_cuda is not False and offered()
        return torch.device("jax") if found else device

    module.default_device = default_device  # type: ignore[attr-defined]


def takes() -> str:
    """Return the type of the device that data is loaded to."""
    from fastai.torch_core import default_device

    return str(default_device().type)
