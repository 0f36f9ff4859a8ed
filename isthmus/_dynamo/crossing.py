"""Tensors of the CPU or of CUDA as arguments of a program, and its results as theirs: by DLPack, without a copy."""

from __future__ import annotations

from typing import Any

import jax
import torch
from torch import Tensor

from isthmus._device.buffer import is_dense, storage_order
from isthmus._device.hosts import array_from_cpu
from isthmus._runtime import counters
from isthmus._runtime.compiler import platform, scoped_x64
from isthmus._runtime.dtypes import to_jax_dtype

_PLATFORMS = {"cpu": "cpu", "cuda": "gpu"}


def arrive(tensor: Tensor) -> Any:
    """Return a tensor's storage as an array that may share its memory: the program must end before torch goes on."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    size, stride = tuple(plain.shape), tuple(plain.stride())
    dense = plain.permute(storage_order(size, stride)) if is_dense(size, stride) else plain.contiguous()
    if _PLATFORMS.get(plain.device.type) == platform() and dense.numel():
        with scoped_x64():
            if dense.dtype == torch.bool:
                return jax.dlpack.from_dlpack(dense.view(torch.uint8)).view(to_jax_dtype(torch.bool))
            return jax.dlpack.from_dlpack(dense)
    counters.count("transfers to device")
    return array_from_cpu(dense.cpu())


def depart(array: Any, size: tuple[int, ...], stride: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a new storage's array as a tensor of another device."""
    if _PLATFORMS.get(device.type) == platform():
        if array.dtype == bool:
            flat = torch.from_dlpack(array.view("uint8")).view(torch.bool)
        else:
            flat = torch.from_dlpack(array)
    else:
        from isthmus._device.hosts import cpu_from_array
        from isthmus._runtime.dtypes import to_torch_dtype

        counters.count("transfers to host")
        flat = cpu_from_array(array, to_torch_dtype(array.dtype)).clone().to(device)
    return flat.as_strided(size, stride)
