"""New tensors: ``empty`` shares zeros until written, ``arange`` keeps its bounds out of the program."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from isthmus._device.buffer import storage_shape, wrap_strided
from isthmus._device.strided import contiguous_strides
from isthmus._runtime import compiler
from isthmus._runtime.dtypes import to_jax_dtype

_SHARED_BYTES = 1 << 16
_SHARED_LIMIT = 1024
_shared: dict[tuple[Any, ...], Any] = {}
_makers: dict[tuple[Any, ...], Any] = {}


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an array of zeros; small ones are shared, which is safe because arrays never change."""
    key = (shape, dtype)
    found = _shared.get(key)
    if found is not None:
        return found
    if key not in _makers:
        import jax.numpy as jnp

        if len(_makers) >= _SHARED_LIMIT:
            _makers.clear()
        _makers[key] = compiler.compile(lambda: jnp.zeros(shape, dtype), [])
    made = _makers[key]()
    if math.prod(shape) * dtype.itemsize <= _SHARED_BYTES:
        if len(_shared) >= _SHARED_LIMIT:
            _shared.clear()
        _shared[key] = made
    return made


def empty(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
          memory_format: Any = None) -> Tensor:
    """Return a new tensor; its elements are zeros, which nothing promises."""
    size = tuple(size)
    for n in size:
        if n < 0:
            raise RuntimeError(f"Trying to create tensor with negative dimension {n}: {list(size)}")
    if memory_format in (None, torch.contiguous_format, torch.preserve_format):
        return empty_strided(size, contiguous_strides(size), dtype=dtype)
    stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    return empty_strided(size, stride, dtype=dtype)


def empty_strided(size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
                  pin_memory: Any = None) -> Tensor:
    """Return a new tensor with this layout."""
    size, stride = tuple(size), tuple(stride)
    dtype = dtype or torch.get_default_dtype()
    return wrap_strided(zeros(storage_shape(size, stride), to_jax_dtype(dtype)), size, stride, dtype)


KERNELS = {"empty.memory_format": empty, "empty_strided": empty_strided}
