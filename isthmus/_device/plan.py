"""A plan: what a call with one signature compiles to, and how its results become tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isthmus._device import strided
from isthmus._device.buffer import buffer_of, storage_order, storage_shape
from isthmus._device.inference import Spec
from isthmus._device.reinterpret import reinterpret
from isthmus._ops.common import Number, cast
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus.errors import LoweringError

Array = Any
NUMBERS = (int, float, bool, complex)


@dataclass(frozen=True)
class TensorSlot:
    """A tensor argument: the input that holds its storage, and the view of it."""

    index: int
    offset_index: int | None
    spec: Spec

    def read(self, inputs: list[Array]) -> Array:
        """Return the view's elements."""
        storage = reinterpret(inputs[self.index], to_jax_dtype(self.spec.dtype))
        return strided.read(storage, self.spec.size, self.spec.stride, self.offset(inputs))

    def write(self, storage: Array, inputs: list[Array], new: Array) -> Array:
        """Return the storage with the view's elements replaced."""
        dtype = storage.dtype
        typed = reinterpret(storage, to_jax_dtype(self.spec.dtype))
        new = jnp.broadcast_to(cast(new, typed.dtype), self.spec.size)
        written = strided.write(typed, new, self.spec.size, self.spec.stride, self.offset(inputs))
        return reinterpret(written, dtype).reshape(storage.shape)

    def offset(self, inputs: list[Array]) -> Any:
        """Return where the view starts: 0, or an input."""
        return 0 if self.offset_index is None else inputs[self.offset_index]


@dataclass(frozen=True)
class NumberSlot:
    """A number known only at run time."""

    index: int
    kind: type


@dataclass(frozen=True)
class Static:
    """A value the program is compiled for."""

    value: Any


Slot = TensorSlot | NumberSlot | Static | list[Any]


def slot_for(value: Any, dynamic: bool, index: Iterator[int]) -> Slot:
    """Return how the program finds an argument among its inputs; the order is ``dispatch.gather``'s."""
    if isinstance(value, torch.Tensor):
        at = next(index)
        has_offset = value.device.type == "jax" and value.storage_offset() != 0
        return TensorSlot(at, next(index) if has_offset else None, Spec.of(value))
    if isinstance(value, (list, tuple)):
        return [slot_for(item, dynamic, index) for item in value]
    if dynamic and type(value) in NUMBERS:
        return NumberSlot(next(index), type(value))
    return Static(value)


def fill(slot: Slot, inputs: list[Array]) -> Any:
    """Return the argument as a lowering sees it."""
    if isinstance(slot, TensorSlot):
        return slot.read(inputs)
    if isinstance(slot, NumberSlot):
        return Number(inputs[slot.index], slot.kind)
    if isinstance(slot, list):
        return [fill(item, inputs) for item in slot]
    return to_jax_dtype(slot.value) if isinstance(slot.value, torch.dtype) else slot.value


def store(result: Array, spec: Spec | None, op: Any) -> Array:
    """Return a result as the storage of a new tensor with this spec; it must be what torch said it would be."""
    if spec is None:
        return None
    dtype = to_jax_dtype(spec.dtype)
    if result is None or tuple(result.shape) != spec.size or result.dtype != dtype:
        got = "nothing" if result is None else f"{result.dtype}{list(result.shape)}"
        raise LoweringError(f"the lowering of {op} gave {got} where torch gives {dtype}{list(spec.size)}")
    shape = storage_shape(spec.size, spec.stride)
    if len(shape) == len(spec.size):
        return result.transpose(storage_order(spec.size, spec.stride))
    return strided.write(jnp.zeros(shape, dtype), result, spec.size, spec.stride)


def contiguous_specs(function: Callable[..., Any], inputs: list[Array]) -> list[Spec]:
    """Return the specs of what ``function`` computes, for an op torch has no Meta kernel for."""
    from isthmus._runtime.compiler import abstract
    from isthmus._runtime.dtypes import to_torch_dtype

    shapes = jax.eval_shape(function, *[abstract(np.asarray(i) if np.isscalar(i) else i) for i in inputs])
    leaves = jax.tree.leaves(shapes)
    return [Spec(s.shape, strided.contiguous_strides(s.shape), to_torch_dtype(s.dtype)) for s in leaves]


def target_slots(slots: dict[str, Slot], names: tuple[str, ...]) -> list[TensorSlot]:
    """Return the slots of the tensors a call writes to, in order."""
    found: list[TensorSlot] = []
    for name in names:
        slot = slots[name]
        found += [s for s in (slot if isinstance(slot, list) else [slot]) if isinstance(s, TensorSlot)]
    return found


def target_tensors(arguments: dict[str, Any], names: tuple[str, ...]) -> list[torch.Tensor]:
    """Return the tensors a call writes to, in the order of ``target_slots``."""
    found: list[torch.Tensor] = []
    for name in names:
        value = arguments[name]
        found += [t for t in (value if isinstance(value, (list, tuple)) else [value]) if t is not None]
    return found


def buffers(tensors: list[torch.Tensor]) -> list[Any]:
    """Return the buffer behind each tensor."""
    return [buffer_of(tensor) for tensor in tensors]
