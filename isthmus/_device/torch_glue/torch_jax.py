"""``torch.jax``: what torch and its users ask of a device's module, under the names that ``torch.cuda`` has.

torch itself calls some of these by name (``_lazy_init``, ``current_device``, ``get_amp_supported_dtype``),
libraries look for others (``memory_allocated``, ``Stream``), so a name stays also where there is nothing to do.
``registration.py`` makes the module known to torch before JAX is loaded: functions import JAX when they are called,
and only where the device has been used. What is large has files of its own: memory (``device_memory.py``), streams
(``streams.py``), names of CUDA that mean nothing here (``cuda_names.py``).

What can go wrong: a function that starts JAX makes the process one that must not fork, so questions that can be
answered without it are (``device_count``, ``_has_autograd_thread``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from isthmus import config
from isthmus._device.core import generator
from isthmus._device.torch_glue import device_memory as memory  # noqa: F401
from isthmus._device.torch_glue.cuda_names import (  # noqa: F401
    AcceleratorError,
    OutOfMemoryError,
    can_device_access_peer,
    clock_rate,
    get_arch_list,
    get_gencode_flags,
    get_sync_debug_mode,
    is_current_stream_capturing,
    is_tf32_supported,
    make_graphed_callables,
    memory_usage,
    namespace,
    nvtx,
    power_draw,
    set_sync_debug_mode,
    temperature,
    utilization,
)  # fmt: skip
from isthmus._device.torch_glue.device_memory import (  # noqa: F401
    device_memory_used,
    empty_cache,
    empty_host_cache,
    get_allocator_backend,
    get_memory_info,
    ipc_collect,
    jax_device,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)  # fmt: skip
from isthmus._device.torch_glue.streams import (  # noqa: F401  # torch.jax has them
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)

default_generators: tuple[torch.Generator, ...] = ()
"""The device's generator as an object; ``generators.install`` makes it."""

_initialized = True  # torch.utils.checkpoint keeps the generator's state only for a device that says so


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
    if index != 0 and index != config.launch().local_rank:  # the environment is read only where it matters
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


def get_device_name(device: Any = None) -> str:
    """Return JAX's name for the device."""
    return str(jax_device().device_kind)


def get_device_capability(device: Any = None) -> dict[str, Any]:
    """Return platform and kind of the device, as JAX names them."""
    behind = jax_device()
    return {"platform": behind.platform, "kind": behind.device_kind}


def get_device_properties(device: Any = None) -> Any:
    """Return name, platform and total memory of the device."""
    import types

    behind = jax_device()
    return types.SimpleNamespace(
        name=str(behind.device_kind),
        platform=behind.platform,
        total_memory=get_memory_info()[1],
    )


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


@contextlib.contextmanager
def device_of(obj: Any) -> Iterator[None]:
    """Make the device of a tensor current inside the block; a tensor of another kind of device changes nothing."""
    yield


seed_all = seed
amp = namespace(
    "amp",
    autocast=functools.partial(torch.autocast, "jax"),
    GradScaler=functools.partial(torch.amp.GradScaler, "jax"),
    custom_fwd=functools.partial(torch.amp.custom_fwd, device_type="jax"),
    custom_bwd=functools.partial(torch.amp.custom_bwd, device_type="jax"),
)
random = namespace(
    "random",
    manual_seed=manual_seed, manual_seed_all=manual_seed_all, seed=seed, seed_all=seed_all, initial_seed=initial_seed,
    get_rng_state=get_rng_state, set_rng_state=set_rng_state,
    get_rng_state_all=get_rng_state_all, set_rng_state_all=set_rng_state_all,
)  # fmt: skip


def _version() -> str:
    """Return the version of JAX that is installed."""
    import importlib.metadata

    return importlib.metadata.version("jax")


def _platform() -> str:
    """Return the platform that JAX runs on here: cpu, gpu or tpu."""
    return str(jax_device().platform)


backends = namespace(
    "jax", is_built=is_compiled, is_available=is_available, version=_version, platform=_platform
)
"""``torch.backends.jax``, as torch has such a module for each of its own backends."""
backends.__name__ = "torch.backends.jax"
