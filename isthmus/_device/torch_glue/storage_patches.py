"""What torch and its users do with a storage as an object: copy, save, load, measure, compare by pointer.

torch keeps no memory behind a "jax" storage, so the methods that look at memory are answered here for such
storages; every other storage gets torch's own. The methods are replaced with the first tensor on "jax"; from then on
those of other devices pay for one more Python call, which is kept under 50 ns (benchmarks/import.py): where torch says
0 for "jax", it is asked first, elsewhere an attribute that only "jax" storages have is looked up. A subclass for "jax"
storages would cost others nothing, but torch compares the type of a storage in many places (``torch.is_storage``).
Loading this file loads no JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from isthmus._device.core.mode import reason
from isthmus._device.torch_glue import patches
from isthmus._device.torch_glue.private import (
    contents,
    empty_tensor,
    hide_from_dynamo,
    read_storage,
    set_contents,
)
from isthmus._graph.private import address_of

Storage = torch.UntypedStorage


class Bytes:
    """What a storage holds that no tensor has given a dtype yet: a NumPy array of bytes, on the host."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return int(self.data.nbytes)


def from_bytes(data: Any) -> Storage:
    """Return a new "jax" storage of these bytes, kept on the host until a tensor says what dtype they are."""
    storage = empty_tensor((0,), torch.uint8).untyped_storage()
    set_contents(storage, Bytes(data))
    return storage


def give_dtype(storage: Any, dtype: torch.dtype, size: Any, stride: Any) -> None:
    """Put the bytes of a new storage on the device as ``dtype``, in the shape its first tensor shows."""
    from isthmus._device.core.buffer import Buffer, Signature
    from isthmus._graph.layout import storage_shape
    from isthmus._runtime.dtypes import to_jax_dtype
    from isthmus._runtime.host_arrays import from_numpy

    data = contents(storage).data
    if data.nbytes % dtype.itemsize == 0:
        data = data.view(to_jax_dtype(dtype))
    shape = storage_shape(tuple(size), tuple(stride)) if len(size) == len(stride) else ()
    if torch.Size(shape).numel() == data.size:
        data = data.reshape(shape)
    array = from_numpy(data)
    set_contents(storage, Buffer(array, Signature.of(array)))


def _nbytes(storage: Any) -> int:
    held = contents(storage)
    if held is None:
        return 0
    return held.nbytes if type(held) is Bytes else int(held.signature.nbytes)


def _data_ptr(storage: Any) -> int:
    # No address a program could read: it only tells storages apart, as pointers do.
    return address_of(storage) << 16 if _nbytes(storage) else 0


def _host_bytes(storage: Any) -> Any:
    """Return the storage's bytes as a CPU tensor, not to be written."""
    held = contents(storage)
    if held is None:
        return torch.tensor([], dtype=torch.uint8).set_(storage)
    if type(held) is Bytes:
        return torch.from_numpy(held.data)
    from isthmus._device.checks import value_checks
    from isthmus._device.core.host_tensors import cpu_from_array
    from isthmus._runtime.dtypes import to_torch_dtype

    with reason("the bytes of a storage"):
        array = held.value
    elements = cpu_from_array(array, to_torch_dtype(array.dtype)).reshape(-1)
    value_checks.raise_pending()
    return elements.view(torch.uint8) if elements.numel() else torch.empty(0, dtype=torch.uint8)


def _cpu(storage: Any) -> Any:
    return _host_bytes(storage).clone().untyped_storage()


def _clone(storage: Any) -> Any:
    held = contents(storage)
    if type(held) is Bytes:
        return from_bytes(held.data)
    from isthmus._device.core.buffer import Buffer

    clone = from_bytes(None)
    # Arrays never change, so the copy shares the value until either side is written.
    with reason("a copy of a storage"):
        set_contents(clone, Buffer(held.value, held.signature))
    return clone


def _copy_(storage: Any, source: Any, non_blocking: bool | None = None) -> Any:
    if _nbytes(storage) != source.nbytes():
        sizes = f"self was {_nbytes(storage)} bytes but src was {source.nbytes()} bytes"
        raise RuntimeError(f"size does not match, {sizes}")
    _replace(storage, _host_bytes(source).numpy())
    return storage


