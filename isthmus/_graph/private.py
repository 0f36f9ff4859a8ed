"""Private names of torch that every layer needs: the type of an op, its schema, decompositions, storages.

torch promises none of them, and has no public name for the same. They stand in the lowest layer that knows torch, so
that graphs, lowerings, the device and the compilers take them from here; names that one layer alone uses are in
``_device/torch_glue/private.py``, ``_device/torch_glue/pytree.py`` and ``_dynamo/private.py``, JAX's in
``_runtime/private.py``. tests/project/test_imports.py keeps them there.

>>> import torch
>>> x = torch.ones(4)
>>> storage_id(x) == storage_id(x[1:]), storage_id(x) == storage_id(x.clone())
(True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OperatorBase
from torch._ops import OpOverload as OpOverload

from isthmus._upstream import optional

Op = OpOverload[..., Any]  # type: ignore[explicit-any]
"""An overload in annotations: torch makes the class generic over its signature, which no overload in a table has."""
Decompositions = Mapping[OperatorBase, Callable[..., Any]]  # type: ignore[explicit-any]

__all__ = ["HigherOrderOperator", "OpOverload"]

storage_of: Callable[[torch.Tensor], torch.UntypedStorage] = torch.Tensor.untyped_storage
# The address of torch's C++ storage. Python may make a second object for the same storage, so its id() does not do.
# Both are callables written in C: every op that writes asks them.
address_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")


def torch_schema(op: Op) -> torch.FunctionSchema:
    """Return torch's own record of an op's arguments and results; ``_graph.schema`` says the same in our terms."""
    return op._schema


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that tensors share if and only if they share a storage."""
    return address_of(storage_of(tensor))


def storage_ids(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return ``storage_id`` of each tensor."""
    return [*map(address_of, map(storage_of, tensors))]


def _public_decompositions() -> Decompositions:
    from torch.export import default_decompositions

    return default_decompositions()


# The public table has the decompositions to core ATen alone, about half of these.
@optional("ops without a lowering that are no core ATen ops run on the CPU", _public_decompositions)
def decompositions() -> Decompositions:
    """Return torch's own recipes for ops in terms of simpler ones, by overload."""
    from torch._decomp import decomposition_table

    if not isinstance(decomposition_table, Mapping):
        raise TypeError("torch._decomp.decomposition_table is no mapping")
    return decomposition_table
