"""Arrays from the host: Python numbers, kept on the device once seen, and numpy arrays, always copied."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from isthmus._runtime import forks
from isthmus._runtime.compiler import default_device, scoped_x64
from isthmus._runtime.private import forgetting_callers
from isthmus._runtime.user_frames import user_line
from isthmus.errors import TracedValueError

NUMBER_DTYPES = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}
LARGEST = 2**63 - 1  # of an int64; a number above it is a uint64
_CACHE_LIMIT = 4096
_numbers: dict[tuple[type, Any], Any] = {}


def device_number(value: Any) -> Any:
    """Return a 0-dim array holding a Python number in its widest type."""
    kind = type(value)
    # 0.0 and -0.0 are equal and hash alike, and so do complex numbers made of them.
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


def from_numpy(array: np.ndarray[Any, Any]) -> Any:
    """Return ``array`` on the device, in memory of its own."""
    forks.check()
    # A decomposition may ask while its program is traced: the array must be a value, not a tracer of it.
    with scoped_x64(), jax.ensure_compile_time_eval(), forgetting_callers():
        # device_put may alias the numpy memory on the CPU platform; the tensor it came from can still change.
        return jax.device_put(np.array(array, copy=True), default_device())


def to_numpy(value: Any) -> np.ndarray[Any, Any]:
    """Return the contents of a jax array; the memory may be shared and must not be written."""
    if isinstance(value, jax.core.Tracer):
        raise TracedValueError(
            f"{user_line() or 'torch code'} reads the value of a tensor ({value.dtype}{list(value.shape)}) that JAX is "
            f"tracing, which has none yet: compute with the tensor instead, for example by torch.where, or run the "
            f"function outside of jax.jit, grad and vmap"
        )
    forks.check()
    return np.asarray(value)