def _replace(storage: Any, data: Any) -> None:
    """Make ``data``, bytes of any length, what the storage holds."""
    held = contents(storage)
    if type(held) is Bytes:
        held.data = data.copy()
        return
    from isthmus._runtime.host_arrays import from_numpy

    shape, dtype = held.signature.shape, held.signature.dtype
    same = data.nbytes == held.signature.nbytes
    before = held.signature.nbytes
    held.rebind(from_numpy(data.view(dtype).reshape(shape if same else -1)))
    if data.nbytes < before:
        signature = held.signature
        held.signature = type(signature).intern(
            signature.shape, dtype, signature.traced, True, signature.sharding
        )


def _resize_(storage: Any, size: int) -> Any:
    old = _host_bytes(storage)
    new = torch.zeros(size, dtype=torch.uint8)
    length = min(size, old.numel())
    new[:length] = old[:length]
    held = contents(storage)
    width = 1 if type(held) is Bytes else held.signature.dtype.itemsize
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
    read_storage(host, *args)
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
    ours, theirs = contents(storage), contents(other)
    set_contents(storage, theirs)
    set_contents(other, ours)


def _refuse(storage: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "a tensor on device 'jax' cannot be shared with another process; send tensor.cpu() instead"
    )


def _on_host(name: str) -> Callable[..., Any]:
    return lambda storage, *args, **kwargs: getattr(_cpu(storage), name)(*args, **kwargs)


_METHODS: dict[str, Callable[..., Any]] = {
    "__len__": _nbytes,
    "nbytes": _nbytes,
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
    **{name: _on_host(name) for name in ("__getitem__", "__iter__", "tolist", "_write_file", "_byteswap")},
    **dict.fromkeys(("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_"), _refuse),
}


def install_on_import() -> None:
    """Answer what torch reaches before there is a tensor on the device."""
    patches.replace("torch.UntypedStorage", "__new__", _constructor)
    patches.replace("torch.Tensor", "pin_memory", _pinning)


def install() -> None:
    """Teach torch's storages, tensors and printing about the device; others keep torch's methods."""
    for name in _METHODS:
        patches.replace("torch.UntypedStorage", name, functools.partial(_storage_method, name=name))
    patches.replace("torch.Tensor", "data_ptr", _tensor_pointer)
    patches.replace("torch.Tensor", "__dlpack__", _dlpack)
    patches.replace("torch.Tensor", "__dlpack_device__", _dlpack_device)
    patches.replace("torch._tensor_str", "_tensor_str", _printing)


