"""Tensors of other devices and arrays: always a copy, since the user can still write to the tensor.

A CPU tensor crosses through numpy, a CUDA tensor by DLPack where JAX has the GPU too. ``transfers.py`` decides which
way a copy takes and says why a recorded graph has to run; here the bytes move, and are counted
(``isthmus.metrics``: "bytes to device", "bytes to host").

Two rules keep memory safe in both directions: an array made of torch's memory is a copy, as torch may overwrite its
own at once; a tensor made of an array's memory (``cpu_from_array``) is only ever read, as JAX's arrays never change.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isthmus._device.torch_glue.private import contents
from isthmus._runtime import counters, memory, placement
from isthmus._runtime.compiler import default_device, platform, scoped_x64
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus._runtime.host_arrays import from_numpy, to_numpy

_CROSSES = frozenset({
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip
# The dtypes that numpy has itself; its ``item`` of others (bfloat16, float8) is no Python number.
SCALARS = _CROSSES - {torch.bfloat16} | {torch.bool}


def array_from_cpu(tensor: torch.Tensor, sharding: Any = None) -> Any:
    """Return a CPU tensor's elements on the device, with a mesh split as said, by default at home."""
    counters.count("bytes to device", tensor.nbytes)
    array = numpy_from_cpu(tensor)
    placement.note(array)
    return from_numpy(array, sharding)


def numpy_from_cpu(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a CPU tensor's elements in the dtype they have on the device; the memory may be the tensor's."""
    # Conjugation and negation are bits on torch's tensor that numpy does not see.
    plain = tensor.detach().resolve_conj().resolve_neg()
    dtype = to_jax_dtype(plain.dtype)
    if not plain.numel():
        memory.require_countable(plain.shape, dtype)  # numpy counts likewise
    return _bytes(plain.contiguous()).view(dtype).reshape(tuple(plain.shape))


def cpu_from_array(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return an array as a CPU tensor; its memory may be the array's, so copy from it and never write."""
    host = to_numpy(array)
    counters.count("bytes to host", host.nbytes)
    if host.size == 0:
        return torch.empty(host.shape, dtype=dtype)
    # As bytes: numpy has no bfloat16 or float8, torch gives the bytes their dtype below.
    flat = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    if not flat.flags.writeable:
        # torch warns of read-only memory; nothing here writes to it.
        # Copying a few bytes is cheaper than the object that pretends they are writeable.
        flat = flat.copy() if flat.size < 4096 else _writeable_alias(flat)
    return torch.from_numpy(flat).view(dtype).reshape(host.shape)


def item_of(array: Any) -> bool | complex:
    """Return the one element of an array of one of ``SCALARS`` as a Python number.

    numpy gives the number that torch gives, without a CPU tensor around it: half of the time of ``.item()``.
    """
    host = to_numpy(array)
    counters.count("bytes to host", host.nbytes)
    return host.item()  # type: ignore[no-any-return]


def array_from_cuda(tensor: torch.Tensor) -> Any:
    """Return a CUDA tensor's elements without a detour through the host, or None where JAX cannot take it."""
    # Only where JAX runs on GPUs: otherwise a CUDA tensor crosses through the CPU.
    if platform() != "gpu" or tensor.dtype not in _CROSSES:
        return None
    counters.count("bytes to device", tensor.nbytes)
    with scoped_x64():
        shared = jax.dlpack.from_dlpack(tensor.detach().resolve_conj().resolve_neg().contiguous())
        # torch may overwrite its memory as soon as this returns.
        return jnp.array(jax.device_put(shared, default_device()), copy=True).block_until_ready()


def cuda_from_array(array: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """Return an array as a CUDA tensor of its own, or None where torch cannot take it."""
    if platform() != "gpu" or dtype not in _CROSSES:
        return None
    own = torch.utils.dlpack.from_dlpack(array).clone()
    # JAX may reuse its memory as soon as this returns.
    torch.cuda.current_stream(own.device).synchronize()
    return own


def shown_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a "jax" tensor as the same view of a CPU copy of its storage, without running a program."""
    array = contents(tensor.untyped_storage()).value
    storage = cpu_from_array(array, to_torch_dtype(array.dtype)).reshape(-1).clone().view(tensor.dtype)
    return storage.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def write_through_cpu(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write CPU ``values`` to a "jax" tensor by exchanging its whole storage, without running a program."""
    buffer = contents(tensor.untyped_storage())
    array = buffer.value
    shown = shown_on_cpu(tensor)
    shown.copy_(values)
    # All of the storage, not only what the tensor shows: views of it must see the write.
    whole = shown.as_strided((shown.untyped_storage().nbytes() // shown.itemsize,), (1,), 0)
    buffer.rebind(
        array_from_cpu(
            whole.view(to_torch_dtype(array.dtype)).reshape(array.shape), buffer.signature.sharding
        )
    )


def copied(array: Any) -> Any:
    """Return a copy of an array, for a program or library that may write to its memory."""
    with scoped_x64():
        return jnp.array(array, copy=True)


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # one element, expanded: contiguous all the same
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()


def _writeable_alias(flat: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # The protocol's dictionary says (address, read-only); ``keep_alive`` holds the memory meanwhile.
    interface = dict(flat.__array_interface__)
    interface["data"] = (interface["data"][0], False)

    class Holder:
        __array_interface__ = interface
        keep_alive = flat

    return np.asarray(Holder())
