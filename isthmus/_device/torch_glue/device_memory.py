"""``torch.jax.memory``: how much memory the device has and uses, under the names of ``torch.cuda.memory``.

The numbers are JAX's where its platform counts (GPUs and TPUs); its CPU does not, so there the bytes of live arrays are
added up at each call. The peak is the largest sum seen there: by calls of this module, and, once
``reset_peak_memory_stats`` was called, after each program (what one needs while it runs is not known). XLA has one
allocator per process and keeps what it has reserved, so what ``torch.cuda`` offers for its caching allocator is either
an alias ("reserved" is "allocated"), nothing to do (``empty_cache``), or refused with what to do instead
(``set_per_process_memory_fraction``). JAX is imported by the first call that needs it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from isthmus._upstream import require_jax


def jax_device() -> Any:
    """Return the JAX device behind "jax"."""
    require_jax()
    from isthmus._runtime.compiler import default_device

    return default_device()


class _Counted:
    """The bytes of live arrays and the most that there were, where JAX has no count of its own."""

    def __init__(self) -> None:
        self.peak = 0
        self._bytes = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        # Filled whenever an array goes, on any thread and in the middle of anything, so it is emptied elsewhere.
        self._gone: deque[int] = deque()
        self._lock = threading.Lock()

    def now(self) -> int:
        """Return the bytes of all arrays that are alive."""
        self._note_all()
        with self._lock:
            self._let_go_of_deleted()
            return self._bytes

    def restart(self) -> None:
        """Start the peak anew, and look at it after each program from now on."""
        from isthmus._runtime import watching

        self.peak = 0
        watching.remove(self)
        watching.add(self)

    def __call__(self, mode: str, name: str, call: Callable[[], Any]) -> Any:
        """Run a program for ``watching`` and count what it made."""
        from isthmus._device.core.buffer import buffer_of

        result = call()
        made = [result] if isinstance(result, torch.Tensor) else result
        if mode == "eager" and isinstance(made, (list, tuple)) and made:
            tensors = [x for x in made if isinstance(x, torch.Tensor) and x.device.type == "jax"]
            self._note([buffer_of(x).held for x in tensors])
        else:
            self._note_all()
        return result

    def _note_all(self) -> None:
        import jax

        self._note(jax.live_arrays())

    def _note(self, arrays: list[Any]) -> None:
        import jax

        with self._lock:
            for array in arrays:
                # A deleted array still has a size, and no memory. What is traced or recorded has none yet.
                is_array = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
                if is_array and id(array) not in self._alive and not array.is_deleted():
                    self._alive[id(array)] = weakref.ref(array, self._forgetting(id(array), array.nbytes))
                    self._bytes += array.nbytes
            while self._gone:
                self._bytes -= self._gone.popleft()
            if self._bytes > self.peak:
                self._let_go_of_deleted()
                self.peak = max(self.peak, self._bytes)

    def _let_go_of_deleted(self) -> None:
        """Take off the arrays that were donated to a program, which have no memory while something holds them."""
        # A copy of the dictionary: making a list of its items may collect garbage, and with it arrays that are in it.
        for number, reference in self._alive.copy().items():
            array = reference()
            if array is not None and array.is_deleted() and self._alive.pop(number, None) is not None:
                self._bytes -= array.nbytes

    def _forgetting(self, number: int, size: int) -> Callable[[Any], None]:
        def forget(reference: Any) -> None:
            # Another array may have come to the same address, or it was let go of before.
            if self._alive.get(number) is reference:
                del self._alive[number]
                self._gone.append(size)

        return forget


_counted = _Counted()


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return JAX's memory statistics, under torch's names too; where it has none, what live arrays take."""
    stats = dict(jax_device().memory_stats() or {})
    if not stats:
        stats = {"bytes_in_use": _counted.now(), "peak_bytes_in_use": _counted.peak}
    for kind in ("allocated", "reserved"):
        stats[f"{kind}_bytes.all.current"] = stats["bytes_in_use"]
        stats[f"{kind}_bytes.all.peak"] = stats["peak_bytes_in_use"]
    return stats


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """Return ``memory_stats`` with the dots of its names turned into dictionaries."""
    nested: dict[str, Any] = {}
    for name, value in memory_stats().items():
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def memory_allocated(device: Any = None) -> int:
    """Return the bytes arrays take on the device."""
    return memory_stats()["bytes_in_use"]


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes arrays took; where JAX keeps no count, since ``reset_peak_memory_stats`` was called."""
    return memory_stats()["peak_bytes_in_use"]


memory_reserved = memory_cached = memory_allocated
max_memory_reserved = max_memory_cached = max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start counting the peak anew where the count is ours; JAX's own cannot be reset.

    From then on every program is watched, which costs an eager op some microseconds.
    """
    if not jax_device().memory_stats():
        _counted.restart()


reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Do nothing: XLA keeps no accumulated counts."""


def get_memory_info(device: Any = None) -> tuple[int, int]:
    """Return (free, total) bytes of the device; of this machine where JAX runs on its CPU."""
    stats = jax_device().memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"], stats["bytes_limit"]
    page = os.sysconf("SC_PAGE_SIZE")
    # Pages that could be had now, without what the system caches.
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


mem_get_info = get_memory_info


def device_memory_used(device: Any = None) -> int:
    """Return the bytes of the device that are not free."""
    free, total = get_memory_info()
    return total - free


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Return a table for people: memory in use, peak, free and total, and the largest kinds of arrays."""
    from isthmus._runtime import memory

    free, total = get_memory_info()
    rows = {"in use": memory_allocated(), "peak": max_memory_allocated(), "free": free, "total": total}
    lines = [f"memory of jax:0 ({jax_device().device_kind})"]
    lines += [f"  {name:<8}{value / 2**20:>12,.1f} MiB" for name, value in rows.items()]
    if not abbreviated:
        lines += ["largest arrays", *(f"  {line}" for line in memory.largest_arrays())]
    return "\n".join(lines)


def empty_cache() -> None:
    """Do nothing: memory is XLA's."""


def ipc_collect() -> None:
    """Do nothing: tensors of the device are not shared between processes."""


empty_host_cache = empty_cache


def get_allocator_backend() -> str:
    """Return "xla": the allocator is XLA's."""
    return "xla"


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Raise: XLA takes its share once, from the environment, when JAX starts."""
    raise RuntimeError(
        "the share of memory that XLA takes is fixed when JAX starts; set "
        f"XLA_PYTHON_CLIENT_MEM_FRACTION={fraction} in the environment"
    )
