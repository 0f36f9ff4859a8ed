"""CPU tensors and arrays: always a copy, since the user can still write to the tensor."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from isthmus._runtime.compiler import scoped_x64
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus._runtime.hosts import from_numpy, to_numpy


def array_from_cpu(tensor: torch.Tensor) -> Any:
    """Return a CPU tensor's elements on the device."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    dtype = to_jax_dtype(plain.dtype)
    return from_numpy(_bytes(plain.contiguous()).view(dtype).reshape(tuple(plain.shape)))


def cpu_from_array(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return an array as a CPU tensor; its memory may be the array's, so copy from it and never write."""
    host = to_numpy(array)
    if host.size == 0:
        return torch.empty(host.shape, dtype=dtype)
    flat = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    if not flat.flags.writeable:
        # torch warns of read-only memory; nothing here writes to it.
        flat = flat.copy() if flat.size < 4096 else _writeable_alias(flat)
    return torch.from_numpy(flat).view(dtype).reshape(host.shape)


def copied(array: Any) -> Any:
    """Return the same elements in memory of their own, for somebody who may write to it."""
    with scoped_x64():
        return jnp.array(array, copy=True)


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _writeable_alias(flat: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    interface = dict(flat.__array_interface__)
    interface["data"] = (interface["data"][0], False)

    class Holder:
        __array_interface__ = interface
        keep_alive = flat

    return np.asarray(Holder())
