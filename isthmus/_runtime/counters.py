"""Counters and timers that are always on: compilations, transfers, programs run and why, ops that fell to the CPU.

``isthmus.metrics`` is the public view of them. A count is one dict update under a lock; nothing here is on the path of
an eager op that has its plan.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping

_lock = threading.Lock()
counts: Counter[str] = Counter()
seconds: defaultdict[str, float] = defaultdict(float)
fallbacks: Counter[str] = Counter()
reasons: dict[str, str] = {}
# By the cause (".item()", "the limit on graph size") and the line of the user's code, "file.py:12".
materialisations: Counter[tuple[str, str]] = Counter()


def count(name: str, by: int = 1) -> None:
    """Add ``by`` to the counter ``name``."""
    with _lock:
        counts[name] += by


def count_fallback(op: str, reason: str) -> bool:
    """Count a fallback of ``op`` to the CPU; return whether it is the first."""
    with _lock:
        fallbacks[op] += 1
        reasons[op] = reason
        return fallbacks[op] == 1


def count_compilation(laps: Mapping[str, float]) -> None:
    """Count a compilation and the seconds each of its stages took."""
    with _lock:
        counts["compilations"] += 1
        for stage, took in laps.items():
            # Summed over all programs; ``isthmus.metrics`` shows them by stage.
            seconds[stage] += took


def count_materialisation(cause: str, line: str, known: bool) -> None:
    """Count a run of a recorded graph, by a program that was ``known`` or had to be compiled."""
    with _lock:
        counts["programs run"] += 1
        counts["program cache hits" if known else "program cache misses"] += 1
        materialisations[cause, line] += 1


def transfers() -> int:
    """Return how many tensors have crossed between host and device: another number means that a program went on."""
    return counts["transfers to device"] + counts["transfers to host"]


def clear() -> None:
    """Set every count to zero."""
    with _lock:
        for table in (counts, seconds, fallbacks, reasons, materialisations):
            table.clear()
