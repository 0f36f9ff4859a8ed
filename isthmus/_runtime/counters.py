"""Counters that are always on: compilations, executions are XLA's, fallbacks are per op."""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()
counts: Counter[str] = Counter()
fallbacks: Counter[str] = Counter()
reasons: dict[str, str] = {}


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


def clear() -> None:
    """Forget every count."""
    with _lock:
        counts.clear()
        fallbacks.clear()
        reasons.clear()
