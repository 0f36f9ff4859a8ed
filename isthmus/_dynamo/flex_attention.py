"""``flex_attention`` at the door: its functions of one score become graphs, for ``_program/flex_attention.py`` to map.

torch traces a function of a score in the dtype of the query; here scores are wider. So the types in its graph are found
by tracing (``Conversion.infers``) and not taken from torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from isthmus._graph.nodes import Node, Type, numbered
from isthmus._ops.common import accumulation_dtype
from isthmus._program import flex_attention
from isthmus._program.flex_attention import Scatter
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype

if TYPE_CHECKING:
    from isthmus._dynamo.convert import Conversion

_PLACE = [Type((), torch.int32)] * 4  # batch, head, query and key of a score


def forward(conversion: Conversion, fx: FxNode, *args: Any) -> Any:
    """Return the call for ``flex_attention``."""
    query, key, value, module, block_mask, scale, _, *buffers = args
    graph, _ = conversion.subgraph(module, [_score(query), *_PLACE, *_captured(buffers)], infers=True)
    rest = _shared(conversion, block_mask, scale, buffers)
    return conversion.call(fx, flex_attention.flex_attention, numbered([query, key, value, graph, *rest]))


def backward(conversion: Conversion, fx: FxNode, *args: Any) -> Any:
    """Return the call for the gradients of ``flex_attention``."""
    # torch's own order of arguments; the sums and the kernel options are not needed.
    query, key, value, out, _, grad_out, grad_sums, module, joint_module, block_mask, scale, _, *buffers = (
        args
    )
    score = _score(query)
    graph, _ = conversion.subgraph(module, [score, *_PLACE, *_captured(buffers)], infers=True)
    operands = [score, *_PLACE, score, *_captured(buffers)]
    joint, results = conversion.subgraph(joint_module, operands, infers=True)
    # The gradients of a score and its place, then those of captured tensors, of which torch may want none.
    # The first five gradients are of the score, batch, head, query and key.
    captured = [None if w is None else r for w, r in zip(fx.meta["val"][3], results[5:], strict=True)]
    gradients = [out, grad_out, grad_sums, graph, joint, captured]
    rest = _shared(conversion, block_mask, scale, buffers)
    arguments = numbered([query, key, value, *gradients, *rest])
    return conversion.call(fx, flex_attention.flex_attention_backward, arguments)


def _captured(buffers: Sequence[Any]) -> Sequence[Any]:
    """Return the values that the function of a score captured; a mask's captures come second."""
    # Without captures torch leaves the tuple out.
    captured: Sequence[Any] = buffers[0] if buffers else ()
    return captured


def _shared(conversion: Conversion, block_mask: list[Any], scale: float, buffers: Sequence[Any]) -> list[Any]:
    """Return the arguments that forward and backward end with; the function in the block mask is a graph there."""
    of_mask = buffers[1] if len(buffers) > 1 else ()
    graph, _ = conversion.subgraph(block_mask[-1], [*_PLACE, *of_mask], infers=True)
    return [[*block_mask[:-1], graph], scale, _captured(buffers), of_mask]


def _score(query: Node) -> Type:
    return Type((), to_torch_dtype(accumulation_dtype(to_jax_dtype(query.type.dtype))))


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
    # Two scatters add up by joining their parts.
    if fx.target is torch.ops.aten.add.Tensor and len(scatters) == 2 and not fx.kwargs:
        return Scatter(scatters[0].size, scatters[0].parts + scatters[1].parts)
    for source in fx.all_input_nodes:
        value = conversion.values[source]
        # Any other use of a scatter needs the array.
        if isinstance(value, Scatter):
            parts = [[values, *indices] for values, indices in value.parts]
            (conversion.values[source],) = conversion.function(flex_attention.scattered, [value.size, *parts])
    return None
