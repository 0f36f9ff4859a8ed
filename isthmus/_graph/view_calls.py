"""Calls that read a view from the value of a storage, and write one back: view, permute, as_strided and its scatter.

A graph computes on values, a tensor is a view of a storage. The value of a storage is kept in the shape
``layout.storage_shape`` gives; a transposed matrix of size (3, 2) and strides (1, 3) is kept as (2, 3) and read by
``permute``. Lazy mode and ``torch.compile`` both read their arguments, lay out their results and write to storages by
the calls made here, so that passes see one form of each:

- ``read(storage, spec, offset)``: the calls that turn a storage into the elements a view shows;
- ``store(spec)``: the calls that turn a new result into the storage of a tensor with this layout;
- ``write(storage, spec, new, ...)``: the storage with the view's elements replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from isthmus._graph.layout import (
    Spec,
    contiguous_strides,
    is_dense,
    storage_order,
    storage_shape,
)
from isthmus._graph.nodes import Call, Input, Node, Type, call_of, node

_aten = torch.ops.aten


def read(storage: Type, spec: Spec, offset: bool) -> list[Call]:
    """Return the calls, one after another, that read a view of a storage.

    The view starts at the offset of its layout; or, with ``offset``, where the second input of the last call says.
    """
    calls, typed = _typed(storage, spec.dtype)
    size, stride = spec.size, spec.stride
    if offset or spec.offset:
        # An offset, compiled in or not, is a read of a part: no reshape can do that.
        return [*calls, _strided(typed, spec, with_offset=offset)]
    if typed.size == size and stride == contiguous_strides(size):
        return calls
    # As many elements as the storage has and no offset: nothing is left out, so no gather (as_strided) is needed.
    if math.prod(typed.size) == math.prod(size):
        if stride == contiguous_strides(size):
            return [*calls, view(typed, size)]
        if is_dense(size, stride):
            order = storage_order(size, stride)
            stored = tuple(size[d] for d in order)
            back = tuple(order.index(d) for d in range(len(size)))
            if typed.size != stored:
                calls.append(view(typed, stored))
            return [*calls, permute(Type(stored, spec.dtype), back)]
    return [*calls, _strided(typed, spec, with_offset=False)]


def _typed(storage: Type, dtype: torch.dtype) -> tuple[list[Call], Type]:
    """Return the calls that make a storage one of another dtype, and what it is then."""
    if storage.dtype == dtype:
        return [], storage
    # torch's view(dtype) regroups the last dim alone, so bytes are regrouped flat.
    flat = Type((math.prod(storage.size),), storage.dtype)
    typed = Type((storage.nbytes // dtype.itemsize,), dtype)
    again = call_of(_aten.view.dtype, {"self": Input(0), "dtype": dtype}, [typed])
    return ([] if storage.size == flat.size else [view(storage, flat.size)]) + [again], typed


def _strided(storage: Type, spec: Spec, *, with_offset: bool) -> Call:
    arguments: dict[str, object] = {"self": Input(0), "size": spec.size, "stride": spec.stride}
    if with_offset:
        arguments["storage_offset"] = Input(1)
    elif spec.offset:
        arguments["storage_offset"] = spec.offset
    return call_of(_aten.as_strided.default, arguments, [Type(spec.size, storage.dtype)])


def view(value: Type, size: tuple[int, ...]) -> Call:
    """Return the call that gives a value another size."""
    return call_of(_aten.view.default, {"self": Input(0), "size": size}, [Type(size, value.dtype)])


def permute(value: Type, order: tuple[int, ...]) -> Call:
    """Return the call that reorders a value's dims."""
    type = Type(tuple(value.size[d] for d in order), value.dtype)
    return call_of(_aten.permute.default, {"self": Input(0), "dims": order}, [type])


def cast(value: Type, dtype: torch.dtype) -> list[Call]:
    """Return the call that gives a value another dtype, if it needs one."""
    if value.dtype == dtype:
        return []
    return [call_of(_aten._to_copy.default, {"self": Input(0), "dtype": dtype}, [Type(value.size, dtype)])]


def expand(value: Type, size: tuple[int, ...]) -> list[Call]:
    """Return the call that repeats a value up to ``size``, if it needs one."""
    if value.size == size:
        return []
    return [call_of(_aten.expand.default, {"self": Input(0), "size": size}, [Type(size, value.dtype)])]


