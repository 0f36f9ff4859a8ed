"""Copies: between "jax" tensors in one executable, to and from other devices through the host or by DLPack.

``copy_``, ``to``, ``cpu``, ``item`` and ``torch.equal`` arrive here (``KERNELS`` at the end). A transfer to the host is
where deferred errors are raised (``value_checks``) and where a recorded graph runs, so each says why in a
``mode.reason`` block. ``host_tensors.py`` moves the bytes.

    x.to("jax")           from_other: strides are kept where they are dense, and the bytes go over in memory order
    x.cpu()               to_copy -> _nearest -> to_cpu: the elements that the view shows, made contiguous first
    x.copy_(cpu_tensor)   the array that arrives takes the place of the old one, where x is all of its storage

What can go wrong: the program that makes a view contiguous may be one that cannot be compiled and falls to the CPU,
which needs the elements of that view; ``_copying`` breaks the circle.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from isthmus._device.checks import value_checks
from isthmus._device.core import mode
from isthmus._device.core.buffer import buffer_of, wrap, wrap_strided
from isthmus._device.core.dispatch import kernel_for
from isthmus._device.core.host_tensors import (
    SCALARS,
    array_from_cpu,
    array_from_cuda,
    cpu_from_array,
    cuda_from_array,
    item_of,
    shown_on_cpu,
)
from isthmus._device.kernels.conjugate import apply_bits, bare, is_lazy, resolve
from isthmus._device.torch_glue.torch_jax import check_device
from isthmus._graph.layout import is_dense, storage_order
from isthmus._graph.names import aten as _aten
from isthmus._runtime import counters, placement
from isthmus._runtime.dtypes import to_jax_dtype

# The kernels themselves: torch's ``copy_`` would come back to the functions of this file.
_copy = kernel_for(_aten.copy_.default)
_clone = kernel_for(_aten.clone.default)
_cast = kernel_for(_aten._to_copy.default)


class _Copying(threading.local):
    """Whether this thread copies what a view shows, so that its elements can be read."""

    view = False


_copying = _Copying()
# A number in the widest dtype of its kind, so that nothing is lost before the cast to the target's.
_WIDEST = {float: torch.float64, complex: torch.complex128}


def array_of(tensor: Tensor) -> Any:
    """Return the elements a "jax" tensor shows, as an array of its shape and dtype."""
    tensor = resolve(tensor)
    if _is_whole(tensor):
        return buffer_of(tensor).value
    # The clone below may fall back to the CPU, which reads views itself while this is set.
    _copying.view = True
    try:
        return buffer_of(_clone(tensor, memory_format=torch.contiguous_format)).value
    finally:
        _copying.view = False


def _is_whole(tensor: Tensor) -> bool:
    """Return whether the tensor shows all of its storage as it is."""
    signature = buffer_of(tensor).signature
    same = signature.shape == tensor.shape and tensor.storage_offset() == 0 and tensor.is_contiguous()
    return same and signature.dtype == to_jax_dtype(tensor.dtype)


def copy_(self: Tensor, src: Tensor | complex, non_blocking: bool = False) -> Tensor:
    """Write ``src`` into ``self``, whichever devices they are on; torch hands numbers on as they are."""
    if not isinstance(src, Tensor):
        # A number is an argument of the program; only a complex one into a real or lazy tensor needs a tensor.
        if not is_lazy(self) and (self.is_complex() or not isinstance(src, complex)):
            _copy(self, src)
            return self
        src = torch.tensor(src, dtype=_WIDEST.get(type(src)))
    src = _with_shape(src)
    if self.device.type != "jax":
        # Away from the device: what crosses is as near to the target as it can get, torch does the rest.
        with mode.reason("copy_() to another device"):
            arrived = _nearest(src, self.device)
        return self.copy_(arrived, non_blocking)
    elsewhere = src.device.type != "jax"
    if not elsewhere:
        arrived = resolve(src)
    else:
        # Elements of a whole tensor go straight to the devices that hold them: the rest has no room for all.
        whole = src.shape == self.shape and _is_whole(self)
        arrived = from_other(src, buffer_of(self).signature.sharding if whole else None)
    # A conjugated or negated view: the values are written as they are stored.
    if is_lazy(self):
        _copy(bare(self), apply_bits(arrived, self))
    # A new array in place of the old one: no program, no second copy on the device.
    elif elsewhere and _is_whole(self) and _same_kind(self, arrived) and not mode.current.capture:
        _take_over(self, arrived)
    else:
        _copy(self, arrived)
    return self


def _with_shape(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or an alias of it if its class hides the shape.

    Parameters of torch's lazy modules raise when Python reads their shape, but move between devices and dtypes like
    any other.
    """
    return tensor if type(tensor).shape is Tensor.shape else tensor.detach()


def _take_over(self: Tensor, arrived: Tensor) -> None:
    """Let a tensor hold the array of one that has just arrived, split as its own is."""
    buffer, new = buffer_of(self), buffer_of(arrived)
    sharding = buffer.signature.sharding
    array: Any = new.held
    # With a mesh the target says how it is split.
    buffer.rebind(array if new.signature.sharding is sharding else placement.move(array, sharding))


def write_array(tensor: Tensor, array: Any) -> None:
    """Make an array of as many elements the contents of a "jax" tensor; where it shows all of its storage, no copy."""
    if tuple(array.shape) != tuple(tensor.shape):
        array = array.reshape(tuple(tensor.shape))
    if array.dtype != to_jax_dtype(tensor.dtype):
        raise TypeError(f"an array of {array.dtype} cannot become the contents of a tensor of {tensor.dtype}")
    if _is_whole(tensor) and not is_lazy(tensor) and not mode.current.capture:
        buffer_of(tensor).bind(array)
    else:
        copy_(tensor.detach(), wrap(array, tensor.dtype))


