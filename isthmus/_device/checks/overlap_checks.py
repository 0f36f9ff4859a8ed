"""Writes torch refuses: to memory shown twice, or from memory being written.

The CPU says which: it runs the op on tensors of the same layout, and only where a call looks suspicious.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from isthmus._device.checks.ask_cpu import AcceptedCalls, raise_overlap_refusal, tensors_of
from isthmus._graph.private import OpOverload, storage_id, storage_ids
from isthmus._graph.schema import schema_of

Values = tuple[Any, ...]
# Ops that write to some elements of their target; the CPU refuses others, or they write the same everywhere.
_SELECTING = ("aten::index_fill_", "aten::masked_fill_", "aten::index_put_", "aten::_index_put_impl_")
_accepted = AcceptedCalls("writes to shared storages that the CPU accepts", 4096)


def check_new(op: OpOverload, values: Values) -> None:
    """Raise what torch raises for a write whose layouts it refuses; asked once per signature."""
    targets = _targets(op, values)
    if any(_repeats(target) for target in targets):
        raise_overlap_refusal(op, values)
    elif _share(targets, values) and not _only_repeated(tensors_of(values)):
        check_aliases(op, values)


def check_each(op: OpOverload, values: Values) -> None:
    """Raise what torch raises for a call that writes, made by a kernel that has no plans."""
    targets = _targets(op, values)
    if any(_repeats(target) for target in targets):
        raise_overlap_refusal(op, values)
    elif _share(targets, values):
        check_aliases(op, values)


def _targets(op: OpOverload, values: Values) -> list[Tensor]:
    bound = schema_of(op).named(values)
    return tensors_of(tuple(bound[name] for name in schema_of(op).mutated))


def _share(targets: list[Tensor], values: Values) -> bool:
    """Return whether any target has the storage of another tensor of the call."""
    storages = storage_ids(tensors_of(values))
    return len(set(storages)) < len(storages) and any(
        [storages.count(storage_id(target)) > 1 for target in targets]
    )


def guarded(op: OpOverload, values: Values, plan: Callable[..., Any]) -> Callable[..., Any]:
    """Return the plan of a call that writes, made to look at each call where a target shares its storage."""
    if not _share(_targets(op, values), values):
        return plan
    plainly = _only_repeated(tensors_of(values))

    def checked(inputs: list[Any], values: Values) -> Any:
        # Where views begin is no part of the key, and it decides whether they overlap.
        if not (plainly and _only_repeated(tensors_of(values))):
            check_aliases(op, values)
        return plan(inputs, values)

    return checked


def _only_repeated(tensors: list[Tensor]) -> bool:
    """Return whether no storage is shared but by a tensor that is given twice."""
    shown = {id(tensor): tensor for tensor in tensors}.values()
    return len({*storage_ids(shown)}) == len(shown)


def repeats_in_lists(op: OpOverload, values: Values) -> bool:
    """Return whether a call on lists, which torch makes one by one, writes to a storage more than once."""
    if not schema_of(op).name.startswith("aten::_foreach_") or schema_of(op).returns:
        return False
    targets = _targets(op, values)
    return len({*storage_ids(targets)}) < len(targets)


def repeats(op: OpOverload, values: Values) -> bool:
    """Return whether a call that the CPU accepts writes different values to memory that its target shows twice.

    ``x.expand(3).index_fill_(0, index, 1)`` is deprecated and defined: what was selected is written, and the rest, the
    same memory, shows it. A functional result has both the new value and the old one for that memory.
    """
    return schema_of(op).name in _SELECTING and any(map(_repeats, _targets(op, values)))


def check_aliases(op: OpOverload, values: Values) -> None:
    """Raise what torch raises where a target and another tensor of the call share part of their memory."""
    layouts = [(storage_id(t), t.shape, t.stride(), t.storage_offset(), t.dtype) for t in tensors_of(values)]
    storages = [layout[0] for layout in layouts]
    if len(set(storages)) == len(storages):
        return
    key = (op, *[(storages.index(layout[0]), *layout[1:]) for layout in layouts])
    _accepted.ask(key, lambda: raise_overlap_refusal(op, values))


def _repeats(tensor: Tensor) -> bool:
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
