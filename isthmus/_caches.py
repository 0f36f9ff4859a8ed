"""Every cache in the process: one bounded class, and one registry that lists and clears them all.

A cache maps a key to something that can be made again: a plan, a program, an answer of the CPU. Each has a name and a
bound, so that shapes that never come back cannot pile up. ``isthmus.clear_caches()`` empties all of them; memory that
executables hold on the device is then free, and the next call of each op compiles again.

There are two ways to be listed here:

- ``LruCache(name, limit)``: a dict that drops the entry that has not been read or written for longest::

      _answers: LruCache[Key, Answer] = LruCache("answers of the CPU", 4096)

- ``register(name, limit, size, clear)``: for a cache whose lookup is on the path of every op and must stay a plain
  dict (``_device/core/plan_cache.py``), or that another library owns.

A cache that belongs to an object (a compiled function's programs) is an ``LruCache`` too: the registry holds caches by
weak reference, so such a cache leaves the list together with its owner.

A fact that is found out once (``functools.cache`` on a function of nothing, of an op or of a dtype) is not listed:
there is one for each op at most, and it holds no memory of the device.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Row:
    """One line of the list of caches: how many entries caches of this name hold, and how many one of them may."""

    name: str
    entries: int
    limit: int | None


@dataclass(frozen=True)
class _Registered:
    name: str
    limit: int | None
    size: Callable[[], int]
    clear: Callable[[], object]


class LruCache(Generic[K, V]):
    """A mapping of at most ``limit`` entries; a new one beyond that drops the least recently used.

    Every method may be called from any thread.

    Arguments:
        name: what the list of caches calls it; several caches may have one name.
        limit: how many entries there may be, or a function that says so, for a limit that is a setting.
        dropped: called with each value that leaves by the limit or by ``clear``, after it has left.
        kept: whether ``clear_caches`` passes over it, since what it holds cannot be made again.

    >>> squares = LruCache("squares", limit=2)
    >>> for n in (2, 3, 4):
    ...     squares[n] = n * n
    >>> squares.get(2), squares.get(4)
    (None, 16)
    """

    def __init__(
        self,
        name: str,
        limit: int | Callable[[], int],
        dropped: Callable[[V], object] | None = None,
        kept: bool = False,
    ) -> None:
        self.name, self._limit, self._dropped, self.kept = name, limit, dropped, kept
        self._entries: OrderedDict[K, V] = OrderedDict()
        # Reading moves an entry, which must not happen while another thread drops one.
        self._lock = threading.Lock()
        _caches.add(self)

    @property
    def limit(self) -> int:
        """How many entries there may be now."""
        return self._limit() if callable(self._limit) else self._limit

    def get(self, key: K) -> V | None:
        """Return the value of a key, now the most recently used; None where there is none."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def __setitem__(self, key: K, value: V) -> None:
        gone = []
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self.limit:
                gone.append(self._entries.popitem(last=False)[1])
        self._drop(gone)

    def pop(self, key: K) -> V | None:
        """Remove a key and return its value; None where there is none."""
        with self._lock:
            return self._entries.pop(key, None)

    def clear(self) -> None:
        """Remove every entry."""
        with self._lock:
            gone = list(self._entries.values())
            self._entries.clear()
        self._drop(gone)

    def _drop(self, gone: list[V]) -> None:
        # Without the lock: ``dropped`` may wait for a lock whose holder reads this cache.
        if self._dropped is not None:
            for value in gone:
                self._dropped(value)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> list[V]:
        """Return the values, least recently used first."""
        with self._lock:
            return list(self._entries.values())

    def items(self) -> list[tuple[K, V]]:
        """Return keys and values, least recently used first."""
        with self._lock:
            return list(self._entries.items())


_caches: weakref.WeakSet[LruCache[Any, Any]] = weakref.WeakSet()
_registered: dict[str, _Registered] = {}


def register(name: str, limit: int | None, size: Callable[[], int], clear: Callable[[], object]) -> None:
    """List a cache that is no ``LruCache``: how many entries it has, and what empties it."""
    _registered[name] = _Registered(name, limit, size, clear)


def rows() -> list[Row]:
    """Return every cache with its entries and bound; those that share a name are one row."""
    sizes: dict[str, tuple[int, int | None]] = {}
    for name, size, limit in _sizes():
        sizes[name] = (sizes.get(name, (0, limit))[0] + size, limit)
    return [Row(name, size, limit) for name, (size, limit) in sorted(sizes.items())]


def _sizes() -> Iterator[tuple[str, int, int | None]]:
    for cache in list(_caches):
        yield cache.name, len(cache), cache.limit
    for each in list(_registered.values()):
        yield each.name, each.size(), each.limit


def clear_caches() -> None:
    """Empty every cache of the process: compiled programs, plans of eager ops, traced JAX functions and the rest.

    Use it to free the memory that executables hold, or to measure a cold start. Tensors keep their values, and compiled
    functions stay valid: the next call of each compiles again, and so does the next call of each eager op. The
    folder of ``isthmus.config.cache`` is left alone. May be called from any thread.

    Example:
        >>> import torch, isthmus
        >>> y = torch.ones(3, device="jax") + 1
        >>> isthmus.clear_caches()
        >>> (y + 1).tolist()                     # compiled again
        [3.0, 3.0, 3.0]
    """
    for cache in list(_caches):
        if not cache.kept:
            cache.clear()
    for each in list(_registered.values()):
        each.clear()
