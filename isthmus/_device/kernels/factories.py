"""New tensors: ``empty``, ``zeros``, ``arange`` and their forms.

``empty`` is zeros, since a JAX array has contents (``core/zeros.py``).
``arange`` takes its bounds as run-time inputs and is compiled for its length alone. ``out=`` forms make a new tensor
and copy it.

They have kernels of their own, and no lowerings, since there is no tensor among their arguments: what is compiled
depends on a shape and a dtype alone, and the device that is named must be looked at (``check_device``).
``kernels/register.py`` registers them.

What can go wrong: a size beyond the memory must be refused before JAX counts its elements, in torch's words
(``memory.require``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isthmus._device.core import mode
from isthmus._device.core.buffer import Signature, buffer_of, storage_length, wrap, wrap_strided
from isthmus._device.core.dispatch import kernel_for
from isthmus._device.core.host_tensors import array_from_cpu
from isthmus._device.core.plan_cache import Generations
from isthmus._device.core.zeros import zeros
from isthmus._device.torch_glue.private import restride
from isthmus._device.torch_glue.torch_jax import check_device
from isthmus._graph.layout import contiguous_strides, storage_shape
from isthmus._ops.tensors.creation import count
from isthmus._runtime import compiler, placement
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus._runtime.host_arrays import device_number
from isthmus._runtime.private import is_tracing

_DEVICE = torch.device("jax", 0)  # named in recorded calls: without it torch would infer them on the CPU
_count_programs = Generations()


def empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    """Return a new tensor; its elements are zeros, which nothing promises."""
    size = tuple(size)
    for n in size:
        if n < 0:
            raise RuntimeError(f"Trying to create tensor with negative dimension {n}: {list(size)}")
    if memory_format in (None, torch.contiguous_format, torch.preserve_format):
        return empty_strided(size, contiguous_strides(size), dtype=dtype, device=device)
    stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    return empty_strided(size, stride, dtype=dtype, device=device)


def efficient_zeros(size: Any, **options: Any) -> Tensor:
    """Return zeros; torch's tensor that knows it is zero cannot be made from Python."""
    return empty(size, **options).zero_()


def empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    """Return a new tensor with this layout."""
    check_device(device)
    size, stride = tuple(size), tuple(stride)
    dtype = dtype or torch.get_default_dtype()
    if min(*size, *stride, 0, 0) < 0:
        torch.empty_strided(
            size, stride, dtype=dtype, device="cpu"
        )  # raises: torch has no negative sizes and strides
    if _are_recorded(size, stride):
        return kernel_for(torch.ops.aten.zeros.default)(size, dtype=dtype, device=_DEVICE)
    return wrap_strided(zeros(storage_shape(size, stride), to_jax_dtype(dtype)), size, stride, dtype)


