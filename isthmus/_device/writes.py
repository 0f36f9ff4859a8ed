"""Writes torch refuses: to memory shown twice, or from memory being written.

The CPU says which: it runs the op on tensors of the same layout, and only where a call looks suspicious.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from isthmus._device.buffer import buffer_of
from isthmus._graph.schema import schema_of

Values = tuple[Any, ...]
_LIMIT = 4096
_REFUSAL = "unsupported operation:"
_fine: set[tuple[Any, ...]] = set()


def check_new(op: OpOverload, values: Values) -> None:
    """Raise what torch raises for a write whose layouts it refuses; asked once per signature."""
    schema = schema_of(op)
    bound = schema.named(values)
    targets = [t for t in _flat([bound.get(n) for n in schema.mutated]) if isinstance(t, Tensor)]
    if any(_repeats(target) for target in targets):
        _ask(op, values)


def guarded(op: OpOverload, values: Values, plan: Callable[..., Any]) -> Callable[..., Any]:
    """Return the plan of a call that writes, made to look at each call where tensors share a storage."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors_in(values)]
    if len(set(storages)) == len(storages):
        return plan

    def checked(inputs: list[Any], values: Values) -> Any:
        # Where views begin is no part of the key, and it decides whether they overlap.
        check_aliases(op, values)
        return plan(inputs, values)

    return checked


def repeats_in_lists(op: OpOverload, values: Values) -> bool:
    """Return whether a call on lists, which torch makes one by one, writes to a storage more than once."""
    if not op._schema.name.startswith("aten::_foreach_") or op._schema.returns:
        return False
    bound = schema_of(op).named(values)
    targets = tensors_in(tuple(bound[name] for name in schema_of(op).mutated))
    return len({target.untyped_storage()._cdata for target in targets}) < len(targets)


def check_aliases(op: OpOverload, values: Values) -> None:
    """Raise what torch raises where a target and another tensor of the call share part of their memory."""
    tensors = tensors_in(values)
    shown = list({id(tensor): tensor for tensor in tensors}.values())
    if len({tensor.untyped_storage()._cdata for tensor in shown}) == len(shown):
        return  # a tensor given twice, as an optimizer gives its gradients
    layouts = [
        (t.untyped_storage()._cdata, t.shape, t.stride(), t.storage_offset(), t.dtype) for t in tensors
    ]
    storages = [layout[0] for layout in layouts]
    if len(set(layouts)) == len(set(storages)):
        return  # what shares memory shares all of it
    key = (op, *[(storages.index(layout[0]), *layout[1:]) for layout in layouts])
    if key not in _fine:
        _ask(op, values)
        if len(_fine) >= _LIMIT:
            _fine.clear()
        _fine.add(key)


def _ask(op: OpOverload, values: Values) -> None:
    """Run the op on CPU tensors that lie in memory as these do, for the refusal it may meet."""
    args, kwargs = schema_of(op).split(stand_ins(values))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            op(*args, **kwargs)
        except RuntimeError as error:
            if _REFUSAL in str(error):
                raise error.with_traceback(None) from None


def stand_ins(values: Values) -> Values:
    """Return a call's arguments with tensors of zeros on the CPU that lie in memory as those of the device do."""
    bases: dict[int, Tensor] = {}
    return tuple(_stand_in(value, bases) for value in values)


def _stand_in(value: Any, bases: dict[int, Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_stand_in(item, bases) for item in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return None
    if not isinstance(value, Tensor) or value.device.type != "jax":
        return value
    nbytes, width = buffer_of(value).signature.nbytes, value.dtype.itemsize
    base = bases.setdefault(value.untyped_storage()._cdata, torch.zeros(nbytes, dtype=torch.uint8))
    typed = base[: nbytes // width * width].view(value.dtype)
    return typed.as_strided(value.shape, value.stride(), value.storage_offset())


def _repeats(tensor: Tensor) -> bool:
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def tensors_in(values: Values) -> list[Tensor]:
    """Return the "jax" tensors among the arguments of a call, those in lists included."""
    return [v for v in _flat(values) if isinstance(v, Tensor) and v.device.type == "jax"]


def _flat(values: Any) -> list[Any]:
    return [item for v in values for item in (v if isinstance(v, (list, tuple)) else (v,))]