def store(spec: Spec) -> list[Call]:
    """Return the calls that lay a dense result of this spec out as its new storage."""
    # A layout with its dims in order is its own storage.
    order = tuple(storage_order(spec.size, spec.stride))
    if order == tuple(range(len(order))):
        return []
    return [permute(Type(spec.size, spec.dtype), order)]


def blank(spec: Spec) -> Call:
    """Return the call that makes a storage of zeros for this spec."""
    size = storage_shape(spec.size, spec.stride)
    return call_of(_aten.zeros.default, {"size": size, "dtype": spec.dtype}, [Type(size, spec.dtype)])


def replaces(storage: Type, spec: Spec, offset: bool) -> list[Call] | None:
    """Return the calls that turn a view's new elements into the whole storage, or None if some of the old remain."""
    size, stride = spec.size, spec.stride
    # Part of the storage stays, so its old value has to be read.
    if offset or spec.offset or storage.dtype != spec.dtype or math.prod(storage.size) != math.prod(size):
        return None
    if not is_dense(size, stride) or 0 in size:
        return None
    # Dense and as many elements: the write covers the storage, and its old value is not read at all.
    calls = store(spec)
    now = calls[-1].types[0] if calls else Type(size, spec.dtype)
    assert now is not None
    return calls if now.size == storage.size else [*calls, view(now, storage.size)]


def written_as(storage: Type, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which elements of a dtype are written to a storage of another one.

    Seen as booleans, the bytes beside them would become zeros and ones; and a backend may change the bits of nans where
    it moves narrow floats, which are no nans as the storage's own dtype.
    """
    if dtype == storage.dtype:
        return dtype
    # Booleans and bytes are written as bytes, two-byte floats as integers: bits are kept that way.
    if dtype == torch.bool or (dtype.is_floating_point and dtype.itemsize == 1):
        return torch.uint8
    return torch.int16 if dtype.is_floating_point and dtype.itemsize == 2 else dtype


def bits(value: Type, dtype: torch.dtype) -> list[Call]:
    """Return the call that gives a value the dtype it is written as, if it needs one."""
    if value.dtype == torch.bool or value.dtype == dtype:
        return cast(value, dtype)
    return [call_of(_aten.view.dtype, {"self": Input(0), "dtype": dtype}, [Type(value.size, dtype)])]


def scatter(storage: Type, spec: Spec, offset: bool) -> tuple[list[Call], Call, list[Call]]:
    """Return the calls before, at and after a write: the storage in the view's dtype, the write, the way back.

    The source of the write has the dtype ``written_as`` gives; the offset is as for ``read``.
    """
    spec = replace(spec, dtype=written_as(storage, spec.dtype))
    before, typed = _typed(storage, spec.dtype)
    arguments: dict[str, object] = {
        "self": Input(0),
        "src": Input(1),
        "size": spec.size,
        "stride": spec.stride,
    }
    if offset:
        arguments["storage_offset"] = Input(2)
    elif spec.offset:
        arguments["storage_offset"] = spec.offset
    write = call_of(_aten.as_strided_scatter.default, arguments, [typed])
    after, flat = _typed(typed, storage.dtype)
    return before, write, after if flat.size == storage.size else [*after, view(flat, storage.size)]


def shaped(new: Type, storage: Type, spec: Spec) -> list[Call]:
    """Return the calls that cast and expand a result to the elements that a view of a storage takes."""
    written = written_as(storage, spec.dtype)
    calls = cast(new, spec.dtype) + bits(Type(new.size, spec.dtype), written)
    return calls + expand(Type(new.size, written), spec.size)


def chained(calls: Iterable[Call], value: Node) -> Node:
    """Return the node at the end of calls of one input each, the first of them on ``value``."""
    for call in calls:
        value = node(call, value)
    return value


def read_node(storage: Node, spec: Spec, offset: Node | None = None) -> Node:
    """Return the node of the elements that a view of a storage shows."""
    calls = read(storage.type, spec, offset is not None)
    if offset is None:
        return chained(calls, storage)
    return node(calls[-1], chained(calls[:-1], storage), offset)


def write_node(storage: Node, spec: Spec, new: Node, offset: Node | None = None) -> Node:
    """Return the node of a storage whose elements that a view shows are replaced by ``new``."""
    new = chained(shaped(new.type, storage.type, spec), new)
    whole = replaces(storage.type, spec, offset is not None)
    if whole is not None:
        return chained(whole, new)
    # Element for element into the old storage; the way back restores its dtype and shape.
    before, write, after = scatter(storage.type, spec, offset is not None)
    extra = () if offset is None else (offset,)
    return chained(after, node(write, chained(before, storage), new, *extra))
