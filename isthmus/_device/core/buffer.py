"""Buffers: the array behind a storage, and the one place that makes tensors on arrays.

torch knows nothing of JAX arrays. A "jax" tensor is torch's own plain tensor on a storage without memory; a ``Buffer``
hangs on the storage as a Python attribute. Views share the storage, so they share the buffer, and aliasing is torch's::

    x = torch.zeros(4, 6, device="jax")     # storage -> Buffer(held=array f32[4, 6], signature=f32[4, 6])
    y = x[1:].t()                           # same storage, other sizes, strides and offset
    y.add_(1)                               # a program returns the whole new storage; buffer.held = that array
    x.sum()                                 # reads the new array

The elements of ``held`` in row-major order are the elements of the storage in memory order; the shape is whatever
makes reading cheap (``_graph/layout.storage_shape``), and ``strided.py`` reads views of it.

``buffer_of`` and ``set_buffer`` are how the package gets at a tensor's buffer. The generated entries (``entry.py``,
``_dynamo/fast_path.py``) and ``make`` below read the attribute themselves, as a call costs 50 ns.

What can go wrong: a write that sets ``held`` while a marker is there (see ``bind``), and a tensor made without
``capture.note_own`` while isthmus.jit records, which would take it for an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from isthmus import _caches
from isthmus._device.core import donation, mode
from isthmus._device.torch_glue.private import contents, empty_tensor, restride, set_contents
from isthmus._graph.layout import Spec, contiguous_strides, is_as_made, span, storage_shape
from isthmus._graph.nodes import Node
from isthmus._runtime import placement
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus._runtime.private import is_traced
from isthmus.errors import IsthmusError

Array = Any


class Signature:
    """Shape and dtype of a buffer's value and whether it is a tracer; interned, so compared by identity.

    ``sharding`` says how the value is split over a mesh: None at home (``_runtime/placement.py``). ``shrunk`` marks a
    storage that was made shorter: tensors may show more than it has, so its plans check each call.
    Signatures are dropped only with all that compares them with ``is``, keys and guards (``forget``); there are as many
    as distinct shapes.
    """

    __slots__ = ("dtype", "nbytes", "shape", "sharding", "shrunk", "traced")
    _known: ClassVar[dict[tuple[Any, ...], Signature]] = {}

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], traced: bool, shrunk: bool, sharding: Any
    ) -> None:
        self.shape, self.dtype, self.traced, self.shrunk = shape, dtype, traced, shrunk
        self.sharding = sharding
        self.nbytes = math.prod(shape) * dtype.itemsize

    @classmethod
    def intern(
        cls,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        traced: bool = False,
        shrunk: bool = False,
        sharding: Any = None,
    ) -> Signature:
        """Return the one signature with these parts."""
        # ``setdefault`` and not an assignment: two threads may get here at once, and keys are compared by
        # identity, so both must leave with the same object.
        key = (shape, dtype, traced, shrunk, sharding)
        return cls._known.get(key) or cls._known.setdefault(key, cls(*key))

    @classmethod
    def of(cls, value: Array) -> Signature:
        """Return the signature of ``value``."""
        shape, dtype = tuple(value.shape), value.dtype
        return cls.intern(shape, dtype, is_traced([value]), False, placement.sharding_of(value))

    @classmethod
    def forget(cls) -> None:
        """Drop all signatures, so that nothing that was compiled fits any more; every buffer must get a new one."""
        cls._known.clear()

    def __repr__(self) -> str:
        split = "" if self.sharding is None else f" {self.sharding}"
        return f"{self.dtype}{list(self.shape)}{' traced' if self.traced else ''}{split}"


# Listed and never cleared: keys compare signatures by identity, so buffers that live need the ones that are there.
_caches.register("signatures of arrays", None, lambda: len(Signature._known), lambda: None)


class Buffer:
    """The contents of a storage: an array whose elements, in row-major order, are the storage's.

    ``held`` may also be a node that is to be computed (lazy mode), a marker while the array is elsewhere
    (``donation.MARKERS``), or ``Lost``; ``value`` is always an array.
    """

    __slots__ = ("__weakref__", "held", "recorder", "signature")
    recorder: int
    """The thread that recorded the node it holds; of no meaning while it holds none."""

    def __init__(self, held: Array | Node, signature: Signature) -> None:
        self.held, self.signature = held, signature

    @property
    def value(self) -> Array:
        """Return the array, computed if it has only been recorded."""
        # A tracer belongs to a JAX trace on this thread, which is none of the recording's business.
        if mode.current.capture is not None and not self.signature.traced:
            return mode.current.capture.read(self)
        while True:
            # Read once: another thread may change it at any time.
            held = self.held
            if type(held) is Node:
                # Runs the recorded graph, which replaces the node in every buffer that it computes.
                held = mode.current.materialise(self)
                if type(held) is Node:
                    raise IsthmusError("this tensor was recorded in a trace that is gone")
            if type(held) in donation.MARKERS:
                held = donation.settled(self)
            # A node again: another thread has recorded a write while this one waited.
            if type(held) is not Node:
                break
        if type(held) is Lost:
            raise held.error()
        return held

    def bind(self, value: Array) -> None:
        """Replace the contents by an array of the same shape and dtype; every tensor on the storage sees it.

        ``held`` may be set instead where the call that computed ``value`` read this buffer: it failed for a marker.
        """
        if type(self.held) in donation.ELSEWHERE:
            # A program that keeps the old array would otherwise go on with that one.
            donation.settled(self)
        self.held = value

    def compute(self, value: Array) -> None:
        """Replace the node it holds by the node's array; where XLA was to choose how it is split, it has."""
        self.held = value
        if self.signature.sharding is placement.OPEN:
            # Until now it was not known how XLA would split it, so its signature said OPEN; plans need the real one.
            self.signature = Signature.of(value)

    def rebind(self, value: Array) -> None:
        """Replace the contents by an array of any shape and dtype."""
        self.bind(value)
        self.signature = Signature.of(value)


