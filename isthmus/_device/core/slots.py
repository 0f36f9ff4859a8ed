"""Slots: how a program finds the arguments of a call among its inputs, and stores its results.

An entry flattens a call into a list of inputs; a slot per argument says where in that list the argument is. For
``torch.clamp(x[2:], 0.5, None)``, whose view has an offset, the inputs are ``[array, offset, number]`` and::

    self: TensorSlot(index=0, offset_index=1, spec=Spec(...))   # read through its strides
    min:  NumberSlot(index=2, kind=float)                       # a number known at run time
    max:  Static(None)                                          # compiled in

``plan.py`` makes slots for a new key, ``fill`` reads the arguments while the program is traced, ``store`` lays a result
out as torch announced it. ``mutation.py`` and ``_dynamo/specialization.py`` write through ``TensorSlot.write``. Slots
number inputs in the order in which ``entry.py`` appends them; if the two disagree, programs read the wrong arrays.
"""

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
        # A storage may hold another dtype than the view shows (``view(dtype)``): bits are reinterpreted.
        storage = reinterpret(inputs[self.index], to_jax_dtype(self.spec.dtype))
        return strided.read(storage, self.spec.size, self.spec.stride, self.offset(inputs))

    def write(
        self, storage: Array, inputs: Sequence[Array], new: Array, differentiable: bool = True
    ) -> Array:
        """Return the storage with the view's elements replaced by ``new``.

        Elements beside the view keep every bit, unless JAX may differentiate this: bit casts have no derivative.
        """
        dtype, own = storage.dtype, to_jax_dtype(self.spec.dtype)
        new = cast(new, own)
        # The view has another dtype than its storage: written as bits, and turned back below.
        if dtype != own:
            # A view of another dtype: floats of two bytes are written as integers, since XLA changes their nans.
            new = strided.bits_of(new)
        typed = reinterpret(storage, new.dtype)
        # A result may be smaller than its target, as torch broadcasts it into it.
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
    """Return how the program finds an argument among its inputs, which are numbered as ``entry.py`` appends them."""
    if isinstance(value, torch.Tensor):
        # Taken even where nothing follows: the entry appended an array here.
        array_index = next(index)
        # A scalar of the CPU comes as an array of its own, whatever its offset is there.
        has_offset = value.device.type == "jax" and value.storage_offset() != 0
        return TensorSlot(array_index, next(index) if has_offset else None, Spec.of(value))
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
    # Lowerings speak JAX's dtypes throughout.
    return to_jax_dtype(slot.value) if isinstance(slot.value, torch.dtype) else slot.value


def store(result: Array, spec: Spec | None, op: Any) -> Array:
    """Return a result as the storage of a new tensor with this spec; it must be what torch said it would be."""
    if spec is None:
        return None
    dtype = to_jax_dtype(spec.dtype)
    if result is None or tuple(result.shape) != spec.size or result.dtype != dtype:
        got = "nothing" if result is None else f"{result.dtype}{list(result.shape)}"
        raise LoweringError(f"the lowering of {op} gave {got} where torch gives {dtype}{list(spec.size)}")
    # A dense layout is a permutation of the dims: there are no gaps to fill.
    if is_dense(spec.size, spec.stride):
        return result.transpose(storage_order(spec.size, spec.stride))
    # Strides with gaps (a resized target's, a recorded argument's): zeros lie between the elements.
    storage = jnp.zeros(storage_shape(spec.size, spec.stride), dtype)
    return strided.write(storage, result, spec.size, spec.stride)


def contiguous_specs(function: Callable[..., Any], examples: Sequence[Any]) -> list[Spec | None]:
    """Return the specs of what ``function`` computes, for an op torch has no Meta kernel for."""
    return [None if leaf is None else _contiguous(leaf) for leaf in jax.eval_shape(function, *examples)]


def _contiguous(leaf: Any) -> Spec:
    return Spec(leaf.shape, contiguous_strides(leaf.shape), to_torch_dtype(leaf.dtype))
