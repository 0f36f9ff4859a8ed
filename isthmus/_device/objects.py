"""What torch and its users do with a storage as an object: copy, save, load, measure, compare by pointer.

torch keeps no memory behind a "jax" storage, so the methods that look at memory are answered here for such
storages; every other storage gets torch's own. Loading this file loads no JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isthmus._device.private import empty_tensor

Storage = torch.UntypedStorage


def contents(storage: Any) -> Any:
    """Return what a "jax" storage holds, a Buffer or bytes no tensor has given a dtype yet; else None."""
    if storage.device.type != "jax":
        return None
    found = getattr(storage, "_buffer", None)
    return found if found is not None else getattr(storage, "_bytes", None)


def from_bytes(data: Any) -> Storage:
    """Return a new "jax" storage of these bytes, kept on the host until a tensor says what dtype they are."""
    storage = empty_tensor((0,), torch.uint8).untyped_storage()
    storage._bytes = data  # type: ignore[attr-defined]
    return storage


def give_dtype(storage: Any, dtype: torch.dtype, size: Any, stride: Any) -> None:
    """Put the bytes of a new storage on the device as ``dtype``, in the shape its first tensor shows."""
    from isthmus._device.buffer import Buffer, Signature
    from isthmus._graph.layout import storage_shape
    from isthmus._runtime.dtypes import to_jax_dtype
    from isthmus._runtime.hosts import from_numpy

    data = storage._bytes
    if data.nbytes % dtype.itemsize == 0:
        data = data.view(to_jax_dtype(dtype))
    shape = storage_shape(tuple(size), tuple(stride)) if len(size) == len(stride) else ()
    if torch.Size(shape).numel() == data.size:
        data = data.reshape(shape)
    array = from_numpy(data)
    storage._buffer = Buffer(array, Signature.of(array))
    del storage._bytes


def _nbytes(storage: Any) -> int:
    held = contents(storage)
    return int(held.signature.nbytes if hasattr(held, "signature") else held.nbytes)


def _data_ptr(storage: Any) -> int:
    # No address a program could read: it only tells storages apart, as pointers do.
    return storage._cdata << 16 if _nbytes(storage) else 0


def _host_bytes(storage: Any) -> Any:
    """Return the storage's bytes as a CPU tensor, not to be written."""
    held = contents(storage)
    if held is None:
        return torch.tensor([], dtype=torch.uint8).set_(storage)
    if not hasattr(held, "signature"):
        return torch.from_numpy(held)
    from isthmus._device import checks
    from isthmus._device.hosts import cpu_from_array
    from isthmus._runtime.dtypes import to_torch_dtype

    found = cpu_from_array(held.value, to_torch_dtype(held.value.dtype)).reshape(-1)
    checks.raise_pending()
    return found.view(torch.uint8) if found.numel() else torch.empty(0, dtype=torch.uint8)


def _cpu(storage: Any) -> Any:
    return _host_bytes(storage).clone().untyped_storage()


def _clone(storage: Any) -> Any:
    held = contents(storage)
    if not hasattr(held, "signature"):
        return from_bytes(held)
    from isthmus._device.buffer import Buffer

    made: Any = from_bytes(None)
    # Arrays never change, so the copy shares the value until either side is written.
    made._buffer = Buffer(held.value, held.signature)
    return made


def _copy_(storage: Any, source: Any, non_blocking: bool | None = None) -> Any:
    if _nbytes(storage) != source.nbytes():
        sizes = f"self was {_nbytes(storage)} bytes but src was {source.nbytes()} bytes"
        raise RuntimeError(f"size does not match, {sizes}")
    _replace(storage, _host_bytes(source).numpy())
    return storage


def _replace(storage: Any, data: Any) -> None:
    """Make ``data``, bytes of any length, what the storage holds."""
    held = contents(storage)
    if not hasattr(held, "signature"):
        storage._bytes = data.copy()
        return
    from isthmus._runtime.hosts import from_numpy

    shape, dtype = held.signature.shape, held.signature.dtype
    same = data.nbytes == held.signature.nbytes
    held.rebind(from_numpy(data.view(dtype).reshape(shape if same else -1)))


def _resize_(storage: Any, size: int) -> Any:
    old = _host_bytes(storage)
    new = torch.zeros(size, dtype=torch.uint8)
    kept = min(size, old.numel())
    new[:kept] = old[:kept]
    held = contents(storage)
    width = held.signature.dtype.itemsize if hasattr(held, "signature") else 1
    if size % width:
        raise RuntimeError(f"a 'jax' storage of {held.signature.dtype} cannot have a size of {size} bytes")
    _replace(storage, new.numpy())
    return storage


def _fill_(storage: Any, value: Any) -> Any:
    _replace(storage, torch.full((_nbytes(storage),), int(value), dtype=torch.uint8).numpy())
    return storage


def _set_item(storage: Any, index: Any, value: Any) -> None:
    host = _cpu(storage)
    host[index] = value
    _copy_(storage, host)


def _set_from_file(storage: Any, *args: Any) -> Any:
    host = torch.UntypedStorage(_nbytes(storage))
    host._set_from_file(*args)
    _copy_(storage, host)
    return storage


