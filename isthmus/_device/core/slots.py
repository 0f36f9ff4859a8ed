"""Slots: how a program finds the arguments of a call among its inputs, and stores its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from isthmus._device.core import strided
from isthmus._graph.arguments import NUMBERS
from isthmus._graph.layout import Spec, contiguous_strides, is_dense, storage_order, storage_shape
from isthmus._ops.common import Number, cast
from isthmus._ops.tensors.views import reinterpret
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus.errors import LoweringError

Array = Any


@dataclass(frozen=True)
class TensorSlot:
    """A tensor argument: the input that holds its storage, and the view of it."""

    index: int
    offset_index: int | None
    spec: Spec

    def read(self, inputs: Sequence[Array]) -> Array:
        """Return the view's elements."""
        storage = reinterpret(inputs[self.index], to_jax_dtype(self.spec.dtype))
        return strided.read(storage, self.spec.size, self.spec.stride, self.offset(inputs))

    def write(
        self, storage: Array, inputs: Sequence[Array], new: Array, differentiable: bool = True
    ) -> Array:
        """Return the storage with the view's elements replaced; every bit of it, unless JAX may differentiate this."""
        dtype, own = storage.dtype, to_jax_dtype(self.spec.dtype)
        new = cast(new, own)
        if dtype != own:
            new = strided.bits_of(new)
        typed = reinterpret(storage, new.dtype)
        new = jnp.broadcast_to(new, self.spec.size)
        write = strided.write if differentiable else strided.write_bits
        written = write(typed, new, self.spec.size, self.spec.stride, self.offset(inputs))
        return reinterpret(written, dtype).reshape(storage.shape)

    def offset(self, inputs: Sequence[Array]) -> Any:
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
    """Return how the program finds an argument among its inputs; in the order of ``dispatch.gather``."""
    if isinstance(value, torch.Tensor):
        at = next(index)
        has_offset = value.device.type == "jax" and value.storage_offset() != 0
        return TensorSlot(at, next(index) if has_offset else None, Spec.of(value))
    if isinstance(value, (list, tuple)):
        return [slot_for(item, dynamic, index) for item in value]
    if dynamic and type(value) in NUMBERS:
        return NumberSlot(next(index), type(value))
    return Static(value)


def fill(slot: Slot, inputs: Sequence[Array]) -> Any:
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
    if is_dense(spec.size, spec.stride):
        return result.transpose(storage_order(spec.size, spec.stride))
    storage = jnp.zeros(storage_shape(spec.size, spec.stride), dtype)
    return strided.write(storage, result, spec.size, spec.stride)


def contiguous_specs(function: Callable[..., Any], examples: Sequence[Any]) -> list[Spec | None]:
    """Return the specs of what ``function`` computes, for an op torch has no Meta kernel for."""
    return [None if leaf is None else _contiguous(leaf) for leaf in jax.eval_shape(function, *examples)]


def _contiguous(leaf: Any) -> Spec:
    return Spec(leaf.shape, contiguous_strides(leaf.shape), to_torch_dtype(leaf.dtype))
