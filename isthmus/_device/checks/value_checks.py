"""Conditions that programs return: raised at the call, or at the next host read, as the config says."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from isthmus import config
from isthmus._runtime.compiler import platform
from isthmus._runtime.host_arrays import from_numpy
from isthmus._runtime.private import is_traced

_lock = threading.Lock()
Error = tuple[type[Exception], str]
Condition = tuple[Any, type[Exception], str]
_LIMIT = 128
# Flags of single ops, and the numbers of programs that run again and again.
_pending: list[Condition] = []
_numbers: dict[Conditions, Any] = {}


class Conditions:
    """What one program requires of its runs.

    A run is given a number and returns one: that of the first condition which failed, in it or in a run before that
    nobody has looked at; 0 is none. So there is one number to read, however many conditions and runs there were.
    """

    def __init__(self) -> None:
        self.errors: Sequence[Error] = ()

    def before(self) -> Any:
        """Return the number for the next run."""
        found = _numbers.get(self)
        return _none() if found is None else found

    def settle(self, number: Any, auto: str) -> None:
        """Raise for the number a run returned when the config says; ``auto`` is when it leaves that to us."""
        when = _when(auto)
        if when == "now":
            self.look(number)
        elif when == "later":
            with _lock:
                _numbers[self] = number

    def look(self, number: Any) -> None:
        """Raise if a condition failed."""
        failed = int(number)
        if failed:
            raise self.error(failed - 1)

    def error(self, at: int) -> Exception:
        """Return what to raise for one of the conditions."""
        error, message = self.errors[at]
        return error(message)


@functools.cache
def _none() -> Any:
    """Return the number that says no condition failed."""
    return from_numpy(np.zeros((), np.int32))


def auto() -> str:
    """Return when conditions are looked at if nobody said: at once where the host need not wait for them."""
    return "now" if platform() == "cpu" else "later"


def _when(auto: str) -> str:
    return auto if config.check_indices == "auto" else config.check_indices


def verifier(errors: list[Error]) -> Callable[[Any], None] | None:
    """Return what to do with the flags of a program that requires these conditions."""
    if not errors:
        return None

    def verify(flags: Any) -> None:
        found = [(flag, *error) for flag, error in zip(flags, errors, strict=True)]
        when = _when(auto())
        if when == "now":
            _raise_first(found)
        elif when == "later":
            postpone(found)

    return verify


def demand(flag: Any, error: type[Exception], message: str) -> None:
    """Raise unless ``flag`` turns out true, now where the host need not wait for it, else at the next host read."""
    found = [(flag, error, message)]
    if auto() == "now":
        _raise_first(found)
    else:
        postpone(found)


def postpone(found: list[Condition]) -> None:
    """Keep conditions for the next host read; of many, look at the older half, which the device has long computed."""
    with _lock:
        _pending.extend(found)
        due = _pending[: _LIMIT // 2] if len(_pending) > _LIMIT else []
        del _pending[: len(due)]
    for flag, _, _ in due:
        flag.copy_to_host_async()  # together they take little longer than one alone
    _raise_first(due)


def raise_pending() -> None:
    """Raise the first error among conditions that were left for later."""
    if _pending or _numbers:
        with _lock:
            flags, numbers = list(_pending), dict(_numbers)
            forget()
        _raise_first(flags)
        for conditions, number in numbers.items():
            conditions.look(number)


def forget() -> None:
    """Forget conditions that were left for later."""
    _pending.clear()
    _numbers.clear()


def _raise_first(found: list[Condition]) -> None:
    for flag, error, message in found:
        # While JAX traces nothing can be raised: what a wrong call computes is left to the program.
        if not is_traced([flag]) and not bool(flag):
            raise error(message)
