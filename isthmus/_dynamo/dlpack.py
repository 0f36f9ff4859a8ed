"""Tensors of the CPU or of CUDA as arguments of a program, and its results as theirs: by DLPack, without a copy.

An import costs tens of microseconds, and a training step has hundreds of arguments, most of which are the same tensors
in the same memory every time: parameters, an optimizer's state. Their arrays are cached (``_Imported``) until the
tensor dies or moves to other memory; an array that JAX had to copy is not, since it would not see what is written.

On CUDA the two libraries have streams of their own. An import records an event on torch's stream, for which whatever
reads the array waits, and an export makes torch's stream wait for the program. So nothing has to wait on the host, if
at least one argument of a call is imported anew: ``Arrivals`` does that for the first one. On the CPU nothing is cached,
and the program must end before torch goes on (``waits``).
"""

from __future__ import annotations

import atexit
import functools
from dataclasses import dataclass
from typing import Any
from weakref import ref

import jax
import torch
from torch import Tensor

from isthmus._device.core.host_tensors import array_from_cpu, cpu_from_array
from isthmus._graph.layout import is_dense, span, storage_order
from isthmus._runtime import counters, placement
from isthmus._runtime.compiler import platform, scoped_x64
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype

_PLATFORMS = {"cpu": "cpu", "cuda": "gpu"}


@dataclass(frozen=True)
class _Imported:
    """The array of a tensor, which shares its memory, and what the tensor was when it was imported."""

    tensor: ref[Tensor]
    key: tuple[Any, ...]
    array: jax.Array


_imported: dict[int, _Imported] = {}
# JAX frees its devices at exit, and torch its memory: arrays that hold memory of torch's must be gone before.
atexit.register(_imported.clear)


class Arrivals:
    """The tensors of other devices among the arguments of one call, as arrays."""

    def __init__(self) -> None:
        self.ordered = False  # whether an import of this call has made programs wait for torch's stream

    def __call__(self, tensor: Tensor) -> Any:
        """Return a tensor's storage as an array that may share its memory."""
        if tensor.device.type != "cuda":
            return arrive(tensor)
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        known = _imported.get(id(tensor))
        if self.ordered and known is not None and known.tensor() is tensor and known.key == key:
            return known.array
        self.ordered = True
        array = arrive(tensor)
        if array.size and array.unsafe_buffer_pointer() == key[0]:
            forget = functools.partial(_forget, id(tensor))
            _imported[id(tensor)] = _Imported(ref(tensor, forget), key, array)
        return array


def _forget(number: int, _: object) -> None:
    _imported.pop(number, None)


def waits(devices: set[str]) -> bool:
    """Return whether the host must wait for a program whose arguments and results live on these devices of torch's."""
    return devices != {"cuda"}


def arrive(tensor: Tensor) -> Any:
    """Return a tensor's storage as an array that may share its memory."""
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
