"""Settings: one frozen dataclass, changed by assignment, as in ``isthmus.config.fallback = "error"``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any

from isthmus.errors import ConfigError


def _setting(default: Any, variable: str, choices: tuple[Any, ...], doc: str) -> Any:
    return field(default=default, metadata={"variable": variable, "choices": choices, "doc": doc})


@dataclass(frozen=True)
class Settings:
    """Every setting, its default, its environment variable and one sentence about it."""

    fallback: str = _setting(
        "warn",
        "ISTHMUS_FALLBACK",
        ("cpu", "warn", "error"),
        "What happens to an op nothing lowers: run it on the CPU silently, with one warning, or raise.",
    )
    check_indices: str = _setting(
        "auto",
        "ISTHMUS_CHECK_INDICES",
        ("auto", "now", "later", "off"),
        "When an index out of range raises: at its call, at the next host read, never; auto is now on the "
        "CPU and later elsewhere.",
    )
    donate: str = _setting(
        "auto",
        "ISTHMUS_DONATE",
        ("auto", "off"),
        "Whether an in-place op may reuse the memory of the array it replaces.",
    )
    cache: str = _setting(
        "",
        "ISTHMUS_CACHE",
        (),
        "A folder where compiled programs are kept, so that the next process starts warm; empty keeps none. "
        "It must be yours alone to write to.",
    )
    cache_size: int = _setting(
        2048,
        "ISTHMUS_CACHE_SIZE",
        (),
        "How many megabytes of compiled programs that folder keeps; those unused for longest go first.",
    )
    progress: str = _setting(
        "auto",
        "ISTHMUS_PROGRESS",
        ("auto", "off"),
        "Whether a terminal shows a line while a compilation takes over two seconds.",
    )
    mode: str = _setting(
        "eager",
        "ISTHMUS_MODE",
        ("eager", "lazy"),
        "Whether ops run at once or are recorded; assigning it is `isthmus.set_mode`, reading it `isthmus.mode`.",
    )
    backend: str = _setting(
        "xla",
        "ISTHMUS_BACKEND",
        (),
        "What compiles recorded graphs: xla, reference (ATen on the CPU, op by op), or one you registered.",
    )
    graph_size: int = _setting(
        5000,
        "ISTHMUS_GRAPH_SIZE",
        (),
        "How many ops lazy mode records before it runs them by itself.",
    )
    programs: int = _setting(
        256,
        "ISTHMUS_PROGRAMS",
        (),
        "How many compiled programs lazy mode keeps; the one unused for longest goes first.",
    )
    lines: str = _setting(
        "off",
        "ISTHMUS_LINES",
        ("off", "on"),
        "Whether lazy mode notes the line of your code that recorded each op, for errors and printed graphs.",
    )


def from_environment() -> Settings:
    """Return the settings the environment asks for."""
    variables = {f.name: f.metadata["variable"] for f in fields(Settings)}
    texts = {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}
    given = {name: _parsed(name, text) for name, text in texts.items()}
    for name, value in given.items():
        _check(name, value)
    return Settings(**given)


def _parsed(name: str, text: str) -> Any:
    """Return a setting's value from its text in the environment."""
    is_count = isinstance(Settings.__dataclass_fields__[name].default, int)
    return int(text) if is_count and text.isdecimal() else text


def xla_flags() -> str:
    """Return the flags the environment gives XLA: programs compiled with others are other programs."""
    return os.environ.get("XLA_FLAGS", "")


def _check(name: str, value: Any) -> None:
    known = {f.name: f for f in fields(Settings)}
    if name not in known:
        raise ConfigError(f"isthmus.config has no setting {name!r}; it has {', '.join(known)}")
    choices = known[name].metadata["choices"]
    if isinstance(known[name].default, int) and (type(value) is not int or value < 1):
        raise ConfigError(f"isthmus.config.{name} = {value!r} is not a positive integer")
    if not choices and not isinstance(value, type(known[name].default)):
        raise ConfigError(f"isthmus.config.{name} = {value!r} is not a string")
    if choices and value not in choices:
        options = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(f"isthmus.config.{name} = {value!r} is not a choice; choose from {options}")


@dataclass(frozen=True)
class _Live:
    read: Callable[[], Any]
    write: Callable[[Any], None]


_live: dict[str, _Live] = {}
"""Settings whose value is kept by a module above this one."""


def connect(name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
    """Let a setting be read and assigned through these functions: more happens there than a value is stored."""
    _live[name] = _Live(read, write)


def __getattr__(name: str) -> Any:
    """Return the current value of a setting."""
    if name in _live:
        return _live[name].read()
    if name in Settings.__dataclass_fields__:
        return getattr(current, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Config(ModuleType):
    """Makes the module's settings assignable, and refuses what is not a setting."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or name in self.__dict__:
            super().__setattr__(name, value)
            return
        _check(name, value)
        if name in _live:
            _live[name].write(value)
            return
        super().__setattr__("current", replace(self.__dict__["current"], **{name: value}))


current = from_environment()
sys.modules[__name__].__class__ = _Config
