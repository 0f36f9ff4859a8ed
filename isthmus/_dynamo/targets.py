"""What conversion knows of the ops that FX graphs name: which are composed, copies of views, or the device's own."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

from isthmus._device.torch_glue.private import has_kernel
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import mutating_of, schema_of
from isthmus._ops.tensors.views import VIEWS
from isthmus.errors import IsthmusError

_aten = torch.ops.aten
# torch's keys for ops that are composed of others below autograd.
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
# Their sizes, numbers or draws are not those of the program.
_NOT_COMPOSED = {
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.nondeterministic_seeded,
}
ON_DEVICE = frozenset(
    {
        _aten._ctc_loss.default,
        _aten._ctc_loss_backward.default,
        _aten._linalg_det.default,
        _aten._linalg_slogdet.default,
        _aten._thnn_fused_gru_cell.default,
        _aten._thnn_fused_gru_cell_backward.default,
        _aten._thnn_fused_lstm_cell.default,
    }
)
"""Ops that the device's own kernels answer before any lowering is asked."""


class NodeFailure(IsthmusError):
    """An FX node could not be converted or computed; the cluster without it may still be."""

    def __init__(self, node: Node, cause: Exception) -> None:
        super().__init__(f"{node.target} could not be lowered: {type(cause).__name__}: {cause}")
        self.node, self.cause = node, cause


def _copies() -> dict[Any, OpOverload]:
    copies: dict[Any, OpOverload] = {}
    for op in VIEWS:
        packet = getattr(_aten, f"{schema_of(op).name.partition('::')[2]}_copy", None)
        copy = getattr(packet, schema_of(op).overload or "default", None)
        # Where the name with ``_copy`` is a view of its own here, it stays one.
        if copy is not None and copy not in VIEWS:
            copies[copy] = op
    return copies


COPIES = _copies()
"""Views whose results are copies, as torch has them in the body of a loop, and the view that each computes."""


@functools.cache
def is_composite(op: OpOverload) -> bool:
    """Return whether torch composes an op of others when it runs, which a graph still names whole."""
    # What other libraries define may have a state, or look at values: a program would keep what it saw first.
    if op.namespace not in ("aten", "prims"):
        return False
    schema = schema_of(op)
    # Some functional forms merely allocate and call their out= form: that is the op itself.
    wraps_out = any(has_kernel(other, "CPU") for other in mutating_of(op))
    other = wraps_out or schema.mutated or not schema_of(op).returns or _NOT_COMPOSED & {*op.tags}
    return any(has_kernel(op, key) for key in _COMPOSITE) and not other
