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
from typing import Any

import torch
from torch import Tensor

from isthmus._graph.graph import Graph, evaluate, fill
from isthmus._graph.nodes import Call, Input, Leaf, Node, Type, call_of, node, reachable
from isthmus._graph.passes.rewrite import Rule
from isthmus._graph.reference import perform
from isthmus._graph.schema import PLACEMENT

_aten = torch.ops.aten
# What each op calls its mask; a mask of truths alone, since one of numbers may need a gradient.
_OPS = {
    _aten._scaled_dot_product_fused_attention_overrideable.default: "attn_bias",
    _aten._scaled_dot_product_fused_attention_overrideable_backward.default: "attn_bias",
    _aten._scaled_dot_product_flash_attention_for_cpu.default: "attn_mask",
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: "attn_mask",
}
# Larger masks would take longer to compute than they cost: 64 million elements, a quarter of a second.
_LARGEST = 2**26


def attention_masks(graph: Graph) -> Rule | None:
    """Return the rule: attention under a mask that is known becomes causal, or attention without a mask."""
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
        left = [given for at, given in enumerate(inputs) if at != place.index]
        arguments = {key: _moved(value, place.index) for key, value in arguments.items()}
        arguments |= {_OPS[call.op]: None, "is_causal": kinds[mask] == "causal"}
        return node(call_of(call.op, arguments, _without_bias(call), context=call.context), *left)

    return rule


def _mask(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    """Return the mask of attention, None where there is none or the call is another."""
    arguments = dict(call.arguments)
    place = arguments.get(_OPS.get(call.op, ""))
    return inputs[place.index] if isinstance(place, Input) and not arguments.get("is_causal") else None


def _moved(value: object, gone: int) -> object:
    """Return an argument with its inputs counted without one that is gone."""
    if isinstance(value, Input):
        return Input(value.index - (value.index > gone))
    return tuple(_moved(item, gone) for item in value) if isinstance(value, tuple) else value


def _without_bias(call: Call) -> list[Type | None]:
    """Return the types of a call's results where there is no mask: a mask has a gradient, though truths use none."""
    backward = call.op is _aten._scaled_dot_product_fused_attention_overrideable_backward.default
    return [*call.types[:3], None] if backward else [*call.types]


def _kind(mask: Node) -> str:
    """Return "causal" or "all" for a mask that is known to be one of these, "" for any other."""
    nodes = list(reachable([mask]))
    if mask.type.dtype != torch.bool or any(isinstance(n.call, Leaf) for n in nodes):
        return ""
    for each in nodes:
        if isinstance(each.call, Call) and (each.call.random or not _is_small(each)):
            return ""
    value = None
    # What is no ATen call, or has no kernel on the CPU, is not known.
    with contextlib.suppress(Exception), torch.no_grad():
        (value,) = evaluate(Graph.of([mask]), [], _run)
    if not isinstance(value, Tensor) or value.dim() < 2:
        return ""
    if bool(value.all()):
        return "all"
    square = value.shape[-2] == value.shape[-1]
    return "causal" if square and bool((value == torch.ones_like(value).tril()).all()) else ""


def _run(each: Node, given: list[Any]) -> Any:
    """Compute a call on the CPU, wherever its result is to live."""
    call = each.call
    assert isinstance(call, Call)
    arguments = {name: fill(value, given) for name, value in call.arguments if name not in PLACEMENT}
    with torch.device("cpu"):
        return perform(call.op, arguments, None, call.context[0])


def _is_small(each: Node) -> bool:
    sizes = [type.size for type in each.types if type is not None]
    return all(all(isinstance(n, int) for n in size) and math.prod(size) <= _LARGEST for size in sizes)
