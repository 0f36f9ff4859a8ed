"""Settings: one frozen dataclass, changed by assignment, as in ``isthmus.config.fallback = "error"``.

Each has an environment variable, which is read when ``isthmus`` is imported. ``import torch`` imports it, so a variable
with a wrong value or name is warned about and left out: it must not keep torch from being imported. An assignment of a
wrong value raises. docs/settings.md is written from this module (``table``), and a test compares the two.
"""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any

from isthmus.errors import ConfigError, ConfigWarning


def _setting(default: Any, variable: str, choices: tuple[Any, ...], doc: str, kind: str = "") -> Any:
    metadata = {"variable": variable, "choices": choices, "doc": doc, "kind": kind}
    return field(default=default, metadata=metadata)


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
        kind="a path",
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
        kind="the name of a backend",
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
    log: str = _setting(
        "off",
        "ISTHMUS_LOG",
        ("off", "passes"),
        "What is logged: nothing, or each graph before and after the passes that change it.",
    )
    lines: str = _setting(
        "off",
        "ISTHMUS_LINES",
        ("off", "on"),
        "Whether lazy mode notes the line of your code that recorded each op, for errors and printed graphs.",
    )


AUTOLOAD = "ISTHMUS_AUTOLOAD"
"""The one variable that is no setting: ``_isthmus_autoload.py`` reads it to know whether to import this package."""


def from_environment() -> Settings:
    """Return the settings the environment asks for; warn about variables that ask for what there is not."""
    variables = {f.metadata["variable"]: f.name for f in fields(Settings)}
    given: dict[str, Any] = {}
    for variable, text in sorted(os.environ.items()):
        name = variables.get(variable)
        if name is None:
            if variable.startswith("ISTHMUS_") and variable != AUTOLOAD:
                _warn_of_name(variable, [*variables, AUTOLOAD])
        elif text:  # an empty variable is one that is not set
            value = _parsed(name, text)
            if _fault(name, value) is None:
                given[name] = value
            else:
                _warn(f"{variable}={text!r} is ignored: {variable} takes {legal(name)}; {_default(name)}")
    return Settings(**given)


def _warn_of_name(variable: str, known: list[str]) -> None:
    # The prefix is common to all, and would make any two names look alike.
    ends = [name.removeprefix("ISTHMUS_") for name in known]
    close = difflib.get_close_matches(variable.removeprefix("ISTHMUS_"), ends, n=1)
    hint = f"did you mean ISTHMUS_{close[0]}?" if close else f"there are {', '.join(known)}"
    _warn(f"{variable} is ignored: Isthmus has no setting of that name; {hint}")


def _warn(text: str) -> None:
    warnings.warn(text, ConfigWarning, stacklevel=3)


def _default(name: str) -> str:
    default = Settings.__dataclass_fields__[name].default
    return f"the default, {default!r}, is used"


def legal(name: str) -> str:
    """Return the legal values of a setting in words."""
    setting = Settings.__dataclass_fields__[name]
    choices = setting.metadata["choices"]
    if choices:
        return " or ".join(repr(choice) for choice in choices)
    return "a positive integer" if isinstance(setting.default, int) else setting.metadata["kind"]


def table() -> str:
    """Return every setting as the rows of a Markdown table."""
    rows = ["| setting | environment variable | values | default | |", "| --- | --- | --- | --- | --- |"]
    for setting in fields(Settings):
        choices = setting.metadata["choices"]
        values = ", ".join(f"`{choice}`" for choice in choices) if choices else legal(setting.name)
        default = f"`{setting.default}`" if setting.default != "" else "empty"
        variable, doc = setting.metadata["variable"], setting.metadata["doc"]
        rows.append(f"| `{setting.name}` | `{variable}` | {values} | {default} | {doc} |")
    return "\n".join(rows)


def _parsed(name: str, text: str) -> Any:
    """Return a setting's value from its text in the environment."""
    is_count = isinstance(Settings.__dataclass_fields__[name].default, int)
    return int(text) if is_count and text.strip().isdecimal() else text


def xla_flags() -> str:
    """Return the flags the environment gives XLA: programs compiled with others are other programs."""
    return os.environ.get("XLA_FLAGS", "")


def _check(name: str, value: Any) -> None:
    known = [f.name for f in fields(Settings)]
    if name not in known:
        raise ConfigError(f"isthmus.config has no setting {name!r}; it has {', '.join(known)}")
    fault = _fault(name, value)
    if fault is not None:
        raise ConfigError(f"isthmus.config.{name} = {value!r} {fault}")


def _fault(name: str, value: Any) -> str | None:
    """Return what is wrong with the value of a setting, or None."""
    setting = Settings.__dataclass_fields__[name]
    choices = setting.metadata["choices"]
    if isinstance(setting.default, int) and (type(value) is not int or value < 1):
        return "is not a positive integer"
    if not choices and not isinstance(value, type(setting.default)):
        return "is not a string"
    if choices and value not in choices:
        return f"is not a choice; choose from {', '.join(repr(choice) for choice in choices)}"
    return None


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