def _same_kind(self: Tensor, other: Tensor) -> bool:
    return self.shape == other.shape and self.dtype == other.dtype and other.is_contiguous()


def copy_from(self: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    """Write ``self`` into ``dst``: the order of arguments torch's device copies use."""
    return copy_(dst, self, non_blocking)


def from_other(tensor: Tensor, sharding: Any = None) -> Tensor:
    """Return a tensor of another device as a new "jax" tensor with the same strides if they are dense.

    With a mesh it is split as said if it is contiguous, else at home.
    """
    arrived = _from_other(tensor, sharding)
    if mode.current.capture is not None:
        # isthmus.jit reads the other tensor again at each replay, by this function.
        mode.current.capture.note_host(
            buffer_of(arrived).held, tensor, lambda again: buffer_of(from_other(again, sharding)).value
        )
    return arrived


def _from_other(tensor: Tensor, sharding: Any) -> Tensor:
    counters.count("transfers to device")
    crossed = array_from_cuda(tensor) if tensor.device.type == "cuda" else None
    if crossed is not None:
        return wrap(crossed, tensor.dtype)
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    # Straight to the devices that hold the parts.
    if sharding is not None and tensor.is_contiguous():
        return wrap(array_from_cpu(tensor.cpu(), sharding), tensor.dtype)
    # Strides with gaps or overlaps: torch too makes such a copy contiguous.
    if not is_dense(size, stride):
        return wrap(array_from_cpu(tensor.cpu()), tensor.dtype)
    # In memory order, so that the bytes on the device lie as they do on the host.
    array = array_from_cpu(tensor.permute(storage_order(size, stride)).cpu())
    return wrap_strided(array, size, stride, tensor.dtype)


def to_cpu(tensor: Tensor) -> Tensor:
    """Return a "jax" tensor's elements on the CPU, to be copied from."""
    counters.count("transfers to host")
    if _copying.view and not _is_whole(tensor):
        # The program that copies views could not be compiled, and this is its fallback.
        return shown_on_cpu(tensor)
    return cpu_from_array(_checked_array_of(tensor), tensor.dtype)


def _checked_array_of(tensor: Tensor) -> Any:
    """Return ``array_of`` for the host: a value check that failed before is raised first."""
    array = array_of(tensor)
    value_checks.raise_pending()
    return array


def _nearest(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a "jax" tensor's elements where a copy to ``device`` is cheapest: there, or on the CPU."""
    crossed = cuda_from_array(array_of(tensor), tensor.dtype) if device.type == "cuda" else None
    return crossed if crossed is not None else to_cpu(tensor)


def to_copy(self: Tensor, **options: Any) -> Tensor:
    """Return a copy with another dtype, device or memory format."""
    self = _with_shape(self)
    device = options.pop("device", None) or self.device
    if device.type == "jax":
        check_device(device)
        return _cast(self, **options) if self.device.type == "jax" else _arrived(self, options)
    dtype, memory_format = options.get("dtype") or self.dtype, options.get("memory_format")
    if memory_format in (None, torch.preserve_format):
        # Made first: torch lays the copy out, and copies into it.
        target = torch.empty_strided(self.shape, _dense_strides(self), dtype=dtype, device=device)
    else:
        target = torch.empty(self.shape, dtype=dtype, device=device, memory_format=memory_format)
    with mode.reason(".cpu() or .to()"):
        arrived = _nearest(self, device)
    return target.copy_(arrived)


def _arrived(tensor: Tensor, options: dict[str, Any]) -> Tensor:
    """Return a tensor of another device as a new one here, cast and laid out only if that is asked for."""
    arrived = from_other(tensor)
    memory_format = options.get("memory_format")
    same_dtype = options.get("dtype") in (None, arrived.dtype)
    same_layout = memory_format in (None, torch.preserve_format) and arrived.stride() == _dense_strides(
        tensor
    )
    return arrived if same_dtype and same_layout else _cast(arrived, **options)


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty_like(torch.empty_strided(tensor.shape, tensor.stride(), device="meta")).stride()


def local_scalar_dense(self: Tensor) -> Any:
    """Return the one element of ``self`` as a Python number."""
    with mode.reason(".item(), bool(), float() or int()"):
        # Not a number numpy has, or not one element: torch's own ``item`` says so in its words.
        if self.dtype not in SCALARS or self.numel() != 1 or _copying.view:
            return to_cpu(self).item()
        counters.count("transfers to host")
        return item_of(_checked_array_of(self))


def equal(self: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same size and elements."""
    if self.device != other.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {self.device} "
            f"and {other.device}!"
        )
    if self.dtype != other.dtype:  # older versions of torch refuse that, newer ones promote
        # A call of the CPU that raises torch's error, or nothing.
        torch.equal(torch.zeros(1, dtype=self.dtype), torch.zeros(1, dtype=other.dtype))
    with mode.reason("torch.equal()"):
        return self.shape == other.shape and bool((self == other).all())


KERNELS = {
    "copy_": copy_,
    "_copy_from": copy_from,
    "_copy_from_and_resize": copy_from,
    "_to_copy": to_copy,
    "_local_scalar_dense": local_scalar_dense,
    "equal": equal,
}
