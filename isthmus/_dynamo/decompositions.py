"""Which ops are taken apart before we see them: those that have a decomposition and no lowering."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from isthmus._dynamo import attention, refusals
from isthmus._dynamo.convert import has_rule
from isthmus._graph.private import OpOverload, decompositions
from isthmus._graph.schema import schema_of
from isthmus._ops import families  # noqa: F401  # importing it files every lowering
from isthmus._ops.registry import lowering_of
from isthmus._ops.tensors.views import VIEWS


@functools.cache
def table() -> dict[OpOverload, Callable[..., Any]]:
    """Return torch's decompositions of ops that nothing here lowers whole, and those of CUDA's kernels."""
    torchs = {
        op: refusals.checking(op, function)
        for op, function in decompositions().items()
        if isinstance(op, OpOverload)
        and not has_rule(op)
        and op not in VIEWS
        and not schema_of(op).mutated
        and lowering_of(op) is None
    }
    return {**torchs, **attention.KERNELS}
