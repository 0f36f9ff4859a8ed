"""Settings of the process: one frozen dataclass, changed by assignment, as in ``isthmus.config.fallback = "error"``.

Every setting has an environment variable, which is read once, when ``isthmus`` is imported. ``import torch`` imports
it, so a variable with a wrong value or name is warned about and left out: it must not keep torch from being imported.
An assignment of a wrong value raises ``isthmus.errors.ConfigError``.

>>> import isthmus
>>> isthmus.config.graph_size
5000
>>> isthmus.config.fallback = "sometimes"
Traceback (most recent call last):
    ...
isthmus.errors.ConfigError: isthmus.config.fallback = 'sometimes' is not a choice; choose from 'cpu', 'warn', 'error'

``current`` is the ``Settings`` object in force; an assignment replaces it whole, so a reader on another thread sees
either the old settings or the new. ``mode`` is the exception: it belongs to a thread and switching it runs code, so
``isthmus/modes.py`` takes its reads and writes over (``connect``). Fields are declared and checked by
``isthmus/_settings.py``; docs/make_settings.py prints them into docs/settings.md, and a test compares the two.
"""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

from isthmus import _settings
from isthmus.errors import ConfigWarning


@dataclass(frozen=True)
class Settings:
    """Every setting, its default, its environment variable and one sentence about it."""

    fallback: str = _settings.setting(
        "warn",
        "What happens to an op without a lowering or a decomposition: it runs on the CPU silently, with one warning "
        "per op, or raises.",
        choices=("cpu", "warn", "error"),
        variable="ISTHMUS_FALLBACK",
    )
    check_indices: str = _settings.setting(
        "auto",
        "When an index out of range raises: at its call, at the next host read, never; auto is now on the "
        "CPU and later elsewhere.",
        choices=("auto", "now", "later", "off"),
        variable="ISTHMUS_CHECK_INDICES",
    )
    donate: str = _settings.setting(
        "auto",
        "Whether an in-place op may reuse the memory of the array it replaces.",
        choices=("auto", "off"),
        variable="ISTHMUS_DONATE",
    )
    cache: str = _settings.setting(
        "",
        "A folder where compiled programs are kept, so that the next process starts warm; empty keeps none. "
        "It must be yours alone to write to.",
        variable="ISTHMUS_CACHE",
        kind="a path",
    )
    cache_size: int = _settings.setting(
        2048,
        "How many megabytes of compiled programs that folder keeps; the least recently used go first.",
        variable="ISTHMUS_CACHE_SIZE",
    )
    progress: str = _settings.setting(
        "auto",
        "Whether a terminal or a notebook shows a line while a compilation takes over two seconds.",
        choices=("auto", "off"),
        variable="ISTHMUS_PROGRESS",
    )
    mode: str = _settings.setting(
        "eager",
        "Whether ops run at once or are recorded; assigning it is `isthmus.set_mode`, reading it `isthmus.mode`.",
        choices=("eager", "lazy"),
        variable="ISTHMUS_MODE",
    )
    backend: str = _settings.setting(
        "xla",
        "What compiles recorded graphs: xla, reference (ATen on the CPU, op by op), or one you registered.",
        variable="ISTHMUS_BACKEND",
        kind="the name of a backend",
    )
    compile: str = _settings.setting(
        "isthmus",
        "What compiles graphs on the device where `torch.compile` names no backend: this package's, or TorchInductor, "
        "which has no code generator for the device and raises.",
        choices=("isthmus", "inductor"),
        variable="ISTHMUS_COMPILE",
    )
    graph_size: int = _settings.setting(
        5000, "How many ops lazy mode records before it runs them by itself.", variable="ISTHMUS_GRAPH_SIZE"
    )
    programs: int = _settings.setting(
        256,
        "How many compiled programs lazy mode keeps; the least recently used goes first.",
        variable="ISTHMUS_PROGRAMS",
    )
    log: str = _settings.setting(
        "off",
        "What is logged: nothing, or each graph before and after a pass that changes it.",
        choices=("off", "passes"),
        variable="ISTHMUS_LOG",
    )
    shapes: str = _settings.setting(
        "auto",
        "What is compiled for sizes that change: a program per size, or, from the second size of a graph on, programs "
        "for ranges of sizes on padded arrays; with `ranges` from the first one on, where `torch.compile` knows which "
        "sizes may change.",
        choices=("exact", "auto", "ranges"),
        variable="ISTHMUS_SHAPES",
    )
    buckets: int = _settings.setting(
        4,
        "How many padded sizes there are between a power of two and the next, for programs that serve a range.",
        variable="ISTHMUS_BUCKETS",
    )
    small_ops: str = _settings.setting(
        "host",
        "Where ops on at most 4096 elements run that every machine computes alike, such as those on ids and masks, "
        "unless `shapes` is exact: on the host, without a program until they have been called 1024 times, or on the "
        "device. The host waits for no array of a GPU or TPU.",
        choices=("host", "device"),
        variable="ISTHMUS_SMALL_OPS",
    )
    lines: str = _settings.setting(
        "off",
        "Whether lazy mode notes the line of your code that recorded each op, for errors and printed graphs.",
        choices=("off", "on"),
        variable="ISTHMUS_LINES",
    )
    tracebacks: str = _settings.setting(
        "short",
        "Whether tracebacks of errors leave out the frames of this package, or have them all.",
        choices=("short", "full"),
        variable="ISTHMUS_TRACEBACKS",
    )
    libraries: str = _settings.setting(
        "auto",
        "Whether libraries that look for a device (accelerate, transformers) find this one: everywhere, nowhere, or, "
        "with auto, where JAX has a GPU or TPU and torch has no accelerator of its own.",
        choices=("auto", "on", "off"),
        variable="ISTHMUS_LIBRARIES",
    )


