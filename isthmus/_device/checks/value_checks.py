"""Conditions on values, such as an index in range: a program returns whether they held, the host raises.

XLA cannot raise, and clamps an index that is out of range, so a lowering states what torch would check
(``_ops/value_checks.require``) and the program returns a code: the number of the first condition that failed, from 1; 0
is fine. ``Conditions`` raises for a code at the call where the host need not wait for the device (CPU), or at the next
transfer to the host (``raise_pending``):

- A program of a graph takes the code of its last run as an input, so that one failure among many runs is not lost and
  one code is left to read (``settle``).
- A program of a single op does not, since that would make calls of one plan wait for each other: every call leaves a
  code of its own (``settle_call``).

``isthmus.config.check_indices`` chooses "now", "later" or "off"; "auto" is "now" on the CPU and "later" elsewhere.
What can go wrong: "later" raises at a line after the wrong call; inside a JAX trace nothing can be raised.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from isthmus import _caches, config
from isthmus._ops.value_checks import Error
from isthmus._runtime.compiler import platform
from isthmus._runtime.host_arrays import from_numpy
from isthmus._runtime.private import is_traced

_lock = threading.Lock()
# So many unread codes make the older half be read: they are scalars on the device, and must not pile up.
_LIMIT = 128
# The codes of calls of single ops, and of the last runs of programs that take the code of the run before.
_pending: list[tuple[Conditions, Any]] = []
_numbers: dict[Conditions, Any] = {}


class Conditions:
    """The conditions of one program: what to raise for each of its codes."""

    def __init__(self, errors: Sequence[Error] = ()) -> None:
        self.errors = errors

    def before(self) -> Any:
        """Return the code for the next run."""
        code = _numbers.get(self)
        return _none() if code is None else code

    def settle(self, number: Any, auto: str) -> None:
        """Raise for the code of a run that took the one before; now, later or never, as the config says.

        ``auto`` replaces the config's "auto".
        """
        when = _when(auto)
        if when == "now":
            self.look(number)
        elif when == "later":
            with _lock:
                _numbers[self] = number

    def settle_call(self, number: Any) -> None:
        """Raise for the code of one call: now, later or never, as the config says."""
        when = _when(auto())
        if when == "now":
            self.look(number)
        elif when == "later":
            self.postpone(number)

    def postpone(self, number: Any) -> None:
        """Keep the code of one call for the next host read."""
        with _lock:
            _pending.append((self, number))
            # Of many codes the older half is read, which the device has long computed.
            due = _pending[: _LIMIT // 2] if len(_pending) > _LIMIT else []
            del _pending[: len(due)]
        for _, code in due:
            code.copy_to_host_async()  # together they take little longer than one alone
        for conditions, code in due:
            conditions.look(code)

    def look(self, number: Any) -> None:
        """Raise if a condition failed."""
        # While JAX traces nothing can be raised: a wrong call computes whatever its lowering computes.
        if is_traced([number]):
            return
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


def demand(failed: Any, error: type[Exception], message: str) -> None:
    """Raise if ``failed`` turns out true, now where the host need not wait for it, else at the next host read."""
    conditions = Conditions([(error, message)])
    if auto() == "now":
        conditions.look(failed)
    else:
        conditions.postpone(failed)


def raise_pending() -> None:
    """Raise the first error among conditions that were left for later."""
    if _pending or _numbers:
        with _lock:
            codes = [*_pending, *_numbers.items()]
            forget()
        for conditions, code in codes:
            conditions.look(code)


def forget() -> None:
    """Forget conditions that were left for later."""
    _pending.clear()
    _numbers.clear()
