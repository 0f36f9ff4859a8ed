"""Conditions on values, such as an index in range: a program returns whether they held, the host raises.

XLA cannot raise, and clamps an index that is out of range, so a lowering states what torch would check
(``_ops/value_checks.require``) and the program returns it. Two forms:

- A program of a single op returns one flag per condition. ``verifier`` reads them at the call where the host need not
  wait (CPU), or adds them to a list that the next transfer to the host reads (``raise_pending``).
- A program of a graph returns one integer: the number of the first condition that failed, from 1; 0 is fine. It takes
  the integer of its last run as an input, so that one failure among many runs is not lost before it is read
  (``Conditions``).

``isthmus.config.check_indices`` chooses "now", "later" or "off"; "auto" is "now" on the CPU and "later" elsewhere.
What can go wrong: "later" raises at a line after the wrong call; inside a JAX trace nothing can be raised.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from isthmus import _caches, config
from isthmus._runtime.compiler import platform
from isthmus._runtime.host_arrays import from_numpy
from isthmus._runtime.private import is_traced

_lock = threading.Lock()
Error = tuple[type[Exception], str]
Condition = tuple[Any, type[Exception], str]
# So many unread flags make the older half be read: they are scalars on the device, and must not pile up.
_LIMIT = 128
# Flags of single ops, and the codes of programs that run again and again.
_pending: list[Condition] = []
_numbers: dict[Conditions, Any] = {}


class Conditions:
    """The conditions of one program that runs again and again.

    A run takes a code and returns one: the number of the first condition that failed in it, or in an earlier run whose
    code was not read; 0 is none. So there is one code to read, however many conditions and runs there were.
    """

    def __init__(self) -> None:
        self.errors: Sequence[Error] = ()

    def before(self) -> Any:
        """Return the code for the next run."""
        code = _numbers.get(self)
        return _none() if code is None else code

    def settle(self, number: Any, auto: str) -> None:
        """Raise for the code of a run now, later or never, as the config says; ``auto`` replaces its "auto"."""
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

    def error(self, index: int) -> Exception:
        """Return the exception of one of the conditions."""
        error, message = self.errors[index]
        return error(message)


@functools.cache
def _none() -> Any:
    """Return the code that says no condition failed."""
    return from_numpy(np.zeros((), np.int32))


_caches.register("the code of no failed check", 1, lambda: _none.cache_info().currsize, _none.cache_clear)


def auto() -> str:
    """Return when conditions are read by default: at once where the host need not wait for the device."""
    return "now" if platform() == "cpu" else "later"


def _when(auto: str) -> str:
    return auto if config.check_indices == "auto" else config.check_indices


def verifier(errors: list[Error]) -> Callable[[Any], None] | None:
    """Return a function that takes the flags of a run and raises these errors, None where there are none."""
    if not errors:
        return None

    def verify(flags: Any) -> None:
        conditions = [(flag, *error) for flag, error in zip(flags, errors, strict=True)]
        when = _when(auto())
        if when == "now":
            _raise_first(conditions)
        elif when == "later":
            postpone(conditions)

    return verify


def demand(flag: Any, error: type[Exception], message: str) -> None:
    """Raise unless ``flag`` turns out true, now where the host need not wait for it, else at the next host read."""
    conditions = [(flag, error, message)]
    if auto() == "now":
        _raise_first(conditions)
    else:
        postpone(conditions)


def postpone(conditions: list[Condition]) -> None:
    """Keep conditions for the next host read; of many, read the older half, which the device has long computed."""
    with _lock:
        _pending.extend(conditions)
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


def _raise_first(conditions: list[Condition]) -> None:
    for flag, error, message in conditions:
        # While JAX traces nothing can be raised: a wrong call computes whatever its lowering computes.
        if not is_traced([flag]) and not bool(flag):
            raise error(message)
