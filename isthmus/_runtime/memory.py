"""Sizes no device has memory for, refused before XLA sees them: it ends the process where a size overflows.

``torch.empty(2**62, 2, device="jax")`` is refused in torch's words, ``torch.empty(2**53, device="jax")`` with a
``torch.OutOfMemoryError``. A program is looked at once, when it is compiled, and the results of a call when it is first
recorded, so that a trace is not lost by one of its ops.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable
from typing import Any

import torch
from jax.extend.core import jaxprs_in_params

# XLA counts the bytes of an array in an int64, and ends the process where they overflow; an eighth of that is left
# for the wider types in which it computes.
_OVERFLOW = 2**60
LARGEST = 2**63 - 1


@functools.cache
def total() -> int:
    """Return how many bytes the device has; on a CPU, the machine's memory and what it may swap."""
    from isthmus._runtime.compiler import default_device

    stats = default_device().memory_stats() or {}
    return int(stats["bytes_limit"]) if "bytes_limit" in stats else _machine()


def _machine() -> int:
    try:
        with open("/proc/meminfo") as file:
            kilobytes = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in file)}
        return (kilobytes["MemTotal"] + kilobytes["SwapTotal"]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return _OVERFLOW  # nobody knows, so only what overflows is refused


def nbytes(shape: Iterable[int], dtype: Any) -> int:
    """Return the bytes of an array, as a Python integer, which does not overflow."""
    return math.prod(shape) * int(getattr(dtype, "itemsize", 1))


def require(size: int) -> None:
    """Raise unless the device could hold so many bytes."""
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
    """Raise if an array's size overflows inside XLA, which multiplies the other sizes of an empty array, too."""
    if nbytes([n or 1 for n in shape], dtype) > _OVERFLOW:
        raise torch.OutOfMemoryError(f"XLA cannot count the bytes of an array of sizes {list(shape)}")


def check(jaxpr: Any) -> None:
    """Raise if a program returns more than the device holds, or has an array whose size XLA cannot count."""
    require(sum(_size(variable) for variable in {id(v): v for v in jaxpr.outvars}.values()))
    _check_within(jaxpr)


def _check_within(jaxpr: Any) -> None:
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            require_countable(getattr(variable.aval, "shape", ()), getattr(variable.aval, "dtype", None))
        for inner in jaxprs_in_params(equation.params):
            _check_within(inner)


def _size(variable: Any) -> int:
    aval = variable.aval
    return nbytes(getattr(aval, "shape", ()), getattr(aval, "dtype", None))
