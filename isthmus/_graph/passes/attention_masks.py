"""A mask of attention that is known to be causal, or to hide nothing, is left out: fused kernels are faster without.

transformers passes an explicit mask wherever it is traced, made of ``arange`` and comparisons::

    %mask = le(arange(1024)[None, None, None, :], arange(1024)[None, None, :, None])
    attention(%q, %k, %v, %mask)           ->  attention(%q, %k, %v, None, is_causal=True)

A mask that is computed of no input is the same in every run, so it is computed here, once, on the CPU. On joint graphs
this also keeps a mask as large as queries times keys from being saved for backward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus._graph.graph import Graph, evaluate, fill
from isthmus._graph.nodes import Call, Callee, Input, Leaf, Node, Type, call_of, node, reachable
from isthmus._graph.passes.rewrite import Rule
from isthmus._graph.private import OpOverload
from isthmus._graph.reference import perform
from isthmus._graph.schema import PLACEMENT

_aten = torch.ops.aten
# What each op calls its mask.
_OPS: dict[Callee, str] = {
    _aten._scaled_dot_product_fused_attention_overrideable.default: "attn_bias",
    _aten._scaled_dot_product_fused_attention_overrideable_backward.default: "attn_bias",
    _aten._scaled_dot_product_flash_attention_for_cpu.default: "attn_mask",
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: "attn_mask",
}
# Larger masks would take longer to compute than they cost: 64 million elements, a quarter of a second.
_LARGEST = 2**26


def attention_masks(graph: Graph) -> Rule | None:
    """Return the rule: attention under a mask that is known becomes causal, or attention without a mask."""
    # Each mask is computed once, however many layers share it.
    masks = [_mask(n.call, n.inputs) for n in graph.nodes if isinstance(n.call, Call)]
    kinds = {mask: _kind(mask) for mask in dict.fromkeys(masks) if mask is not None}
    if not any(kinds.values()):
        return None

    def rule(call: Call, inputs: tuple[Node, ...]) -> Node | None:
        mask = _mask(call, inputs)
        if mask is None or not kinds.get(mask):
            return None
        arguments = dict(call.arguments)
        place = arguments[_OPS[call.op]]
        left = [other for at, other in enumerate(inputs) if at != place.index]
        # The mask is no input any more, so the places of those behind it move down.
        arguments = {key: _moved(value, place.index) for key, value in arguments.items()}
        arguments |= {_OPS[call.op]: None, "is_causal": kinds[mask] == "causal"}
        return node(call_of(call.op, arguments, _without_bias(call), context=call.context), *left)

    return rule


def _mask(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    """Return the mask of attention, None where there is none or the call is another."""
    arguments = dict(call.arguments)
    place = arguments.get(_OPS.get(call.op, ""))
    needed_gradients = arguments.get("grad_input_mask")
    if not isinstance(place, Input) or arguments.get("is_causal"):
        return None
    # Numbers that are made in the graph may still be asked for their gradient; truths have none.
    has_gradient = (
        isinstance(needed_gradients, tuple)
        and bool(needed_gradients[3])
        and inputs[place.index].type.dtype != torch.bool
    )
    return None if has_gradient else inputs[place.index]


def _moved(value: object, gone: int) -> object:
    """Return an argument with its inputs counted without one that is gone."""
    if isinstance(value, Input):
        return Input(value.index - (value.index > gone))
    return tuple(_moved(item, gone) for item in value) if isinstance(value, tuple) else value


def _without_bias(call: Call) -> list[Type | None]:
    """Return the types of a call's results where there is no mask: a mask has a gradient, though truths use none."""
    # The fourth result of the backward op is the gradient of the mask.
    backward = call.op is _aten._scaled_dot_product_fused_attention_overrideable_backward.default
    return [*call.types[:3], None] if backward else [*call.types]


def _kind(mask: Node) -> str:
    """Return "causal" or "all" for a mask that is known to be one of these, "" for any other."""
    nodes = list(reachable([mask]))
    dtype = mask.type.dtype
    # A mask that depends on an input is not known.
    if (dtype != torch.bool and not dtype.is_floating_point) or any(isinstance(n.call, Leaf) for n in nodes):
        return ""
    for each in nodes:
        if isinstance(each.call, Call) and (each.call.random or not _is_small(each)):
            return ""
    value = None
    # What is no ATen call, or has no kernel on the CPU, is not known.
    with contextlib.suppress(Exception), torch.no_grad():
        # On the CPU by ATen, and any failure means that the mask is not known.
        (value,) = evaluate(Graph.of([mask]), [], _run)
    if not isinstance(value, Tensor) or value.dim() < 2:
        return ""
    if value.dtype != torch.bool:
        # torch's own CPU kernel makes numbers of truths: 0 shows and -inf hides. Any other number changes the scores.
        if not bool(((value == 0) | (value == -math.inf)).all()):
            return ""
        value = value == 0
    if bool(value.all()):
        return "all"
    # Square only: kernels differ in how they align a causal mask with fewer queries than keys.
    square = value.shape[-2] == value.shape[-1]
    return "causal" if square and bool((value == torch.ones_like(value).tril()).all()) else ""


def _run(each: Node, inputs: list[Tensor]) -> Tensor | Sequence[Tensor]:
    """Compute a call on the CPU, wherever its result is to live."""
    call = each.call
    assert isinstance(call, Call)
    assert isinstance(call.op, OpOverload)
    arguments = {name: fill(value, inputs) for name, value in call.arguments if name not in PLACEMENT}
    with torch.device("cpu"):
        return perform(call.op, arguments, None, call.context[0])


def _is_small(each: Node) -> bool:
    sizes = [type.size for type in each.types if type is not None]
    return all(all(isinstance(n, int) for n in size) and math.prod(size) <= _LARGEST for size in sizes)
