"""Out of memory: sizes that no device holds are refused before XLA sees them, and a full device is an error of torch's.

XLA ends the process where the bytes of an array overflow an int64, so sizes are checked first:
``torch.empty(2**62, 2, device="jax")`` is refused in torch's words, ``torch.empty(2**53, device="jax")`` with a
``torch.OutOfMemoryError``. A program is checked once, when it is compiled (``compiler.build``); the results of a lazy
op when it is first recorded (``_lazy/node_builder.py``), so that one op does not cost the rest of the trace.

Sizes that the device could hold may still not fit beside the arrays it has. XLA reports that when a program runs
(RESOURCE_EXHAUSTED). The code that runs programs (``_device/core/donation.py``, ``entry.py``) then calls ``make_room``,
which empties the caches registered in ``on_pressure``, and runs the program once more; if that fails as well,
``exhausted`` makes the error: torch's own type, with the largest arrays on the device. On the CPU large programs that
donate ask for free memory first (``sparing_inputs``), since there XLA would delete their inputs before it fails.
"""

from __future__ import annotations

import functools
import gc
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import torch
from jax.extend.core import Jaxpr, jaxprs_in_params

# XLA counts the bytes of an array in an int64, and ends the process where they overflow. An eighth of 2**63: a float8
# array may be computed in float64.
_OVERFLOW = 2**60
LARGEST = 2**63 - 1
# A program that writes 128 MiB takes ten milliseconds; to ask how much memory is free takes 0.05.
_LARGE = 2**27
# How many kinds (dtype and shape) of arrays the error lists.
_NAMED = 5

on_pressure: list[Callable[[], Any]] = []
"""Functions that empty a cache; called where a program finds no memory."""


@functools.cache
def total() -> int:
    """Return how many bytes the device has; on a CPU, the machine's memory and its swap space."""
    from isthmus._runtime.compiler import default_device

    stats = default_device().memory_stats() or {}
    return int(stats["bytes_limit"]) if "bytes_limit" in stats else _machine()


def _machine() -> int:
    try:
        # macOS and Windows have no such file; the next answer is coarser.
        return _meminfo("MemTotal", "SwapTotal")
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return _OVERFLOW  # unknown, so only what overflows is refused


def _meminfo(*names: str) -> int:
    with open("/proc/meminfo") as file:
        kilobytes = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in file)}
    return sum([kilobytes[name] for name in names]) * 1024


def free() -> int:
    """Return how many bytes this process may still get from a CPU's memory; where that is unknown, more than any."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        # An address-space limit (``ulimit -v``) counts what is mapped, not what is used.
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        left = _OVERFLOW if limit == resource.RLIM_INFINITY else limit - mapped
        return min(left, _meminfo("MemAvailable", "SwapFree"))
    except (ImportError, OSError, KeyError, ValueError, IndexError):
        return _OVERFLOW


def sparing_inputs(call: Callable[..., Any], compiled: jax.stages.Compiled) -> Callable[..., Any]:
    """Return ``call``, made to fail before it takes over its inputs where there is no memory to run in.

    On the CPU XLA deletes what was donated and allocates afterwards: a program that finds no memory loses its inputs.
    Small programs are left as they are, since to ask the system takes as long as they do.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return call
    # Results that take over an input need no memory.
    # Temporaries and outputs, but for those that lie in donated inputs.
    needed = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    if needed < _LARGE:
        return call

    def run(*inputs: Any) -> Any:
        if needed > free():
            raise jax.errors.JaxRuntimeError(
                f"RESOURCE_EXHAUSTED: a program needs {needed} bytes, and {free()} are free"
            )
        return call(*inputs)

    return run


def nbytes(shape: Iterable[int], dtype: Any) -> int:
    """Return the bytes of an array, as a Python integer, which does not overflow."""
    return math.prod(shape) * int(getattr(dtype, "itemsize", 1))


def require(size: int) -> None:
    """Raise torch.OutOfMemoryError unless the device could hold so many bytes."""
    if size > total():
        raise torch.OutOfMemoryError(
            f"device 'jax' is out of memory: tried to allocate {size} bytes, but it has {total()} in all"
        )


def require_room(kinds: Iterable[tuple[tuple[int, ...], Any]]) -> None:
    """Raise unless the device could hold arrays of these shapes and dtypes at once."""
    needed = 0
    for shape, dtype in kinds:
        require_countable(shape, dtype)
        needed += nbytes(shape, dtype)
    require(needed)


def require_countable(shape: Iterable[int], dtype: Any) -> None:
    """Raise if an array's size overflows inside XLA, which multiplies the other sizes of an empty array too."""
    if nbytes([n or 1 for n in shape], dtype) > _OVERFLOW:
        raise torch.OutOfMemoryError(f"XLA cannot count the bytes of an array of sizes {list(shape)}")


def check(jaxpr: Jaxpr) -> None:
    """Raise if a program returns more than the device holds, or has an array whose size XLA cannot count."""
    # By identity: one variable may be returned twice and is stored once.
    require(sum(_size(variable) for variable in {id(v): v for v in jaxpr.outvars}.values()))
    _check_within(jaxpr)


def _check_within(jaxpr: Jaxpr) -> None:
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            require_countable(getattr(variable.aval, "shape", ()), getattr(variable.aval, "dtype", None))
        for inner in jaxprs_in_params(equation.params):
            _check_within(inner)


def _size(variable: Any) -> int:
    aval = variable.aval
    return nbytes(getattr(aval, "shape", ()), getattr(aval, "dtype", None))


def is_exhausted(error: BaseException) -> bool:
    """Return whether XLA found no memory, to run a program or to try out ways to compile it (GPU autotuning)."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def make_room(error: BaseException, inputs: Sequence[object]) -> None:
    """Empty caches, so that the program may be run once more; raise ``error`` if donated inputs are gone."""
    # Then there is nothing to run again with.
    if any([isinstance(value, jax.Array) and value.is_deleted() for value in inputs]):
        raise error
    for drop in on_pressure:
        drop()
    gc.collect()  # unreachable tensors in reference cycles still hold arrays


def exhausted(error: BaseException) -> torch.OutOfMemoryError:
    """Return torch's error for XLA's, with what the device holds."""
    from isthmus._runtime.compiler import default_device

    arrays, lines = _live(), largest_arrays()
    reason = str(error).split("\n")[0]
    used = (default_device().memory_stats() or {}).get("bytes_in_use", sum(a.nbytes for a in arrays))
    return torch.OutOfMemoryError(
        f"device 'jax' is out of memory: {reason}\n"
        f"  in use       {used} of {total()} bytes; {len(arrays)} arrays, the largest:\n"
        + "".join(f"               {line}\n" for line in lines)
        + "  to go on     a smaller batch, torch.utils.checkpoint, or del what is not needed"
    )


def _live() -> list[jax.Array]:
    return [array for array in jax.live_arrays() if not array.is_deleted()]


def largest_arrays() -> list[str]:
    """Return a line for each of the kinds (dtype and shape) of arrays that take the most bytes together."""
    kinds = Counter((str(array.dtype), tuple(array.shape)) for array in _live())
    sizes = {kind: count * nbytes(kind[1], jax.numpy.dtype(kind[0])) for kind, count in kinds.items()}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_NAMED]
    return [f"{kinds[k]} x {k[0]}{list(k[1])}: {sizes[k]} bytes" for k in largest]
