"""accelerate: ``Accelerator()`` takes the device, saves its random state, and knows its memory and its compiler.

Each function changes one module of accelerate, when that has been imported; the table in ``isthmus/integrations`` says
why. Nothing here imports accelerate. ``isthmus.config.libraries`` decides at each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from isthmus.integrations import offered

RANDOM_STATES = "random_states_jax_{}.pt"
"""The file beside accelerate's own with the random states of a process's devices."""


def default_device(module: ModuleType) -> None:
    """Let ``PartialState`` take the device where it would take the CPU because it knows no other."""
    state = module.PartialState
    theirs = state.default_device.fget

    @functools.wraps(theirs)
    def default_device(self: Any) -> torch.device:
        device = theirs(self)
        return torch.device("jax") if device.type == "cpu" and offered() else device

    state.default_device = property(default_device, doc=state.default_device.__doc__)


def random_states(module: ModuleType) -> None:
    """Let ``save_state`` and ``load_state`` keep the random state of the device."""
    save, load = module.save_accelerator_state, module.load_accelerator_state

    @functools.wraps(save)
    def save_accelerator_state(
        output_dir: str, model_states: Any, optimizers: Any, schedulers: Any, dataloaders: Any,
        process_index: int, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        saved = save(
            output_dir, model_states, optimizers, schedulers, dataloaders, process_index, *args, **kwargs
        )
        if module.PartialState().device.type == "jax":
            save_random_states(Path(output_dir) / RANDOM_STATES.format(process_index))
        return saved

    @functools.wraps(load)
    def load_accelerator_state(
        input_dir: str, models: Any, optimizers: Any, schedulers: Any, dataloaders: Any,
        process_index: int, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        loaded = load(input_dir, models, optimizers, schedulers, dataloaders, process_index, *args, **kwargs)
        if module.PartialState().device.type == "jax":
            load_random_states(Path(input_dir) / RANDOM_STATES.format(process_index))
        return loaded

    module.save_accelerator_state = save_accelerator_state  # type: ignore[attr-defined]
    module.load_accelerator_state = load_accelerator_state  # type: ignore[attr-defined]


def save_random_states(file: Path) -> None:
    """Write the random state of each device."""
    torch.save(torch.get_device_module("jax").get_rng_state_all(), file)


def load_random_states(file: Path) -> None:
    """Set the random states that a file holds; a checkpoint of another device has no such file."""
    if file.is_file():
        torch.get_device_module("jax").set_rng_state_all(torch.load(file, weights_only=True))


def dynamo_backend(module: ModuleType) -> None:
    """Let ``dynamo_backend="isthmus"`` be a name that accelerate knows."""
    backends = module.DynamoBackend
    theirs = backends._missing_
    # Not one of ``list(DynamoBackend)``, from which accelerate makes questions and messages, but found by its value.
    ours = str.__new__(backends, "ISTHMUS")
    ours._name_ = ours._value_ = "ISTHMUS"

    def _missing_(cls: Any, value: object) -> Any:
        return ours if value == "ISTHMUS" else theirs(value)

    backends._missing_ = classmethod(_missing_)


def max_memory(module: ModuleType) -> None:
    """Let ``device_map="auto"`` fill the devices before the host's memory."""
    theirs: Callable[..., dict[Any, Any]] = module.get_max_memory

    @functools.wraps(theirs)
    def get_max_memory(max_memory: dict[Any, Any] | None = None) -> dict[Any, Any]:
        memory = theirs(max_memory)
        # Without an argument the numbers are devices that accelerate found by itself: none of them is ours.
        if max_memory is not None or not offered() or any(isinstance(key, int) for key in memory):
            return memory
        device = torch.get_device_module("jax")
        free = {index: device.mem_get_info(index)[0] for index in range(device.device_count())}
        return {**free, **memory}  # in this order they are filled

    module.get_max_memory = get_max_memory  # type: ignore[attr-defined]


def takes() -> str:
    """Return the type of the device that accelerate takes by itself."""
    from accelerate import PartialState

    return str(PartialState().device.type)
