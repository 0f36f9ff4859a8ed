"""The tier between a lowering and the CPU: torch's own decomposition of an op, traced into one program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch._ops import OpOverload

from isthmus._device.buffer import wrap
from isthmus._graph.schema import schema_of
from isthmus._ops.common import Number
from isthmus._runtime.dtypes import to_torch_dtype
from isthmus.errors import Unsupported


@functools.cache
def function_for(op: OpOverload) -> Callable[[dict[str, Any]], Any] | None:
    """Return a function of arrays that runs torch's decomposition of ``op``, or None if torch has none."""
    if schema_of(op).mutated:
        return None
    from torch._decomp import decomposition_table

    decomposition = decomposition_table.get(op)
    return None if decomposition is None else functools.partial(_run, op, decomposition)


def _run(op: OpOverload, decomposition: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    schema = schema_of(op)
    args = [to_torch(arguments[a.name], a.type) for a in schema.arguments if not _keyword(op, a.name)]
    kwargs = {a.name: to_torch(arguments[a.name], a.type) for a in schema.arguments if _keyword(op, a.name)}
    with torch.no_grad():
        return to_arrays(decomposition(*args, **kwargs))


def _keyword(op: OpOverload, name: str) -> bool:
    return any(a.name == name and a.kwarg_only for a in op._schema.arguments)


def to_torch(value: Any, type_name: str = "") -> Any:
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
    from isthmus._device.transfer import array_of

    if isinstance(value, torch.Tensor):
        return array_of(value)
    if isinstance(value, (list, tuple)):
        return [to_arrays(item) for item in value]
    return value
