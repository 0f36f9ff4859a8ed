"""The CPU is the net under every op: counted, warned about once, or refused, as the config says."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch._ops import OpOverload

from isthmus import config
from isthmus._device import mode
from isthmus._device.inference import numbers_as_tensors
from isthmus._device.private import restride
from isthmus._device.writes import stand_ins
from isthmus._graph.schema import schema_of
from isthmus._runtime import counters
from isthmus.errors import MissingLowering, first_line


class FallbackWarning(UserWarning):
    """An op ran on the CPU."""


def permit(op: OpOverload, arguments: dict[str, Any], reason: str) -> None:
    """Raise if the config forbids ops to fall to the CPU."""
    if config.fallback == "error":
        raise MissingLowering(
            f"no lowering for {op} ({reason})\n"
            f"  called with  {describe(arguments)}\n"
            f'  to go on     isthmus.config.fallback = "cpu" runs this op on the CPU\n'
            f"  to fix it    docs/add-a-lowering.md"
        )


def run(op: OpOverload, values: tuple[Any, ...], reason: str) -> Any:
    """Run ``op`` with ATen on the CPU and bring results and writes back."""
    schema = schema_of(op)
    permit(op, schema.named(values), reason)
    if mode.current.capture is not None:
        raise mode.current.capture.refuse_fallback(op, reason)
    if counters.count_fallback(str(op), reason) and config.fallback == "warn":
        warnings.warn(f"{op} ran on the CPU ({first_line(reason)})", FallbackWarning, stacklevel=3)
    moved, result = _on_cpu(op, values)
    originals: dict[int, torch.Tensor] = {}
    before, after = schema.named(values), schema.named(moved)
    for name in schema.mutated:
        for old, new in zip(_tensors(before[name]), _tensors(after[name]), strict=True):
            originals[id(new)] = old
            if old.shape != new.shape:
                old.resize_(new.shape)
            old.copy_(new)
    return _to_jax(result, originals)


def attempt(op: OpOverload, values: tuple[Any, ...]) -> None:
    """Run ``op`` on copies on the CPU, for the error it raises."""
    if mode.current.capture is not None:
        values = stand_ins(values)  # values cannot be read while a function is recorded, sizes can
    try:
        _on_cpu(op, values)
    except Exception as error:
        if "Could not run" in str(error):
            return  # the CPU has no such op, which says nothing about the call
        raise error.with_traceback(None) from None


def _on_cpu(op: OpOverload, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments on the CPU, and what ``op`` makes of them there."""
    copies: dict[int, torch.Tensor] = {}
    moved = tuple(_to_cpu(value, copies) for value in values)
    args, kwargs = schema_of(op).split(numbers_as_tensors(op, moved))
    return moved, op(*args, **kwargs)


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _to_cpu(value: Any, moved: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type == "jax" and id(value) not in moved:
            moved[id(value)] = _expanded_like(value)
        return moved.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return [_to_cpu(item, moved) for item in value]
    if isinstance(value, torch.device) and value.type == "jax":
        return torch.device("cpu")
    return value


def _expanded_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a "jax" tensor on the CPU, expanded there where it is expanded here: it may be of any size."""
    repeated = [n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    if not any(repeated) or tensor.is_conj() or tensor.is_neg():
        return tensor.cpu()
    once = [1 if again else n for n, again in zip(tensor.shape, repeated, strict=True)]
    return restride(tensor, once, tensor.stride(), int(tensor.storage_offset())).cpu().expand(tensor.shape)


def _to_jax(result: Any, originals: dict[int, torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return originals[id(result)] if id(result) in originals else result.to("jax")
    if isinstance(result, (list, tuple)):
        return type(result)(_to_jax(item, originals) for item in result)
    return result


def describe(arguments: dict[str, Any]) -> str:
    """Return a call's arguments in one line."""
    return ", ".join(f"{name}: {_describe(value)}" for name, value in arguments.items())


_SHORT = {"float": "f", "int": "i", "uint": "u", "bfloat": "bf", "complex": "c"}


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        stem = name.rstrip("0123456789")
        return f"{_SHORT.get(stem, stem)}{name[len(stem) :]}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_describe(item) for item in value) + "]"
    return repr(value)