def _swap_data_ptr_(storage: Any, other: Any) -> None:
    """Exchange what two storages hold; every tensor on either sees it."""
    if contents(other) is None:
        raise RuntimeError(
            f"_swap_data_ptr_: storages must be on the same device, got {storage.device} and {other.device}"
        )
    sizes = _nbytes(storage), _nbytes(other)
    if sizes[0] != sizes[1] and 0 not in sizes:
        raise RuntimeError(
            f"_swap_data_ptr_: storages must have the same nbytes or one must have 0, got {sizes[0]} and {sizes[1]}"
        )
    held = [
        {name: getattr(each, name) for name in ("_buffer", "_bytes") if hasattr(each, name)}
        for each in (storage, other)
    ]
    for each, old, new in ((storage, *held), (other, *reversed(held))):
        for name in old:
            delattr(each, name)
        for name, value in new.items():
            setattr(each, name, value)


def _refuse(storage: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "a tensor on device 'jax' cannot be shared with another process; send tensor.cpu() instead"
    )


def _on_host(name: str) -> Callable[..., Any]:
    return lambda storage, *args, **kwargs: getattr(_cpu(storage), name)(*args, **kwargs)


_METHODS: dict[str, Callable[..., Any]] = {
    "nbytes": _nbytes,
    "size": _nbytes,
    "__len__": _nbytes,
    "data_ptr": _data_ptr,
    "cpu": _cpu,
    "clone": _clone,
    "copy_": _copy_,
    "resize_": _resize_,
    "fill_": _fill_,
    "__setitem__": _set_item,
    "_set_from_file": _set_from_file,
    "_swap_data_ptr_": _swap_data_ptr_,
    "is_shared": lambda storage: False,
    "resizable": lambda storage: True,
    **{name: _on_host(name) for name in ("__getitem__", "__iter__", "tolist", "_write_file", "_byteswap")},
    **dict.fromkeys(("share_memory_", "_share_memory", "_share_fd_cpu_", "_share_filename_cpu_"), _refuse),
}


def install() -> None:
    """Teach torch's storages, tensors and printing about the device; others keep torch's methods."""
    for name, ours in _METHODS.items():
        if hasattr(Storage, name):
            setattr(Storage, name, _for_ours(getattr(Storage, name), ours))
    Storage.__new__ = _constructor(Storage.__new__)  # type: ignore[method-assign, assignment]
    _install_on_tensors()
    _install_printing()


def _for_ours(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return theirs(self, *args, **kwargs) if contents(self) is None else ours(self, *args, **kwargs)

    method.__doc__, method.__name__ = theirs.__doc__, theirs.__name__
    return method


def _constructor(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "jax":
            return theirs(cls, *args, **kwargs)
        # torch would ask an allocator that does not exist and end the process.
        from isthmus._device.module import check_device

        check_device(device)
        kwargs.pop("device")
        return from_bytes(torch.tensor([], dtype=torch.uint8).set_(theirs(cls, *args, **kwargs)).numpy())

    return new


def _install_on_tensors() -> None:
    tensor = torch.Tensor
    data_ptr, dlpack, dlpack_device = tensor.data_ptr, tensor.__dlpack__, tensor.__dlpack_device__
    pin_memory = tensor.pin_memory

    def pointer(self: Any) -> int:
        if self.device.type != "jax" or contents(self.untyped_storage()) is None:
            return int(data_ptr(self))
        start = self.untyped_storage().data_ptr()
        return start + self.storage_offset() * self.dtype.itemsize if start and self.numel() else 0

    def export(self: Any, **options: Any) -> Any:
        return dlpack(self, **options) if self.device.type != "jax" else _export(self, options)

    def export_device(self: Any) -> Any:
        if self.device.type != "jax":
            return dlpack_device(self)
        from isthmus._device.buffer import buffer_of

        return buffer_of(self).value.__dlpack_device__()

    def pin(self: Any, device: Any = None) -> Any:
        if (device is not None and torch.device(device).type != "jax") or self.device.type != "cpu":
            return pin_memory(self) if device is None else pin_memory(self, device)
        # torch takes "jax" for the accelerator wherever it is there. XLA needs no pinned memory; CUDA does.
        return pin_memory(self, "cuda") if torch.cuda.is_available() else self

    for name, function in {
        "data_ptr": pointer,
        "__dlpack__": export,
        "__dlpack_device__": export_device,
        "pin_memory": pin,
    }.items():
        function.__doc__, function.__name__ = getattr(tensor, name).__doc__, name
        setattr(tensor, name, function)


def _export(tensor: Any, options: dict[str, Any]) -> Any:
    """Return a DLPack capsule of a copy: what receives it may write, and our arrays never change."""
    if tensor.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    if options.pop("copy", None) is False:
        raise BufferError("a tensor on device 'jax' is exported as a copy; copy=False cannot be had")
    from isthmus._device.hosts import copied
    from isthmus._device.transfer import array_of

    return copied(array_of(tensor)).__dlpack__(**options)


def _install_printing() -> None:
    theirs = torch._tensor_str._tensor_str

    def tensor_str(self: Any, indent: int) -> str:
        """Return the elements as text; a "jax" tensor crosses to the host once instead of op by op."""
        ours = self.device.type == "jax" and contents(self.untyped_storage()) is not None
        return str(theirs(self.detach().cpu() if ours else self, indent))

    torch._tensor_str._tensor_str = tensor_str
