"""The cache of compiled programs of single ops, in two generations: what is used stays, what never comes back goes.

A lookup is a plain ``dict.get`` in ``young``, since every op makes one; an LRU order would cost a write per lookup.
When the young of all ops together exceed the limit, they all become old and the old ones are dropped. A key that is
asked for again moves from old to young (``find``), so programs in use survive, and one-off shapes are gone after two
rounds.

Executables hold memory maps, of which a Linux process has 65,530 by default, so the maps are counted every now and then
and too many of them end a round early.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from isthmus import _caches
from isthmus._runtime import forks, memory_maps

# How many entries may be young, and after how many new ones the process's memory maps are counted.
_LIMIT, _ROUND = 2048, 64
# New entries since the last round, over all ops.
_count = 0


class Generations:
    """The programs of one op by key; how many may be young is counted over all ops together."""

    def __init__(self) -> None:
        self.young: dict[Any, Any] = {}
        self.old: dict[Any, Any] = {}
        every.add(self)

    def find(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the entry of a key that is not young: an old one, which is young again, or a new one from ``make``."""
        entry = self.old.pop(key, None)
        if entry is None:
            entry = make()
        # Before the entry is stored, so that a round cannot drop what was asked for just now.
        _make_room()
        self.young[key] = entry
        return entry

    def clear(self) -> None:
        """Forget everything."""
        self.young.clear()
        self.old.clear()


every: weakref.WeakSet[Generations] = weakref.WeakSet()


def _hide() -> None:
    for each in list(every):
        forks.empty(each.young)
        forks.empty(each.old)


def _size() -> int:
    return sum(len(each.young) + len(each.old) for each in list(every))


def _clear() -> None:
    for each in list(every):
        each.clear()


# Compiled code is of no use in a forked child, whose JAX has lost its threads.
forks.on_fork.append(_hide)
_caches.register("plans of single ops", 2 * _LIMIT, _size, _clear)


def _make_room() -> None:
    """Count one more entry; of too many, or too many memory maps, the young become old and the old are dropped."""
    global _count
    _count += 1
    # Counting maps reads a file of /proc, so it is done once in ``_ROUND`` new entries.
    if _count <= _LIMIT and not (_count % _ROUND == 0 and memory_maps.crowded()):
        return
    for each in list(every):
        # A new dict for the old, but the young one emptied in place: entries hold on to it by name.
        each.old = dict(each.young)
        each.young.clear()
    _count = 1
