"""Tensors of the CPU or of CUDA as arguments of a program, and its results as theirs: by DLPack, without a copy."""

from __future__ import annotations

from typing import Any

import jax
import torch
from torch import Tensor

from isthmus._device.core.host_tensors import array_from_cpu, cpu_from_array
from isthmus._graph.layout import is_dense, span, storage_order
from isthmus._runtime import counters, placement
from isthmus._runtime.compiler import platform, scoped_x64
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype

_PLATFORMS = {"cpu": "cpu", "cuda": "gpu"}


def arrive(tensor: Tensor) -> Any:
    """Return a tensor's storage as an array that may share its memory: the program must end before torch goes on."""
    dense = _dense(tensor.detach())
    if _PLATFORMS.get(dense.device.type) == platform() and dense.numel() and placement.home is None:
        with scoped_x64():
            if dense.dtype == torch.bool:
                return jax.dlpack.from_dlpack(dense.view(torch.uint8)).view(to_jax_dtype(torch.bool))
            return jax.dlpack.from_dlpack(dense)
    counters.count("transfers to device")
    return array_from_cpu(dense.cpu())


def _dense(tensor: Tensor) -> Tensor:
    """Return what a tensor's strides run over: its elements in the order of memory, and the gaps between them."""
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    plain = tensor.resolve_conj().resolve_neg()
    if is_dense(size, stride):
        return plain.permute(storage_order(size, stride))
    if plain is not tensor:  # it may have lost its gaps
        spread = plain.new_zeros(span(size, stride))
        spread.as_strided(size, stride).copy_(plain)
        return spread
    return plain.as_strided((span(size, stride),), (1,))


def depart(array: Any, size: tuple[int, ...], stride: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a new storage's array as a tensor of another device."""
    if _PLATFORMS.get(device.type) == platform() and placement.home is None:
        if array.dtype == bool:
            flat = torch.utils.dlpack.from_dlpack(array.view("uint8")).view(torch.bool)
        else:
            flat = torch.utils.dlpack.from_dlpack(array)
    else:
        counters.count("transfers to host")
        flat = cpu_from_array(array, to_torch_dtype(array.dtype)).clone().to(device)
    return flat.as_strided(size, stride)