class Lost:
    """Held by a buffer whose program failed after the old array was donated: there is nothing left to read."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause

    def error(self) -> Exception:
        """Return the exception for a read."""
        return IsthmusError(f"this tensor was never computed, because its program failed: {self.cause}")


def buffer_of(tensor: torch.Tensor) -> Buffer:
    """Return the buffer behind a "jax" tensor; raise torch's error for two devices where it has none."""
    try:
        # A storage of another device has no such attribute; a sparse tensor has no storage at all.
        return tensor.untyped_storage()._buffer  # type: ignore[attr-defined]
    except AttributeError:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, jax:0 and "
            f"{tensor.device}!"
        ) from None
    except NotImplementedError:
        raise IsthmusError(
            f"a {str(tensor.layout).removeprefix('torch.')} tensor has no memory of its own, so it is no input or "
            f"result of a program, nor of isthmus.jit: give it its indices and values, which are tensors"
        ) from None


def buffer_if_any(tensor: torch.Tensor) -> Buffer | None:
    """Return the buffer behind a tensor, None for tensors of other devices and for functionalization's wrappers."""
    return contents(tensor.untyped_storage())  # type: ignore[no-any-return]


def set_buffer(tensor: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """Hang ``buffer`` on the tensor's storage, so that every view of it shares it; return the tensor."""
    set_contents(tensor.untyped_storage(), buffer)
    return tensor


def new_tensor(
    size: tuple[int, ...], stride: tuple[int, ...] | None, dtype: torch.dtype, buffer: Buffer
) -> torch.Tensor:
    """Return a new tensor of this layout on a new storage that holds ``buffer``.

    ``stride`` is None where torch's bare new tensor has the right strides already (``is_as_made``).
    """
    tensor = empty_tensor(size, dtype)
    if stride is not None:
        tensor = restride(tensor, size, stride)
    return set_buffer(tensor, buffer)


def wrap(value: Array, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a new contiguous tensor that holds ``value``."""
    size = tuple(value.shape)
    return wrap_strided(value, size, contiguous_strides(size), dtype or to_torch_dtype(value.dtype))


def wrap_strided(
    value: Array, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a new tensor of this layout on a new storage that holds ``value``."""
    buffer = Buffer(value, Signature.of(value))
    if mode.current.capture is not None:
        # A recording of isthmus.jit must know which tensors were made inside it, or it takes them for inputs.
        mode.current.capture.note_own(buffer)
    return new_tensor(size, None if is_as_made(size, stride) else stride, dtype, buffer)


def maker(spec: Spec, traced: bool, sharding: Any = None) -> Callable[[Array], torch.Tensor]:
    """Return ``wrap_strided`` for one layout, with all that depends on the layout alone computed now.

    Plans call it for each result of each call, so it has no call of ours inside. Tracers have signatures of their own.
    ``sharding`` is the one that the program gives the array.
    """
    size, stride, dtype = spec.size, spec.stride, spec.dtype
    if traced:
        # The signature is read off each value: that of a tracer says so, and has no sharding.
        return lambda value: wrap_strided(value, size, stride, dtype)
    signature = Signature.intern(storage_shape(size, stride), to_jax_dtype(dtype), sharding=sharding)
    contiguous = is_as_made(size, stride)

    def make(value: Array) -> torch.Tensor:
        # ``new_tensor`` written out, which saves 70 ns per result.
        tensor = empty_tensor(size, dtype)
        if not contiguous:
            tensor = restride(tensor, size, stride)
        tensor.untyped_storage()._buffer = Buffer(value, signature)  # type: ignore[attr-defined]
        return tensor

    return make


def check_reach(tensor: torch.Tensor) -> None:
    """Raise if a tensor shows more than its storage has, as one does whose storage was resized."""
    buffer = buffer_if_any(tensor) if tensor.device.type == "jax" else None
    if buffer is None or not tensor.numel():
        # An empty tensor shows nothing, wherever its offset says that it begins.
        return
    needed = (int(tensor.storage_offset()) + span(tensor.shape, tensor.stride())) * tensor.dtype.itemsize
    if needed > buffer.signature.nbytes:
        raise RuntimeError(
            f"a tensor of sizes {list(tensor.shape)}, strides {list(tensor.stride())} and storage offset "
            f"{tensor.storage_offset()} needs a storage of {needed} bytes, but its storage was resized to "
            f"{buffer.signature.nbytes} bytes"
        )


def storage_length(tensor: torch.Tensor) -> int:
    """Return how many elements of the tensor's dtype its storage holds."""
    return buffer_of(tensor).signature.nbytes // tensor.dtype.itemsize