def _are_recorded(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether zeros of this layout are recorded with the rest: a graph need not take them as an input."""
    return mode.current.lazy and not is_tracing() and stride == contiguous_strides(size)


def zeros_of(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    """Return zeros, which is what ``empty`` returns here too."""
    return empty(size, dtype=dtype, device=device)


def new_zeros(self: Tensor, size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    """Return zeros, by default in the dtype of ``self``."""
    if device is not None and device.type != "jax":
        return torch.zeros(size, dtype=dtype or self.dtype, device=device)
    if placement.home is not None:
        return _made_like(self, tuple(size), contiguous_strides(tuple(size)), dtype or self.dtype)
    return empty(size, dtype=dtype or self.dtype, device=device)


def zeros_like(
    self: Tensor, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any
) -> Tensor:
    """Return zeros in the layout of ``self``, dense."""
    dtype = dtype or self.dtype
    if device is not None and device.type != "jax":
        return torch.empty_like(self, dtype=dtype, device=device, memory_format=memory_format).zero_()
    # The usual case needs no Meta tensor.
    if memory_format is None and self.is_contiguous() and placement.home is None:
        return empty(self.shape, dtype=dtype, device=device)
    shadow = torch.empty_strided(self.shape, self.stride(), device="meta")
    stride = torch.empty_like(shadow, memory_format=memory_format or torch.preserve_format).stride()
    if placement.home is not None:
        return _made_like(self, tuple(self.shape), stride, dtype)
    return empty_strided(self.shape, stride, dtype=dtype, device=device)


def _made_like(self: Tensor, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that are split as the storage of ``self`` is, if they have its shape: an optimizer's state."""
    its = buffer_of(self).signature if self.device.type == "jax" else None
    shape, kind = storage_shape(size, stride), to_jax_dtype(dtype)
    if its is None or its.sharding is None or its.traced or its.shape != shape:
        return empty_strided(size, stride, dtype=dtype)
    if not _are_recorded(size, stride):
        array = zeros(shape, kind, None if its.sharding is placement.OPEN else its.sharding)
        return wrap_strided(array, size, stride, dtype)
    zeros_like_self = empty_strided(size, stride, dtype=dtype)
    buffer_of(zeros_like_self).signature = Signature.intern(shape, kind, sharding=its.sharding)
    return zeros_like_self


def follow_shardings() -> None:
    """Let ``empty_like`` and ``new_empty`` be split as their tensors are; called once there is a mesh.

    torch makes both of ``empty``, which costs less and does not show the tensor that the new one is like.
    """
    # Once: registering again would warn.
    if not _following:
        library = torch.library.Library("aten", "IMPL")
        library.impl("empty_like", zeros_like, "PrivateUse1")
        library.impl("new_empty", new_zeros, "PrivateUse1")
        _following.append(library)


_following: list[torch.library.Library] = []


def _count(length: int, dtype: Any, start: Any, step: Any) -> Any:
    return count(length, start, step, dtype)


def arange(
    start: Any,
    end: Any,
    step: Any = 1,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    """Return the numbers from ``start`` to ``end``; torch says how many, and only that is compiled for."""
    check_device(device)
    if (
        dtype is not None
        and not dtype.is_floating_point
        and not (type(start) is type(end) is type(step) is int)
    ):
        # How many steps of a fraction there are, and whether any, differs from dtype to dtype: as the CPU has it.
        return wrap(array_from_cpu(torch.arange(start, end, step, dtype=dtype, device="cpu")), dtype)
    if dtype is not None and _is_uncountable(dtype):
        torch.arange(
            start, end, step, dtype=dtype, device="cpu"
        )  # raises: torch has no kernel for this dtype
    shadow = torch.ops.aten.arange.start_step(start, end, step, dtype=dtype, device="meta")
    # Counting from 0 in lazy mode: the start is a number, and graphs of all starts are one.
    whole = type(start) is int and step == 1 and not shadow.is_floating_point()
    if mode.current.lazy and whole and not is_tracing():
        count_up = kernel_for(torch.ops.aten.arange.start_step)
        counted = count_up(0, shadow.shape[0], 1, dtype=shadow.dtype, device=_DEVICE)
        return counted.add_(start) if start else counted
    return _counted(shadow.shape[0], start, step, shadow.dtype)


def _is_uncountable(dtype: torch.dtype) -> bool:
    return dtype is torch.bool or dtype.is_complex


def _counted(length: int, start: Any, step: Any, dtype: torch.dtype) -> Tensor:
    first, stride = device_number(start), device_number(step)
    # The length is compiled in, start and step are inputs.
    key = (length, dtype, type(start), type(step))
    program = _count_programs.young.get(key)
    if program is None:
        counted = functools.partial(_count, length, to_jax_dtype(dtype))
        program = _count_programs.find(key, lambda: compiler.compile(counted, [first, stride]))
    return wrap(program(first, stride), dtype)


def range_(
    start: Any,
    end: Any,
    step: Any = 1,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    """Return the numbers from ``start`` to ``end``, which torch's old ``range`` includes."""
    check_device(device)
    dtype = dtype or torch.get_default_dtype()
    if _is_uncountable(dtype):
        torch.ops.aten.range.default(
            0, 1, dtype=dtype, device="cpu"
        )  # raises: torch has no kernel for this dtype
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if not (math.isfinite(start) and math.isfinite(end)):
        raise RuntimeError(f"unsupported range: {start} -> {end}")
    if (end - start) * step < 0:
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    return _counted(int((end - start) / step) + 1, start, step, dtype)


def arange_end(end: Any, **options: Any) -> Tensor:
    """Return the numbers from 0 to ``end``."""
    return arange(0, end, **options)


def _writing(make: Callable[..., Tensor], flat: bool = False) -> Callable[..., Tensor]:
    """Return a factory's ``out=`` form: made in the dtype of ``out``, which is resized if it must be.

    A ``flat`` factory writes its numbers into an ``out`` of any shape that has room for exactly so many.
    """

    def write(*args: Any, out: Tensor, **options: Any) -> Tensor:
        result = make(*args, **options, dtype=out.dtype, device=out.device)
        return write_out(out, result.view(out.shape) if flat and result.numel() == out.numel() else result)

    return write


def write_out(out: Tensor, result: Tensor) -> Tensor:
    """Copy a result into ``out``, resized if it must be."""
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def as_strided_scatter(
    self: Tensor, src: Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> Tensor:
    """Return a copy of ``self``, storage and strides included, with a view of any layout replaced."""
    # All of the storage: elements beside the view must survive.
    length, offset = storage_length(self), int(self.storage_offset())
    copied = restride(self, (length,), (1,)).clone()
    result = restride(copied, self.shape, self.stride(), offset)
    start = offset if storage_offset is None else storage_offset
    copied.as_strided(size, stride, start).copy_(src)
    return result


def _spaced_out_forms() -> dict[str, Callable[..., Tensor]]:
    overloads = ("", "Tensor_Tensor_", "Tensor_Scalar_", "Scalar_Tensor_")
    makers: dict[str, Any] = {"linspace": torch.linspace, "logspace": torch.logspace}
    return {f"{name}.{o}out": _writing(make, flat=True) for name, make in makers.items() for o in overloads}


KERNELS = {
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "_efficientzerotensor": efficient_zeros,
    "zeros": zeros_of,
    "zeros_like": zeros_like,
    "new_zeros": new_zeros,
    "arange": arange_end,
    "arange.start": arange,
    "arange.start_step": arange,
    "arange.start_out": _writing(arange, flat=True),
    "range.out": _writing(range_, flat=True),
    "eye.out": _writing(torch.eye),
    "eye.m_out": _writing(torch.eye),
    **_spaced_out_forms(),
    "range": range_,
    "range.step": range_,
    "as_strided_scatter": as_strided_scatter,
}
