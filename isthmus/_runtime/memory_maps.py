"""How many memory maps the process has left.

Linux gives a process 65,530 memory maps by default. An executable of XLA's takes from two to hundreds, and when none is
left XLA's compiler ends the process. Caches of executables (``_device/core/plan_cache.py``) drop entries in time.
"""

from __future__ import annotations

import functools
from pathlib import Path

_MAPS, _LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def crowded() -> bool:
    """Return whether the process has taken more than a third of its memory maps."""
    # A third: one compilation may take hundreds, and other libraries map files too.
    return count() * 3 > limit()


def count() -> int:
    """Return how many memory maps the process has; 0 where the system does not list them."""
    return _MAPS.read_bytes().count(b"\n") if _MAPS.exists() else 0


@functools.cache
def limit() -> int:
    """Return how many memory maps a process may have."""
    return int(_LIMIT.read_text()) if _LIMIT.exists() else 65_530
