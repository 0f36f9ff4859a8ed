"""Graphs as ``torch.fx.GraphModule``, for torch's own tools, and to run on the CPU."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from isthmus._graph.cpu_equivalents import EQUIVALENTS, HALVES, WIDENED
from isthmus._graph.graph import Graph, check, fill
from isthmus._graph.nodes import Call, Input, Item, Leaf, Node
from isthmus._graph.private import OpOverload
from isthmus._graph.reference import numbers_for_tensors, perform
from isthmus._graph.schema import schema_of
from isthmus._graph.text import names, op_name
from isthmus.errors import IsthmusError

_aten = torch.ops.aten
# Views of memory: what they are given has to be laid out first, as every value of a graph is.
_MEMORY = {_aten.view.dtype, _aten.as_strided.default}


def to_fx(graph: Graph) -> fx.GraphModule:
    """Return a module whose arguments are the graph's inputs and whose results are its outputs.

    A call is its ATen overload. Where the CPU needs more than that (a seed, a default dtype, an equivalent of an op
    it has no kernel of, lists of results made one), it is ``isthmus._graph.reference.perform`` of the overload.
    ``meta["type"]`` says what a value is; of a call with several results, a tuple.
    """
    check(graph)
    fx_graph = fx.Graph()
    known: dict[Node, fx.Node] = {}
    called = names(graph)
    for given in graph.inputs:
        known[given] = fx_graph.placeholder(called[given])
    for node in graph.nodes:
        known[node] = _node(fx_graph, node, [known[i] for i in node.inputs])
    for node, found in known.items():
        found.meta["type"] = node.types[0] if len(node.types) == 1 else node.types
    fx_graph.output(tuple(known[output] for output in graph.outputs))
    fx_graph.lint()
    return fx.GraphModule({}, fx_graph)


def _node(made: fx.Graph, node: Node, given: list[fx.Node]) -> fx.Node:
    call = node.call
    if isinstance(call, Item):
        return made.call_function(operator.getitem, (given[0], call.index))
    assert isinstance(call, Call)
    if not isinstance(call.op, OpOverload):
        raise IsthmusError(f"{op_name(call.op)} is no op of torch's: a graph with it has no form in torch.fx")
    arguments = {name: _value(value, given) for name, value in call.arguments}
    if call.op is _aten.view.default:
        return made.call_function(_aten.reshape.default, (arguments["self"], arguments["size"]))
    if call.op in _MEMORY:
        arguments["self"] = _laid_out(made, arguments["self"])
    elif not _is_plain(node):
        draw = given[-1] if call.random else None
        return made.call_function(perform, (call.op, arguments, draw, call.context[0]))
    args, kwargs = schema_of(call.op).split(schema_of(call.op).ordered((), arguments))
    return made.call_function(call.op, tuple(args), kwargs)


def _laid_out(made: fx.Graph, value: fx.Node) -> fx.Node:
    return made.call_function(_aten.clone.default, (value,), {"memory_format": torch.contiguous_format})


def _value(value: Any, given: list[fx.Node]) -> Any:
    if isinstance(value, Input):
        return given[value.index]
    return [_value(item, given) for item in value] if isinstance(value, tuple) else value


def _is_plain(node: Node) -> bool:
    """Return whether the CPU runs an overload as it was recorded, and gives the results that were."""
    call = node.call
    assert isinstance(call, Call)
    if call.random or call.op in EQUIVALENTS or call.context[0] != torch.float32:
        return False
    if call.op in WIDENED and any(i.type.dtype in HALVES for i in node.inputs):
        return False
    if any(result.is_list for result in schema_of(call.op).returns):
        return False
    numbers = [0 if isinstance(i.call, Leaf) and i.call.kind == "number" else None for i in node.inputs]
    arguments = {name: fill(value, numbers) for name, value in call.arguments}
    return not numbers_for_tensors(call.op, arguments)
