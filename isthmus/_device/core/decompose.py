"""The tier between a lowering and the CPU: torch's own decomposition of an op, traced into one program.

``torch._decomp`` has Python functions for ops in terms of simpler ones. Such a function is called on "jax" tensors that
hold tracers, so that its ops run by their lowerings and become part of one program. It cannot read a value, and an op
whose decomposition calls the op itself is refused.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from isthmus._device.core.buffer import wrap
from isthmus._graph.private import OpOverload, decompositions
from isthmus._graph.schema import ABSENT, schema_of
from isthmus._ops.common import Number
from isthmus._runtime.dtypes import to_torch_dtype
from isthmus.errors import Unsupported


@functools.cache
def function_for(op: OpOverload) -> Callable[[dict[str, Any]], Any] | None:
    """Return a function of arrays that runs torch's decomposition of ``op``, or None if torch has none."""
    # A decomposition returns new values; the forms that write are derived from it as from a lowering.
    if schema_of(op).mutated:
        return None
    decomposition = decompositions().get(op)
    return None if decomposition is None else functools.partial(_run, op, decomposition)


# The ops that this thread is decomposing: one that turns up again would recurse for ever.
_running = threading.local()


def _run(op: OpOverload, decomposition: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    inside: list[OpOverload] = _running.__dict__.setdefault("ops", [])
    if op in inside:
        raise Unsupported(f"torch's decomposition of {op} calls it again")
    schema = schema_of(op)
    # Left out where it has its default: some decompositions take ``layout``, but not None for it.
    values = {
        a.name: ABSENT if a.has_default and arguments[a.name] is a.default else to_torch(arguments[a.name])
        for a in schema.arguments
    }
    # ``torch.full`` and its like: no tensor among the arguments says which device is meant.
    makes = "device" in values and not any(a.kind in ("tensor", "tensors") for a in schema.arguments)
    if makes and values["device"] is ABSENT:
        values["device"] = torch.device("jax")  # torch's own default is the CPU
    args, kwargs = schema.split(tuple(values.values()))
    inside.append(op)
    try:
        # The decomposition runs on tensors with tracers; what autograd would record of them has no reader.
        with torch.no_grad():
            return to_arrays(decomposition(*args, **kwargs))
    finally:
        inside.pop()


def to_torch(value: Any) -> Any:
    """Return arrays as "jax" tensors, which hold them whether they are tracers or not."""
    if isinstance(value, jax.Array):
        return wrap(value)
    if isinstance(value, Number):
        raise Unsupported("a number known only at run time cannot enter a torch decomposition")
    if isinstance(value, (list, tuple)):
        return [to_torch(item) for item in value]
    return to_torch_dtype(value) if isinstance(value, np.dtype) else value


def to_arrays(value: Any) -> Any:
    """Return the arrays that "jax" tensors show."""
    # ``transfers`` imports ``dispatch``, which imports ``plan``, which imports this file.
    from isthmus._device.core.transfers import array_of

    if isinstance(value, torch.Tensor):
        return array_of(value)
    if isinstance(value, (list, tuple)):
        return [to_arrays(item) for item in value]
    return value
