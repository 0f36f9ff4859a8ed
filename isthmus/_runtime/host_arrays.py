"""Transfers between host and device: Python numbers, cached on the device, and numpy arrays, always copied.

A Python number in an op (``x * 3``) is an input of its program, so that another number needs no other program. To
upload 3 at every call would cost more than the op; ``device_number`` keeps its array.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from isthmus import _caches
from isthmus._runtime import forks, placement
from isthmus._runtime.compiler import default_device, scoped_x64
from isthmus._runtime.private import forgetting_callers, putter
from isthmus._runtime.user_frames import user_line
from isthmus.errors import TracedValueError

NUMBER_DTYPES = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}
LARGEST = 2**63 - 1  # of an int64; a number above it is a uint64
Array = jax.Array
_CACHE_LIMIT = 4096
# A plain dict, emptied when it is full: it is read for every number of every eager op, where a lock would show.
_numbers: dict[tuple[type, Any], Array] = {}
_caches.register(
    "Python numbers on the device", _CACHE_LIMIT, lambda: len(_numbers), lambda: _numbers.clear()
)


def device_number(value: Any) -> Array:
    """Return a 0-dim array holding a Python number in its widest type: int64 (or uint64), float64, complex128."""
    kind = type(value)
    # 0.0 and -0.0 are equal and hash alike, and so do complex numbers made of them.
    # A value that is true can be told from others by ``==``; zeros and complex numbers cannot.
    key = (kind, value) if value and kind is not complex else (kind, repr(value))
    array = _numbers.get(key)
    if array is None:
        if len(_numbers) >= _CACHE_LIMIT:
            _numbers.clear()
        array = _numbers[key] = from_numpy(_as_numpy(value))
    return array


def _as_numpy(value: Any) -> np.ndarray[Any, Any]:
    if type(value) is int and value > LARGEST:
        return np.asarray(value, np.uint64)
    return np.asarray(value, NUMBER_DTYPES[type(value)])


def from_numpy(array: np.ndarray[Any, Any], sharding: placement.Sharding = None) -> Array:
    """Return ``array`` on the device, in memory of its own; with a mesh split as said, by default at home."""
    forks.check()
    # On the CPU platform a put may alias the numpy memory, and the tensor that owns it can still change.
    own = np.array(array, copy=True)
    if placement.home is None:
        with forgetting_callers():
            return putter(default_device())(own)
    # A decomposition may call this while its program is traced: the array must be a value, not a tracer.
    with scoped_x64(), jax.ensure_compile_time_eval(), forgetting_callers():
        return placement.put(own, sharding)


def to_numpy(value: Any) -> np.ndarray[Any, Any]:
    """Return the contents of a JAX array; the memory may be shared with it and must not be written."""
    if isinstance(value, jax.core.Tracer):
        raise TracedValueError(
            f"{user_line() or 'torch code'} reads the value of a tensor ({value.dtype}{list(value.shape)}) that JAX is "
            f"tracing, which has none yet: compute with the tensor instead, for example by torch.where, or run the "
            f"function outside of jax.jit, grad and vmap"
        )
    forks.check()
    return np.asarray(value) if placement.home is None else placement.gather(value)