_FIELDS = Settings.__dataclass_fields__
AUTOLOAD = "ISTHMUS_AUTOLOAD"
"""The one variable that is no setting: ``_isthmus_autoload.py`` reads it to know whether to import this package."""


def from_environment() -> Settings:
    """Return the settings the environment asks for; warn about variables with a wrong name or value."""
    variables = {each.metadata["variable"]: each for each in fields(Settings)}
    values: dict[str, Any] = {}
    for variable, text in sorted(os.environ.items()):
        about = variables.get(variable)
        if about is None:
            if variable.startswith("ISTHMUS_") and variable != AUTOLOAD:
                _warn_of_name(variable, [*variables, AUTOLOAD])
        elif text:  # an empty variable is one that is not set
            is_number = isinstance(about.default, int) and text.strip().isdecimal()
            value = int(text) if is_number else text
            if _settings.fault(about, value) is None:
                values[about.name] = value
            else:
                _warn(
                    f"{variable}={text!r} is ignored: {variable} takes {_settings.legal(about)}; "
                    f"the default, {about.default!r}, is used"
                )
    return Settings(**values)


def _warn_of_name(variable: str, known: list[str]) -> None:
    # Compared without the prefix, which is common to all and would make any two names look alike.
    ends = [name.removeprefix("ISTHMUS_") for name in known]
    close = difflib.get_close_matches(variable.removeprefix("ISTHMUS_"), ends, n=1)
    hint = f"did you mean ISTHMUS_{close[0]}?" if close else f"there are {', '.join(known)}"
    _warn(f"{variable} is ignored: Isthmus has no setting of that name; {hint}")


def _warn(text: str) -> None:
    warnings.warn(text, ConfigWarning, stacklevel=3)


def xla_flags() -> str:
    """Return the flags the environment gives XLA: programs compiled with others are other programs."""
    return os.environ.get("XLA_FLAGS", "")


def cluster() -> dict[str, str]:
    """Return the variables of a launcher of several processes: torchrun, SLURM, Open MPI, Cloud TPU."""
    # Of SLURM's those of srun, which starts several: the one process of a batch script has SLURM_JOB_ID as well.
    names = (
        "RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "TPU_WORKER_HOSTNAMES",
        "MEGASCALE_COORDINATOR_ADDRESS",
    )  # fmt: skip
    return {name: os.environ[name] for name in names if name in os.environ}


@dataclass(frozen=True)
class Launch:
    """What ``torchrun`` says about this process: its place on the host, and the address of the first host."""

    local_rank: int | None
    address: str | None


def launch() -> Launch:
    """Return the rank and address that the launcher of this process put into the environment."""
    rank = os.environ.get("LOCAL_RANK", "")
    return Launch(int(rank) if rank.isdecimal() else None, os.environ.get("MASTER_ADDR") or None)


@dataclass(frozen=True)
class _Live:
    read: Callable[[], Any]
    write: Callable[[Any], None]


_live: dict[str, _Live] = {}
"""Settings whose value lives in a module above this one."""


def connect(name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
    """Read and assign a setting through these functions instead of ``current``: assigning it runs code."""
    _live[name] = _Live(read, write)


def __getattr__(name: str) -> Any:
    """Return the current value of a setting."""
    if name in _live:
        return _live[name].read()
    if name in _FIELDS:
        return getattr(current, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Config(ModuleType):
    """Makes the module's settings assignable, and refuses what is not a setting."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets dunder names, and tests replace ``current``; neither is a setting.
        if name.startswith("__") or name in self.__dict__:
            super().__setattr__(name, value)
            return
        _settings.check(
            Settings, name, value, unknown="isthmus.config has no setting", assigned=f"isthmus.config.{name}"
        )
        if name in _live:
            _live[name].write(value)
            return
        super().__setattr__("current", replace(self.__dict__["current"], **{name: value}))


current = from_environment()
sys.modules[__name__].__class__ = _Config
