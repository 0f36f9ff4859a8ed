"""Views are torch's own: its Meta kernels on our storages; and the ops that give a tensor another layout."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from torch import Tensor

from isthmus._device.buffer import buffer_of, storage_length
from isthmus._device.private import become, redispatch_to_meta, restride
from isthmus._device.strided import contiguous_strides, span
from isthmus._runtime.compiler import scoped_x64

_aten = torch.ops.aten


def as_strided(self: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    """Return a view of any layout that fits the storage."""
    offset = self.storage_offset() if storage_offset is None else storage_offset
    _check_bounds(self, size, stride, offset)
    return redispatch_to_meta(_aten.as_strided.default, self, size, stride, offset)


def _check_bounds(tensor: Tensor, size: Any, stride: Any, offset: int) -> None:
    if 0 in size:
        return
    reach = offset + 1
    for n, s in zip(size, stride, strict=False):
        reach += (n - 1) * s
    nbytes, width = buffer_of(tensor).signature.nbytes, tensor.dtype.itemsize
    if reach * width > nbytes:
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize {width} "
            f"requiring a storage size of {reach * width} are out of bounds for storage of size {nbytes}"
        )


def as_strided_(self: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    """Give ``self`` another layout on its storage; ``t_``, ``squeeze_`` and their like arrive here."""
    return become(self, as_strided(self, size, stride, storage_offset))


def resize_(self: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    """Give ``self`` another size, its storage grown if it must be, elements kept in storage order."""
    if memory_format is torch.channels_last or memory_format is torch.channels_last_3d:
        stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    else:
        stride = contiguous_strides(size)
    _grow(self, self.storage_offset() + span(size, stride))
    return become(self, restride(self, size, stride, self.storage_offset()))


def _grow(tensor: Tensor, length: int) -> None:
    missing = length - storage_length(tensor)
    if missing <= 0:
        return
    buffer = buffer_of(tensor)
    width = tensor.dtype.itemsize
    more = -(-missing * width // buffer.signature.dtype.itemsize)
    with scoped_x64():
        buffer.rebind(jnp.pad(buffer.value.reshape(-1), (0, more)))


def set_tensor_(self: Tensor, source: Tensor) -> Tensor:
    """Make ``self`` share storage and layout with ``source``."""
    buffer_of(source)
    return become(self, source)


def set_storage_(self: Tensor, source: Any, offset: int = 0, size: Any = None, stride: Any = ()) -> Tensor:
    """Make ``self`` a view of a storage, all of it by default."""
    holder = attach_storage(self, source)
    if size is None:
        size = (storage_length(holder),)
    return become(self, as_strided(holder, size, stride or contiguous_strides(size), offset))


def attach_storage(like: Tensor, storage: Any) -> Tensor:
    """Return a tensor of ``like``'s dtype on a storage that a "jax" tensor brought along."""
    holder = getattr(storage, "_buffer", None)
    if holder is None:
        raise RuntimeError("set_ on device 'jax' needs the storage of a 'jax' tensor")
    return _aten.set_.source_Storage_storage_offset.redispatch(
        torch._C.DispatchKeySet(torch._C.DispatchKey.Meta), like.new_empty(0), storage, 0, [0], [1]
    )


def set_nothing_(self: Tensor) -> Tensor:
    """Give ``self`` an empty storage of its own."""
    return become(self, torch.empty(0, dtype=self.dtype, device="jax"))


def _torchs_own(name: str, overload: str = "default") -> Any:
    op = getattr(getattr(_aten, name), overload)
    return lambda *args, **kwargs: redispatch_to_meta(op, *args, **kwargs)


KERNELS = {
    "as_strided": as_strided,
    "as_strided_": as_strided_,
    "resize_": resize_,
    "set_.source_Tensor": set_tensor_,
    "set_.source_Storage": set_storage_,
    "set_.source_Storage_storage_offset": set_storage_,
    "set_": set_nothing_,
    "view": _torchs_own("view"),
    "view.dtype": _torchs_own("view", "dtype"),
    "_reshape_alias": _torchs_own("_reshape_alias"),
    "view_as_real": _torchs_own("view_as_real"),
    "view_as_complex": _torchs_own("view_as_complex"),
    "unfold": _torchs_own("unfold"),
}
