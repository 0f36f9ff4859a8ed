"""``flex_attention`` at the door: its functions of one score become graphs, for ``_program/flex_attention.py`` to map.

torch traces a function of a score in the dtype of the query; here scores are wider. So the types in its graph are found
by tracing (``Conversion.infers``) and not taken from torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Node, Type
from isthmus._ops.common import accumulation_dtype
from isthmus._program import flex_attention
from isthmus._program.flex_attention import Scatter
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype

if TYPE_CHECKING:
    from isthmus._dynamo.convert import Conversion

_PLACE = [Type((), torch.int32)] * 4  # batch, head, query and key of a score


def forward(
    conversion: Conversion,
    fx: FxNode,
    query: Node,
    key: Node,
    value: Node,
    module: GraphModule,
    block_mask: list[Any],
    scale: float,
    options: Any,
    buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> Any:
    """Return the call for ``flex_attention``."""
    graph, _ = conversion.subgraph(module, [_score(query), *_PLACE, *buffers], infers=True)
    rest = [_masked(conversion, block_mask, mask_buffers), scale, buffers, mask_buffers]
    return conversion.call(fx, flex_attention.flex_attention, [query, key, value, graph, *rest])


def backward(
    conversion: Conversion,
    fx: FxNode,
    query: Node,
    key: Node,
    value: Node,
    out: Node,
    sums: Node,
    grad_out: Node | None,
    grad_sums: Node | None,
    module: GraphModule,
    joint_module: GraphModule,
    block_mask: list[Any],
    scale: float,
    options: Any,
    buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> Any:
    """Return the call for the gradients of ``flex_attention``."""
    score = _score(query)
    graph, _ = conversion.subgraph(module, [score, *_PLACE, *buffers], infers=True)
    joint, results = conversion.subgraph(joint_module, [score, *_PLACE, score, *buffers], infers=True)
    # The gradients of a score and its place, then those of captured tensors, of which torch may want none.
    wanted = fx.meta["val"][3]
    captured = [None if w is None else r for w, r in zip(wanted, results[5:], strict=True)]
    rest = [_masked(conversion, block_mask, mask_buffers), scale, buffers, mask_buffers]
    gradients = [out, grad_out, grad_sums, graph, joint, captured]
    return conversion.call(fx, flex_attention.flex_attention_backward, [query, key, value, *gradients, *rest])


def _score(query: Node) -> Type:
    return Type((), to_torch_dtype(accumulation_dtype(to_jax_dtype(query.type.dtype))))


def _masked(conversion: Conversion, block_mask: list[Any], buffers: Sequence[Any]) -> list[Any]:
    """Return a block mask with a graph for the function in it."""
    graph: Graph = conversion.subgraph(block_mask[-1], [*_PLACE, *buffers], infers=True)[0]
    return [*block_mask[:-1], graph]


def scatter(conversion: Conversion, fx: FxNode, args: list[Any]) -> Scatter | None:
    """Return the value of a node in the graph of a score's gradient, if it is a scatter or a sum of scatters.

    Scatters that the node takes otherwise are summed up, in ``conversion.values``.
    """
    # Named by its text: torch defines the op when flex_attention is first used.
    if str(fx.target) == "flex_lib.zeros_and_scatter.default":
        size, indices, values = args
        values, *indices = conversion.function(flex_attention.aligned, [values, indices, tuple(size)])
        return Scatter(tuple(size), ((values, tuple(indices)),))
    scatters = [value for value in args if isinstance(value, Scatter)]
    if fx.target is torch.ops.aten.add.Tensor and len(scatters) == 2 and not fx.kwargs:
        return Scatter(scatters[0].size, scatters[0].parts + scatters[1].parts)
    for source in fx.all_input_nodes:
        value = conversion.values[source]
        if isinstance(value, Scatter):
            parts = [[values, *indices] for values, indices in value.parts]
            (conversion.values[source],) = conversion.function(flex_attention.scattered, [value.size, *parts])
    return None
