"""transformers: ``Trainer`` and ``pipeline`` take the device, with ``bf16=True`` and the device's random state.

Each function changes one module of transformers, when that has been imported; the table in ``isthmus/integrations``
says why. The Trainer works by accelerate, whose part is in ``isthmus/integrations/accelerate.py``.
"""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from isthmus.integrations import offered
from isthmus.integrations.accelerate import load_random_states, save_random_states

RANDOM_STATES = "rng_state_jax_{}.pth"
"""The file beside the Trainer's own with the random states of a process's devices."""


def training_arguments(module: ModuleType) -> None:
    """Let ``TrainingArguments`` have the device that accelerate has, and half precision with it."""
    arguments = module.TrainingArguments
    theirs = arguments._setup_devices.func
    has_bf16 = module.is_torch_bf16_gpu_available

    @functools.wraps(theirs)
    def _setup_devices(self: Any) -> torch.device:
        device: torch.device = theirs(self)
        if device.type == "cpu" and not self.use_cpu and self.distributed_state.device.type == "jax":
            return self.distributed_state.device
        return device

    setup = type(arguments.__dict__["_setup_devices"])(_setup_devices)
    setup.__set_name__(arguments, "_setup_devices")
    arguments._setup_devices = setup

    @functools.wraps(has_bf16)
    def is_torch_bf16_gpu_available() -> bool:
        return offered() or has_bf16()

    module.is_torch_bf16_gpu_available = is_torch_bf16_gpu_available  # type: ignore[attr-defined]


def random_states(module: ModuleType) -> None:
    """Let the Trainer's checkpoints keep the random state of the device."""
    trainer = module.Trainer
    save, load = trainer._save_rng_state, trainer._load_rng_state

    @functools.wraps(save)
    def _save_rng_state(self: Any, output_dir: str) -> None:
        save(self, output_dir)
        if self.args.device.type == "jax":
            save_random_states(Path(output_dir) / RANDOM_STATES.format(self.args.process_index))

    @functools.wraps(load)
    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        load(self, checkpoint)
        if checkpoint is not None and self.args.device.type == "jax":
            load_random_states(Path(os.fspath(checkpoint)) / RANDOM_STATES.format(self.args.process_index))

    trainer._save_rng_state = _save_rng_state
    trainer._load_rng_state = _load_rng_state


def pipeline(module: ModuleType) -> None:
    """Let ``pipeline(...)`` without a device, or with its index, mean the device."""
    pipelines = module.Pipeline
    theirs = pipelines.__init__
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        device = call.arguments.get("device")
        placed = getattr(call.arguments["model"], "hf_device_map", None)
        index = next(iter(placed.values())) if placed else 0 if device is None else device
        wanted = offered() and _finds_nothing() and isinstance(index, int) and index >= 0
        if wanted and not placed:
            call.arguments["device"] = torch.device("jax", index)
        theirs(*call.args, **call.kwargs)
        if wanted and placed:  # placed by device_map, which refuses a device beside it
            self.device = torch.device("jax", index)

    pipelines.__init__ = __init__


def _finds_nothing() -> bool:
    """Return whether torch has no accelerator but ours, so that an index can mean no other."""
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == "jax"


def takes() -> str:
    """Return the type of the device that the Trainer takes by itself."""
    from transformers import TrainingArguments

    return str(TrainingArguments().device.type)
