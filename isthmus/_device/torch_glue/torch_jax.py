"""``torch.jax``: what torch and its users ask of a device's module. Imports JAX only when asked about it."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from isthmus import config
from isthmus._device.core import generator
from isthmus._device.torch_glue.streams import (  # noqa: F401  # torch.jax has them
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)
from isthmus._upstream import require_jax

_initialized = True  # torch.utils.checkpoint keeps the generator's state only for a device that says so
_peak: dict[str, int] = {"bytes": 0}


def is_available() -> bool:
    """Return whether JAX is installed."""
    return importlib.util.find_spec("jax") is not None


def is_initialized() -> bool:
    """Return whether the device can be used; it initialises itself."""
    return True


def init() -> None:
    """Do nothing: the first tensor initialises the device."""


def _lazy_init() -> None:
    """Do nothing: the first tensor initialises the device."""


def _is_in_bad_fork() -> bool:
    import sys

    forks = sys.modules.get("isthmus._runtime.forks")  # not there before the device is used
    return forks is not None and bool(forks.forked)


def device_count() -> int:
    """Return 1: "jax" is one torch device, whatever JAX spreads it over."""
    return 1


def current_device() -> int:
    """Return 0, the index of the only device."""
    return 0


def set_device(device: Any) -> None:
    """Accept the only device there is."""
    check_device(device)


def check_device(device: Any) -> None:
    """Raise unless ``device`` is the only device there is.

    A process that ``torchrun`` started has one device too, and scripts call it by their rank on the host, as on CUDA.
    """
    index = _index(device)
    if index not in (0, config.launch().local_rank):
        raise RuntimeError(f"invalid device ordinal: jax:{index}; torch sees one device, jax:0")


def _index(device: Any) -> int:
    if device is None:
        return 0
    return device if isinstance(device, int) else torch.device(device).index or 0


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """Make ``device`` current inside the block."""
    set_device(device)
    yield


def synchronize(device: Any = None) -> None:
    """Wait until every computation on the device is done, and raise what waited to be raised."""
    if "jax" not in sys.modules:
        return  # nothing has begun
    import jax

    from isthmus._device.checks import value_checks
    from isthmus._device.core import mode
    from isthmus._runtime import compiler

    mode.current.materialise()
    jax.effects_barrier()
    compiler.wait()
    _wait_for_autograd()
    # What other threads began is known by its results.
    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])
    value_checks.raise_pending()


class _Waiting(torch.autograd.Function):
    """Waits, in its backward, for what the thread that runs it began."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor to go back from."""
        return x.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Wait on this thread: the CPU runs what one thread began in order, and no other's."""
        from isthmus._runtime import compiler

        compiler.wait()


def _wait_for_autograd() -> None:
    """Wait for programs that autograd's thread began, also those whose results are gone, by running one more there."""
    if not _has_autograd_thread():
        return
    with torch.inference_mode(False), torch.enable_grad():
        _Waiting.apply(torch.zeros((), device="jax", requires_grad=True)).backward()  # type: ignore[no-untyped-call]


def _has_autograd_thread() -> bool:
    """Return whether a backward has run; if not its thread is not started here, since no process may fork after."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return True
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # it may have ended
            if (task / "comm").read_text().startswith("pt_autograd"):
                return True
    return False


def manual_seed(seed: int) -> None:
    """Seed the device's generator."""
    generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the device's generator; there is one."""
    generator.manual_seed(seed)


def seed() -> None:
    """Seed the device's generator from the operating system."""
    import secrets

    generator.manual_seed(secrets.randbits(64))


def initial_seed() -> int:
    """Return the seed the generator was last given."""
    return generator.default.seed


def get_rng_state(device: Any = "jax") -> torch.Tensor:
    """Return the generator's state as a CPU byte tensor."""
    return generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "jax") -> None:
    """Set the generator's state to one that ``get_rng_state`` returned."""
    generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices: one."""
    return [generator.get_state()]


def set_rng_state_all(new_states: Any) -> None:
    """Set the states of all devices: one."""
    generator.set_state(next(iter(new_states)))


def _jax_device() -> Any:
    require_jax()
    from isthmus._runtime.compiler import default_device

    return default_device()


def get_device_name(device: Any = None) -> str:
    """Return JAX's name for the device."""
    return str(_jax_device().device_kind)


def get_device_capability(device: Any = None) -> dict[str, Any]:
    """Return platform and kind of the device, as JAX names them."""
    jax_device = _jax_device()
    return {"platform": jax_device.platform, "kind": jax_device.device_kind}


def get_device_properties(device: Any = None) -> Any:
    """Return name, platform and total memory of the device."""
    import types

    jax_device = _jax_device()
    stats = jax_device.memory_stats() or {}
    return types.SimpleNamespace(
        name=str(jax_device.device_kind),
        platform=jax_device.platform,
        total_memory=stats.get("bytes_limit", 0),
    )


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return JAX's memory statistics, under torch's names too; where it has none, what live arrays take."""
    stats = dict(_jax_device().memory_stats() or {})
    if not stats:
        import jax

        used = sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())
        _peak["bytes"] = max(_peak["bytes"], used)
        stats = {"bytes_in_use": used, "peak_bytes_in_use": _peak["bytes"]}
    for kind in ("allocated", "reserved"):
        stats[f"{kind}_bytes.all.current"] = stats["bytes_in_use"]
        stats[f"{kind}_bytes.all.peak"] = stats["peak_bytes_in_use"]
    return stats


def memory_allocated(device: Any = None) -> int:
    """Return the bytes arrays take on the device."""
    return memory_stats()["bytes_in_use"]


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes arrays took; where JAX keeps no count, the most seen at a call of this module."""
    return memory_stats()["peak_bytes_in_use"]


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start counting the peak anew where the count is ours; JAX's own cannot be reset."""
    _peak["bytes"] = 0


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Do nothing: XLA keeps no accumulated counts."""


def get_memory_info(device: Any = None) -> tuple[int, int]:
    """Return (free, total) bytes of the device; of this machine where JAX runs on its CPU."""
    stats = _jax_device().memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"], stats["bytes_limit"]
    import os

    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


mem_get_info = get_memory_info


def empty_cache() -> None:
    """Do nothing: memory is XLA's."""


empty_host_cache = empty_cache


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes autocast may use."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True: XLA has bfloat16 everywhere."""
    return True


def is_autocast_enabled() -> bool:
    """Return whether autocast is on for the device."""
    return torch.is_autocast_enabled("jax")


def get_autocast_dtype() -> torch.dtype:
    """Return the dtype autocast casts to on the device."""
    return torch.get_autocast_dtype("jax")


def is_compiled() -> bool:
    """Return True: there is nothing to compile."""
    return True


def utilization(device: Any = None) -> int:
    """Raise: XLA does not report it."""
    raise NotImplementedError("JAX does not report the utilization of its devices")
