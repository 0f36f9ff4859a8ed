"""Whether the CPU refuses a call, and in which words: the one way in for code that needs its answer.

torch's checks are spread over thousands of lines of C++ kernels, so they are not written again here: where a call looks
wrong, or is of a kind not met before, the CPU's own kernel is run and its exception raised. Who asks, and with what:

======================================  ==================================  ==========================================
when                                    who                                 what the CPU is shown
======================================  ==================================  ==========================================
a key is new                            ``core/plan.py``, ``kernels/        ``check``: small tensors of the same dtypes
                                        sized.py``, ``factorizations.py``   and layouts; returns warnings as well
a Meta kernel or a lowering failed      ``plan.py``, ``sized.py``           ``raise_cpu_error``: the real values
a Python test of the arguments failed   ``random_factories.py``,            ``raise_cpu_error``: the real values
                                        ``mixed_lists.py``,
                                        ``checked_composites.py``
a number may not fit its dtype          ``scalar_checks.py``                stand-ins, once per op, dtypes and number
a write may overlap what it reads       ``overlap_checks.py``               stand-ins in the same memory layout, once
                                                                            per op and layouts
nothing lowers an op                    ``core/fallback.py``                ``on_cpu``: the real values, for the result
======================================  ==================================  ==========================================

``cpu_refusals.py`` holds the mechanism: what stands in for a tensor, and which exceptions say something about the call
rather than about the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from isthmus._caches import LruCache
from isthmus._device.checks.cpu_refusals import (
    OVERLAP,
    ask,
    attempt,
    check,
    on_cpu,
    resized_as,
    stand_ins,
    tensors_of,
    warning,
)
from isthmus._graph.private import OpOverload

__all__ = [
    "AcceptedCalls",
    "check",
    "on_cpu",
    "raise_cpu_error",
    "raise_number_refusal",
    "raise_overlap_refusal",
    "resized_as",
    "tensors_of",
    "warning",
]
Values = tuple[Any, ...]


def raise_cpu_error(op: OpOverload, values: Values) -> None:
    """Run a call on CPU copies of its tensors and raise what it raises; return if it runs or the CPU lacks the op."""
    attempt(op, values)


def raise_number_refusal(op: OpOverload, values: Values) -> None:
    """Raise what the CPU raises for these numbers, shown zeros in place of the tensors."""
    attempt(op, stand_ins(values))


def raise_overlap_refusal(op: OpOverload, values: Values) -> None:
    """Raise the CPU's refusal of overlapping memory, shown tensors that lie in memory as these do."""
    _, error = ask(op, stand_ins(values))
    # Zeros may be refused for other reasons, which are not the layout's.
    if error is not None and OVERLAP in str(error):
        raise error.with_traceback(None) from None


class AcceptedCalls:
    """Keys of calls that the CPU accepted, so that it is asked about each of them once."""

    def __init__(self, name: str, limit: int) -> None:
        self._keys: LruCache[Hashable, bool] = LruCache(name, limit)

    def ask(self, key: Hashable, question: Callable[[], None]) -> None:
        """Call ``question``, which raises for a refusal, unless it was answered for this key before."""
        if self._keys.get(key) is None:
            question()
            self._keys[key] = True
