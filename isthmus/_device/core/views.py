"""Views are torch's own: its Meta kernels on our storages; and the ops that give a tensor another layout or storage.

A view computes nothing: torch's Meta kernel of ``view``, ``as_strided`` or ``unfold`` builds a tensor on a storage of
any device, and the buffer on that storage is shared. ``resize_`` and ``set_`` change a tensor in place;
a storage that must grow gets a longer array (``_exchange``), recorded like any op in lazy mode.

What torch's kernels would check on their own memory is checked here in its words: a view that reaches past its storage
(``_check_bounds``), a storage of another device, a size that overflows. XLA would clamp such a read in silence.

A storage has one array with one dtype; a tensor of another dtype on it is a view of its bits (``slots.py``). Booleans
have one byte and two values, so a storage of booleans that is written to as bytes becomes one of bytes
(``store_bytes``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus._device.core import mode
from isthmus._device.core.buffer import Signature, buffer_if_any, buffer_of, storage_length
from isthmus._device.torch_glue import storage_patches
from isthmus._device.torch_glue.private import (
    META,
    become,
    contents,
    empty_tensor,
    redispatch_to_meta,
    restride,
)
from isthmus._graph.layout import contiguous_strides, span
from isthmus._graph.names import aten as _aten
from isthmus._graph.nodes import Node
from isthmus._graph.private import storage_id
from isthmus._runtime import memory
from isthmus._runtime.dtypes import to_torch_dtype


def as_strided(self: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    """Return a view of any layout that fits the storage."""
    offset = int(self.storage_offset()) if storage_offset is None else storage_offset
    _check_bounds(self, size, stride, offset)
    return restride(self, size, stride, offset)


def _check_bounds(tensor: Tensor, size: Any, stride: Any, offset: int) -> None:
    if 0 in size:
        return
    # One past the last element that the view reaches; torch checks bytes, since a storage may have another dtype.
    reach = offset + 1
    for n, s in zip(size, stride, strict=False):
        reach += (n - 1) * s
    nbytes, width = buffer_of(tensor).signature.nbytes, tensor.dtype.itemsize
    if reach * width > nbytes:
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, "
            f"and itemsize {width} requiring a storage size of {reach * width} are out of bounds "
            f"for storage of size {nbytes}"
        )


def as_strided_(self: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    """Give ``self`` another layout on its storage; ``t_``, ``squeeze_`` and their like arrive here."""
    if buffer_if_any(self) is None:
        # Functionalization does to its wrapper, which has no contents, what it did to the tensor inside.
        return redispatch_to_meta(_aten.as_strided_.default, self, size, stride, storage_offset)
    return become(self, as_strided(self, size, stride, storage_offset))


def resize_(self: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    """Give ``self`` another size, its storage grown if it must be, elements kept in storage order."""
    # torch keeps the strides where the size is the same.
    if memory_format is None and tuple(self.shape) == tuple(size):
        return self  # with the strides it has
    if memory_format is torch.channels_last or memory_format is torch.channels_last_3d:
        stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    else:
        stride = contiguous_strides(size)
    return resize_on_storage(self, size, stride)


def resize_on_storage(tensor: Tensor, size: Any, stride: Any) -> Tensor:
    """Lay a tensor out anew from where it begins on its storage, which keeps its elements and grows if it must."""
    offset = int(tensor.storage_offset())
    _grow(tensor, offset + span(size, stride))
    return become(tensor, restride(tensor, size, stride, offset))


def _grow(tensor: Tensor, length: int) -> None:
    missing = length - storage_length(tensor)
    if missing <= 0:
        return
    buffer = buffer_of(tensor)
    width = tensor.dtype.itemsize
    # The sum in bytes must fit torch's own int64.
    if length * width > memory.LARGEST:
        raise RuntimeError(f"Storage size calculation overflowed: {length} elements of {width} bytes")
    memory.require(length * width)
    # Rounded up, in elements of the storage's own dtype: the tensor may be a view of another one.
    more = -(-missing * width // buffer.signature.dtype.itemsize)
    _exchange(tensor, lambda flat: torch.constant_pad_nd(flat, [0, more]))


def holds_booleans(tensor: Tensor) -> bool:
    """Return whether a tensor of another dtype lies on a storage of booleans, which have one bit where it has eight."""
    return tensor.dtype != torch.bool and buffer_of(tensor).signature.dtype == np.bool_


def store_bytes(tensor: Tensor) -> None:
    """Let a storage of booleans hold bytes, so that what is written to it as another dtype can be read back."""
    _exchange(tensor, lambda flat: _aten._to_copy.default(flat, dtype=torch.uint8))


def _exchange(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Give a storage the contents that ``change`` makes of those it has: an op like any other, recorded if ops are."""
    # The whole storage as one dim of its own dtype, whatever the tensor looks like.
    buffer = buffer_of(tensor)
    before = buffer.signature
    count = math.prod(before.shape)
    flat = restride(attach_to(to_torch_dtype(before.dtype), tensor.untyped_storage()), (count,), (1,))
    # The program that reads the old contents must see them before the buffer has the new ones.
    changed = buffer_of(change(flat))
    # In lazy mode the change is recorded, and the buffer has to be known as the holder of its node.
    if type(changed.held) is Node:
        mode.current.hold(buffer, changed.held)
    else:
        buffer.held = changed.held
    after = changed.signature
    # Of a storage that was changed shorter, others may show more than it has now.
    buffer.signature = Signature.intern(after.shape, after.dtype, after.traced, before.shrunk, after.sharding)


