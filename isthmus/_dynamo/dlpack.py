"""Tensors of the CPU or of CUDA as arguments of a program, and its results as theirs: by DLPack, without a copy.

An import costs tens of microseconds, and a training step has hundreds of arguments, most of which are the same tensors
in the same memory every time: parameters, an optimizer's state. Their arrays are cached (``_Imported``) until the
tensor dies or moves to other memory; an array that JAX had to copy is not, since it would not see what is written.
A result of a program may soon be an argument of the next, as gradients are of the optimizer's: its storage remembers
its array.

On CUDA the two libraries have streams of their own. An import records an event on torch's stream, for which whatever
reads the array waits, and an export makes torch's stream wait for the program. So nothing has to wait on the host, if
at least one argument of a call is imported anew: ``Arrivals`` does that for the first one. On the CPU nothing is
cached, and the program must end before torch goes on (``waits``).
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
        key = _key(tensor)
        # One import of a call has ordered the streams; further tensors may come from the cache.
        if self.ordered:
            known = _imported.get(id(tensor))
            if known is not None and known.tensor() is tensor and known.key == key:
                return known.array
            # A result of an earlier program that comes back as an argument: its array is still there.
            left = getattr(tensor.untyped_storage(), "_departed", None)
            if left is not None and left[0] == key:
                return left[1]
        self.ordered = True
        array = arrive(tensor)
        # An array that JAX copied must not be cached: it would not see what torch writes later.
        if array.size and array.unsafe_buffer_pointer() == key[0]:
            forget = functools.partial(_forget, id(tensor))
            _imported[id(tensor)] = _Imported(ref(tensor, forget), key, array)
        return array


def _key(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _forget(number: int, _: object) -> None:
    _imported.pop(number, None)


def waits(devices: set[str]) -> bool:
    """Return whether the host must wait for a program whose arguments and results live on these devices of torch's."""
    return devices != {"cuda"}


def arrive(tensor: Tensor) -> Any:
    """Return a tensor's storage as an array that may share its memory."""
    dense = _dense(tensor.detach())
    # With a mesh an array has to be split, and an empty one has no memory to share.
    if _PLATFORMS.get(dense.device.type) == platform() and dense.numel() and placement.home is None:
        with scoped_x64():
            # Booleans cross as bytes.
            if dense.dtype == torch.bool:
                return jax.dlpack.from_dlpack(dense.view(torch.uint8)).view(to_jax_dtype(torch.bool))
            return jax.dlpack.from_dlpack(dense)
    counters.count("transfers to device")
    return array_from_cpu(dense.cpu())


def _dense(tensor: Tensor) -> Tensor:
    """Return the memory that a tensor's strides run over: its elements in their order, and the gaps between them."""
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    plain = tensor.resolve_conj().resolve_neg()
    if is_dense(size, stride):
        return plain.permute(storage_order(size, stride))
    if plain is not tensor:  # it may have lost its gaps
        spread = plain.new_zeros(span(size, stride))
        spread.as_strided(size, stride).copy_(plain)
        return spread
    return plain.as_strided((span(size, stride),), (1,))


class Departures:
    """The results of one call as tensors of other devices."""

    def __init__(self) -> None:
        self.stream: int | None = None  # torch's on CUDA, looked up once: there are hundreds of results

    def __call__(
        self, array: Any, size: tuple[int, ...], stride: tuple[int, ...], device: torch.device
    ) -> Tensor:
        """Return a new storage's array as a tensor of another device."""
        if _PLATFORMS.get(device.type) != platform() or placement.home is not None:
            counters.count("transfers to host")
            # A copy: torch may write to what it gets, and an array must not change.
            flat = cpu_from_array(array, to_torch_dtype(array.dtype)).clone().to(device)
        elif array.dtype == bool:
            flat = torch.utils.dlpack.from_dlpack(array.view("uint8")).view(torch.bool)
        elif device.type == "cuda":
            if self.stream is None:
                # DLPack's number for the default stream, whose address is 0, is 1.
                self.stream = torch.cuda.current_stream(device).cuda_stream or 1
            flat = torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=self.stream))
        else:
            flat = torch.utils.dlpack.from_dlpack(array)
        return flat.as_strided(size, stride)


def remember(tensor: Tensor, array: jax.Array) -> None:
    """Let the storage of a tensor that has departed keep its array, whose memory it is: what torch writes it shows."""
    tensor.untyped_storage()._departed = (_key(tensor), array)  # type: ignore[attr-defined]
