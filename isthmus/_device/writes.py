"""Writes torch refuses: to memory shown twice, from memory being written, of numbers the target cannot hold.

The CPU says which: it runs the op on tensors of the same layout, and only where a layout looks suspicious.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from isthmus._device import fallback
from isthmus._device.buffer import buffer_of
from isthmus._graph.schema import schema_of

_LIMIT = 4096
_fine: set[tuple[Any, ...]] = set()


def check_new(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise what torch raises for a write whose layouts and dtypes it refuses; asked once per signature."""
    targets = _targets(op, args, kwargs)
    if any(_repeats(target) for target in targets):
        _ask(op, args, kwargs)
    if op._schema.name != "aten::copy_" and any(not t.dtype.is_complex for t in targets):
        given = _flat((*args, *kwargs.values()))
        if any(isinstance(v, complex) or (isinstance(v, Tensor) and v.is_complex()) for v in given):
            fallback.attempt(op, args, kwargs)


def check_aliases(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise what torch raises where a target and another tensor of the call share part of their memory."""
    tensors = [v for v in _flat((*args, *kwargs.values())) if isinstance(v, Tensor) and v.device.type == "jax"]
    layouts = tuple([(t.untyped_storage()._cdata, t.shape, t.stride(), t.storage_offset(), t.dtype) for t in tensors])
    storages = [layout[0] for layout in layouts]
    if len(set(layouts)) == len(set(storages)):
        return  # what shares memory shares all of it
    key = (op, tuple([(storages.index(layout[0]), *layout[1:]) for layout in layouts]))
    if key not in _fine:
        _ask(op, args, kwargs)
        if len(_fine) >= _LIMIT:
            _fine.clear()
        _fine.add(key)


def _ask(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> None:
    """Run the op on CPU tensors that lie in memory as these do, for the refusal it may meet."""
    bases: dict[int, Tensor] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        cpu_args = [_stand_in(a, bases) for a in args]
        cpu_kwargs = {name: _stand_in(value, bases) for name, value in kwargs.items()}
        try:
            op(*cpu_args, **cpu_kwargs)
        except RuntimeError as error:
            if str(error).startswith("unsupported operation:"):
                raise error.with_traceback(None) from None


def _stand_in(value: Any, bases: dict[int, Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_stand_in(item, bases) for item in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return None
    if not isinstance(value, Tensor) or value.device.type != "jax":
        return value
    base = bases.setdefault(
        value.untyped_storage()._cdata, torch.zeros(buffer_of(value).signature.nbytes, dtype=torch.uint8)
    )
    width = value.dtype.itemsize
    typed = base[: base.numel() // width * width].view(value.dtype)
    return typed.as_strided(value.shape, value.stride(), value.storage_offset())


def _targets(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    schema = schema_of(op)
    bound = schema.bind(args, kwargs)
    return [t for t in _flat([bound.get(name) for name in schema.mutated]) if isinstance(t, Tensor)]


def _repeats(tensor: Tensor) -> bool:
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _flat(values: Any) -> list[Any]:
    return [item for v in values for item in (v if isinstance(v, (list, tuple)) else (v,))]
