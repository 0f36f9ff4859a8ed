"""Counters and timers that are always on: of compilations, transfers, programs, and what made them run."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping

_lock = threading.Lock()
counts: Counter[str] = Counter()
seconds: defaultdict[str, float] = defaultdict(float)
fallbacks: Counter[str] = Counter()
reasons: dict[str, str] = {}
# By what asked for a value, and the line of the user's code that did.
materialisations: Counter[tuple[str, str]] = Counter()


def count(name: str, by: int = 1) -> None:
    """Add ``by`` to the counter ``name``."""
    with _lock:
        counts[name] += by


def count_fallback(op: str, reason: str) -> bool:
    """Count a fall of ``op`` to the CPU and return whether it is the first."""
    with _lock:
        fallbacks[op] += 1
        reasons[op] = reason
        return fallbacks[op] == 1


def count_compilation(laps: Mapping[str, float]) -> None:
    """Count a compilation and the seconds each of its stages took."""
    with _lock:
        counts["compilations"] += 1
        for stage, took in laps.items():
            seconds[stage] += took


def count_materialisation(cause: str, line: str, known: bool) -> None:
    """Count a run of what lazy mode recorded, by a program that was ``known`` or had to be compiled."""
    with _lock:
        counts["programs run"] += 1
        counts["program cache hits" if known else "program cache misses"] += 1
        materialisations[cause, line] += 1


def clear() -> None:
    """Forget every count."""
    with _lock:
        for kept in (counts, seconds, fallbacks, reasons, materialisations):
            kept.clear()
