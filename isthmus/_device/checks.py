"""Conditions that programs return: raised at the call, or at the next host read, as the config says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from isthmus import config
from isthmus._runtime.compiler import platform
from isthmus._runtime.private import is_traced

_lock = threading.Lock()
Condition = tuple[Any, type[Exception], str]
_LIMIT = 128
_pending: list[Condition] = []


def verifier(errors: list[tuple[type[Exception], str]]) -> Callable[[Any], None] | None:
    """Return what to do with the flags of a program that requires these conditions."""
    if not errors:
        return None

    def verify(flags: Any) -> None:
        found = [(flag, *error) for flag, error in zip(flags, errors, strict=True)]
        settle(found, auto="now" if platform() == "cpu" else "later")

    return verify


def settle(found: list[Condition], auto: str = "later") -> None:
    """Raise for the conditions of a program when the config says; ``auto`` is when it leaves that to us."""
    when = auto if config.check_indices == "auto" else config.check_indices
    if when == "now":
        _raise_first(found)
    elif when == "later":
        postpone(found)


def demand(flag: Any, error: type[Exception], message: str) -> None:
    """Raise unless ``flag`` turns out true, now where the host need not wait for it, else at the next host read."""
    found = [(flag, error, message)]
    if platform() == "cpu":
        _raise_first(found)
    else:
        postpone(found)


def postpone(found: list[Condition]) -> None:
    """Keep conditions for the next host read; of many, look at the older half, which the device has long computed."""
    with _lock:
        _pending.extend(found)
        due = _pending[: _LIMIT // 2] if len(_pending) > _LIMIT else []
        del _pending[: len(due)]
    _raise_first(due)


def raise_pending() -> None:
    """Raise the first error among conditions that were left for later."""
    if _pending:
        with _lock:
            found, _pending[:] = list(_pending), []
        _raise_first(found)


def _raise_first(found: list[Condition]) -> None:
    for flag, error, message in found:
        # While JAX traces nothing can be raised: what a wrong call computes is left to the program.
        if not is_traced([flag]) and not bool(flag):
            raise error(message)
