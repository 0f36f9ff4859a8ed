"""The last tier: an op that nothing lowers runs with ATen on the CPU; counted, warned about once, or refused.

Tensors cross to the host, the op runs there, results and written targets come back. ``plan.py`` makes such a plan where
there is no lowering and no decomposition, or where XLA could not compile one. ``isthmus.config.fallback`` is "warn",
"cpu" (silent) or "error"; ``MissingLowering`` then shows the call and what to do.

A written target keeps its identity: the CPU's result is copied into the tensor that the user passed, and where the op
returns its target, that tensor is returned. Inside ``isthmus.jit`` a fallback is an error, since a replay would leave
it out; inside a JAX trace ``plan.py`` raises before it comes here.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from isthmus import config
from isthmus._device.checks.ask_cpu import on_cpu
from isthmus._device.core import mode
from isthmus._device.core.host_tensors import write_through_cpu
from isthmus._graph.arguments import tensors_in
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import schema_of
from isthmus._runtime import counters
from isthmus.errors import MissingLowering, first_line

_COPY = torch.ops.aten.copy_.default


class FallbackWarning(UserWarning):
    """An op ran on the CPU."""


def permit(op: OpOverload | str, arguments: dict[str, Any], reason: str) -> None:
    """Raise if the config forbids ops to fall to the CPU."""
    if config.fallback == "error":
        raise MissingLowering(
            f"no lowering for {op} ({reason})\n"
            f"  called with  {describe(arguments)}\n"
            f'  to go on     isthmus.config.fallback = "cpu" runs this op on the CPU\n'
            f"  to fix it    docs/add-a-lowering.md"
        )


def announce(op: OpOverload | str, arguments: dict[str, Any], reason: str) -> None:
    """Count an op that is about to run on the CPU and warn about it once, or raise where it may not run there."""
    permit(op, arguments, reason)
    # A replay of isthmus.jit would leave out what the CPU did.
    if mode.current.capture is not None:
        raise mode.current.capture.refuse_fallback(op, reason)
    if counters.count_fallback(str(op), reason) and config.fallback == "warn":
        warnings.warn(f"{op} ran on the CPU ({first_line(reason)})", FallbackWarning, stacklevel=4)


def run(op: OpOverload, values: tuple[Any, ...], reason: str) -> Any:
    """Run ``op`` with ATen on the CPU and bring results and writes back."""
    schema = schema_of(op)
    announce(op, schema.named(values), reason)
    with mode.reason("a fallback op"):
        moved, result = on_cpu(op, values)
    originals: dict[int, torch.Tensor] = {}
    before, after = schema.named(values), schema.named(moved)
    for name in schema.mutated:
        for old, new in zip(tensors_in(before[name]), tensors_in(after[name]), strict=True):
            originals[id(new)] = old
            if old.layout is not torch.strided:
                # A sparse target: its parts have new sizes, so it is emptied and filled again.
                old.resize_as_sparse_(new.to("jax")).copy_(new.to("jax"))
                continue
            if old.shape != new.shape:
                # An ``out=`` target that the CPU resized.
                old.resize_(new.shape)
            if op is _COPY:  # the copy itself is what cannot be compiled
                write_through_cpu(old, new)
            else:
                _shown_once(old).copy_(_shown_once(new))
    return _to_jax(result, originals)


def _shown_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that was expanded without what shows the same memory again, which torch writes to nowhere."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _to_jax(result: Any, originals: dict[int, torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        # What was written to is returned as the tensor that the caller passed, not as a copy of it.
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