def _storage_method(theirs: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return torch's method with a way for "jax" storages, in the form that costs other storages least."""
    # Each form reads the attribute that ``private.contents`` reads: a call of ours would double what others pay.
    ours = _METHODS[name]
    if name == "__len__":
        theirs = Storage.nbytes  # the same number, by a shorter way than through the slot

    def measured(self: Any) -> Any:
        # torch's is 0 for "jax", and ours for an empty storage elsewhere. While a graph is traced it may be a SymInt:
        # to ask whether that is 0 would put a guard on its size.
        number = theirs(self)
        return ours(self) if number.__class__ is int and number == 0 else number

    def shared(self: Any) -> Any:
        return theirs(self) and getattr(self, "_buffer", None) is None  # torch says so of every "jax" storage

    def plain(self: Any) -> Any:
        return theirs(self) if getattr(self, "_buffer", None) is None else ours(self)

    def with_one(self: Any, value: Any, /) -> Any:
        return theirs(self, value) if getattr(self, "_buffer", None) is None else ours(self, value)

    def copy_(self: Any, source: Any, non_blocking: Any = None) -> Any:
        if getattr(self, "_buffer", None) is None:
            if getattr(source, "_buffer", None) is not None:
                source = source.cpu()  # torch would read 0 bytes
            return theirs(self, source) if non_blocking is None else theirs(self, source, non_blocking)
        return ours(self, source, non_blocking)

    def general(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_buffer", None) is None:
            return theirs(self, *args, **kwargs)
        return ours(self, *args, **kwargs)

    forms: dict[str, Any] = {
        **dict.fromkeys(("nbytes", "__len__", "data_ptr"), measured),
        **dict.fromkeys(("cpu", "clone", "__iter__", "tolist"), plain),
        **dict.fromkeys(("resize_", "fill_", "__getitem__"), with_one),
        "copy_": copy_,
        "is_shared": shared,
    }
    return _as(name, theirs, forms.get(name, general))


def _as(name: str, theirs: Callable[..., Any], ours: Any) -> Callable[..., Any]:
    """Return ``ours`` under the name of what it replaces, and not to be compiled when Dynamo's code calls it."""
    ours.__doc__, ours.__name__ = theirs.__doc__, name
    hide_from_dynamo(ours)
    return ours  # type: ignore[no-any-return]


_ABSENT = object()


def _constructor(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def new(cls: Any, size: Any = _ABSENT, /, **options: Any) -> Any:
        # In this order it costs storages of other devices least: most are asked for by their size alone.
        if not options and size is not _ABSENT:
            return theirs(cls, size)
        device = options.get("device")
        args = () if size is _ABSENT else (size,)
        if device is None or (device if type(device) is torch.device else torch.device(device)).type != "jax":
            return theirs(cls, *args, **options)
        if options.get("allocator") is not None:
            return theirs(cls, *args, **options)  # which refuses both together
        # torch would ask an allocator that does not exist and end the process.
        from isthmus._device.torch_glue.registration import load
        from isthmus._device.torch_glue.torch_jax import check_device

        check_device(device)
        load()
        del options["device"]
        return from_bytes(torch.tensor([], dtype=torch.uint8).set_(theirs(cls, *args, **options)).numpy())

    return new


def _tensor_pointer(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def data_ptr(self: Any) -> Any:
        # torch counts the offset of a "jax" tensor from address 0, and no storage is that long; other tensors have
        # higher addresses on 64-bit systems as a rule, and it is no more than one: below, the device is asked for.
        address = theirs(self)
        if address > 1 << 40:
            return address
        return _pointer(self, address)

    return _as("data_ptr", theirs, data_ptr)


def _pointer(tensor: Any, address: int) -> int:
    """Return a number in place of the address of a "jax" tensor's first element, ``address`` for any other tensor."""
    if tensor.is_cpu or tensor.device.type != "jax" or not _is_stored(tensor):
        return address
    start = _data_ptr(tensor.untyped_storage())
    return start + tensor.storage_offset() * tensor.dtype.itemsize if start and tensor.numel() else 0


def _is_stored(tensor: Any) -> bool:
    """Return whether a tensor has a buffer of its own; a sparse one has those of its parts."""
    return tensor.layout is torch.strided and contents(tensor.untyped_storage()) is not None


def _pinning(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def pin_memory(self: Any, device: Any = None) -> Any:
        if (device is not None and torch.device(device).type != "jax") or self.device.type != "cpu":
            return theirs(self) if device is None else theirs(self, device)
        # torch takes "jax" for the accelerator wherever it is there. XLA needs no pinned memory; CUDA does.
        return theirs(self, "cuda") if torch.cuda.is_available() else self

    return _as("pin_memory", theirs, pin_memory)


def _dlpack(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def __dlpack__(self: Any, **options: Any) -> Any:
        if self.is_cpu or self.device.type != "jax":
            return theirs(self, **options) if options else theirs(self)
        return _export(self, options)

    return _as("__dlpack__", theirs, __dlpack__)


def _dlpack_device(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def __dlpack_device__(self: Any) -> Any:
        if self.is_cpu or self.device.type != "jax":
            return theirs(self)
        from isthmus._device.core.buffer import buffer_of

        with reason("DLPack"):
            return buffer_of(self).value.__dlpack_device__()

    return _as("__dlpack_device__", theirs, __dlpack_device__)


def _export(tensor: Any, options: dict[str, Any]) -> Any:
    """Return a DLPack capsule of a copy: what receives it may write, and our arrays never change."""
    if tensor.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    if options.pop("copy", None) is False:
        raise BufferError("a tensor on device 'jax' is exported as a copy; copy=False cannot be had")
    from isthmus._device.core.host_tensors import copied
    from isthmus._device.core.transfers import array_of

    with reason("DLPack"):
        array = array_of(tensor)
    return copied(array).__dlpack__(**options)


def _printing(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def _tensor_str(self: Any, indent: int) -> Any:
        """Return the elements as text; a "jax" tensor crosses to the host once instead of op by op."""
        if self.is_cpu or self.device.type != "jax" or not _is_stored(self):
            return theirs(self, indent)
        with reason("print"):
            shown = self.detach().cpu()
        return theirs(shown, indent)

    return _tensor_str
