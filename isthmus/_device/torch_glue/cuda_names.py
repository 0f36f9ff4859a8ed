"""Names of ``torch.cuda`` that scripts call on any accelerator, for a device that needs little of them.

A script written for CUDA reaches for these through ``torch.get_device_module()`` or after ``cuda`` was replaced by
``jax`` in it. Each does what it can mean here: nothing, where XLA does it by itself (CUDA graphs); a range of the
profiler, where JAX has one (``range_push``); or an error that says what is missing, where a number would be made up
(``temperature``). ``torch_jax.py`` takes them over as ``torch.jax.NAME`` and ``torch.jax.nvtx.NAME``.
"""

from __future__ import annotations

import contextlib
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

OutOfMemoryError = torch.OutOfMemoryError
AcceleratorError = getattr(torch, "AcceleratorError", RuntimeError)


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """Return False: torch sees one device, which has no peer."""
    return False


def is_current_stream_capturing() -> bool:
    """Return False: XLA makes CUDA graphs by itself, and nothing is captured op by op."""
    return False


def get_arch_list() -> list[str]:
    """Return no architectures: XLA compiles for the device it runs on."""
    return []


def get_gencode_flags() -> str:
    """Return no flags: XLA compiles for the device it runs on."""
    return ""


def is_tf32_supported() -> bool:
    """Return whether float32 products may run in TF32; ``jax_default_matmul_precision`` says whether they do."""
    from isthmus._device.torch_glue.device_memory import jax_device

    return jax_device().platform in ("gpu", "cuda")


def get_sync_debug_mode() -> int:
    """Return 0: reads that wait for the device are counted by ``isthmus.metrics``, not warned about."""
    return 0


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Accept "default"; raise for the others, which would promise warnings that never come."""
    if debug_mode not in (0, "default"):
        raise NotImplementedError(
            "device 'jax' does not warn about reads that wait; isthmus.metrics.report() lists them"
        )


def make_graphed_callables(callables: Any, sample_args: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return the callables as they are, with a warning: ``isthmus.jit`` makes one program of each."""
    warnings.warn(
        "CUDA graphs are XLA's own affair on device 'jax', so make_graphed_callables changes nothing; "
        "torch.compile(backend='isthmus') or isthmus.jit makes one program of a callable",
        stacklevel=2,
    )
    return callables


def _not_reported(what: str) -> Callable[..., int]:
    def ask(device: Any = None) -> int:
        raise NotImplementedError(f"JAX does not report the {what} of its devices")

    ask.__name__ = what.replace(" ", "_")
    ask.__doc__ = f"Raise: JAX does not report the {what} of its devices."
    return ask


utilization = _not_reported("utilization")
memory_usage = _not_reported("memory usage")
temperature = _not_reported("temperature")
power_draw = _not_reported("power draw")
clock_rate = _not_reported("clock rate")


class _Ranges(threading.local):
    """The ranges a thread has opened for the profiler, the innermost last."""

    def __init__(self) -> None:
        self.open: list[Any] = []


_ranges = _Ranges()


def range_push(msg: str) -> int:
    """Open a range that JAX's profiler shows under this name; return how many were open before."""
    import jax

    annotation = jax.profiler.TraceAnnotation(msg)
    # Entered here and left by ``range_pop``, so not a ``with`` block.
    annotation.__enter__()
    _ranges.open.append(annotation)
    return len(_ranges.open) - 1


def range_pop() -> int:
    """Close the innermost range; return how many are still open, or -1 where none was."""
    if not _ranges.open:
        return -1
    _ranges.open.pop().__exit__(None, None, None)
    return len(_ranges.open)


@contextlib.contextmanager
def range_(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Show the block as a range in JAX's profiler; ``msg`` is formatted with the arguments."""
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()


def mark(msg: str) -> None:
    """Show a moment in JAX's profiler, as a range that ends at once."""
    range_push(msg)
    range_pop()


def namespace(name: str, **members: Any) -> types.ModuleType:
    """Return a module of the given members, for ``torch.jax.NAME``."""
    module = types.ModuleType(
        f"torch.jax.{name}", f"What torch.cuda.{name} is to CUDA, for the device 'jax'."
    )
    vars(module).update(members)
    return module


nvtx = namespace("nvtx", range=range_, range_push=range_push, range_pop=range_pop, mark=mark)