def set_tensor_(self: Tensor, source: Tensor) -> Tensor:
    """Make ``self`` share storage and layout with ``source``."""
    buffer_of(source)
    return become(self, source)


def set_storage_(self: Tensor, source: Any, offset: int = 0, size: Any = None, stride: Any = ()) -> Tensor:
    """Make ``self`` a view of a storage, all of it by default."""
    held = contents(source)
    if held is None:
        raise RuntimeError(
            f"Attempted to set the storage of a tensor on device 'jax:0' to a storage on different device "
            f"'{source.device}'.  This is no longer allowed; the devices must match."
        )
    # ``set_`` without a size shows all of the storage.
    if size is None:
        size = (source.nbytes() // self.dtype.itemsize,)
    stride = stride or contiguous_strides(size)
    # A bare storage has no dtype until the first tensor lies on it.
    if type(held) is storage_patches.Bytes:
        storage_patches.give_dtype(source, self.dtype, size, stride)
    return become(self, as_strided(attach_to(self.dtype, source), size, stride, offset))


def attach_to(dtype: torch.dtype, storage: Any) -> Tensor:
    """Return an empty tensor on a storage."""
    set_storage = _aten.set_.source_Storage_storage_offset
    return set_storage.redispatch(META, empty_tensor((0,), dtype), storage, 0, [0], [1])


def set_nothing_(self: Tensor) -> Tensor:
    """Give ``self`` an empty storage of its own."""
    return become(self, torch.empty(0, dtype=self.dtype, device="jax"))


def zeros_laid_out_as(self: Tensor, other: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    """Return zeros laid out as ``other`` in a storage as long, for each batch of ``self``: a new tangent."""
    batch, length = tuple(self.shape[:self_num_batch_dims]), storage_length(other)
    # A batched tangent needs as much storage for each item as the primal has.
    strides = [length * s for s in contiguous_strides(batch)]
    zeros = torch.zeros((*batch, length), dtype=other.dtype, device="jax")
    return zeros.as_strided((*batch, *other.shape), (*strides, *other.stride()), other.storage_offset())


def lazy_clone(self: Tensor) -> Tensor:
    """Return a copy of the storage in the layout of ``self``: arrays never change, so it costs nothing."""
    copied = restride(self, (storage_length(self),), (1,)).clone()
    return restride(copied, self.shape, self.stride(), int(self.storage_offset()))


def has_same_storage_numel(self: Tensor, other: Tensor) -> bool:
    """Return whether two storages hold as many elements."""
    return storage_length(self) == storage_length(other)


def is_set_to(self: Tensor, tensor: Tensor) -> bool:
    """Return whether two tensors show the same part of one storage in the same way."""
    # By storage first: layouts of unrelated tensors may be equal.
    if storage_id(self) != storage_id(tensor):
        return False
    return _layout(self) == _layout(tensor)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


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
    "_new_zeros_with_same_feature_meta": zeros_laid_out_as,
    "_lazy_clone": lazy_clone,
    "_has_same_storage_numel": has_same_storage_numel,
    "is_set_to": is_set_to,
    "view": _torchs_own("view"),
    "view.dtype": _torchs_own("view", "dtype"),
    "_reshape_alias": _torchs_own("_reshape_alias"),
    "view_as_real": _torchs_own("view_as_real"),
    "view_as_complex": _torchs_own("view_as_complex"),
    "unfold": _torchs_own("unfold"),
}
