"""``torch.jax.memory``: how much memory the device has and uses, under the names of ``torch.cuda.memory``.

The numbers are JAX's where its platform counts (GPUs and TPUs); its CPU does not, so there the bytes of live arrays are
added up at each call, and the peak is the largest sum that a call has seen. XLA has one allocator per process and keeps
what it has reserved, so what ``torch.cuda`` offers for its caching allocator is either an alias ("reserved" is
"allocated"), nothing to do (``empty_cache``), or refused with what to do instead (``set_per_process_memory_fraction``).
JAX is imported by the first call that needs it.
"""

from __future__ import annotations

import os
from typing import Any

from isthmus._upstream import require_jax

_peak: dict[str, int] = {"bytes": 0}


def jax_device() -> Any:
    """Return the JAX device behind "jax"."""
    require_jax()
    from isthmus._runtime.compiler import default_device

    return default_device()


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return JAX's memory statistics, under torch's names too; where it has none, what live arrays take."""
    stats = dict(jax_device().memory_stats() or {})
    if not stats:
        import jax

        used = sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())
        _peak["bytes"] = max(_peak["bytes"], used)
        stats = {"bytes_in_use": used, "peak_bytes_in_use": _peak["bytes"]}
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
    """Return the most bytes arrays took; where JAX keeps no count, the most seen at a call of this module."""
    return memory_stats()["peak_bytes_in_use"]


memory_reserved = memory_cached = memory_allocated
max_memory_reserved = max_memory_cached = max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start counting the peak anew where the count is ours; JAX's own cannot be reset."""
    _peak["bytes"] = 0


reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Do nothing: XLA keeps no accumulated counts."""


def get_memory_info(device: Any = None) -> tuple[int, int]:
    """Return (free, total) bytes of the device; of this machine where JAX runs on its CPU."""
    stats = jax_device().memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"], stats["bytes_limit"]
    page = os.sysconf("SC_PAGE_SIZE")
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
