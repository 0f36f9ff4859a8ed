"""Graphs as ``torch.fx.GraphModule``, for torch's own tools, and to run on the CPU.

``graph.to_fx()`` ends here. It is a door outwards only: FX that comes in is converted by ``_dynamo/convert.py``. A call
becomes a call of its overload where the CPU runs it just so, else a call of ``reference.perform``, which brings along
what an FX node cannot say: the seed of a draw, the default dtype, an equivalent of an op that the CPU has not.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from isthmus._graph.arguments import Value
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
    for leaf in graph.inputs:
        known[leaf] = fx_graph.placeholder(called[leaf])
    for node in graph.nodes:
        known[node] = _node(fx_graph, node, [known[i] for i in node.inputs])
    for node, fx_node in known.items():
        fx_node.meta["type"] = node.types[0] if len(node.types) == 1 else node.types
    fx_graph.output(tuple(known[output] for output in graph.outputs))
    fx_graph.lint()
    return fx.GraphModule({}, fx_graph)


def _node(fx_graph: fx.Graph, node: Node, inputs: list[fx.Node]) -> fx.Node:
    call = node.call
    if isinstance(call, Item):
        return fx_graph.call_function(operator.getitem, (inputs[0], call.index))
    assert isinstance(call, Call)
    if not isinstance(call.op, OpOverload):
        # Control flow has graphs among its arguments, which are Python functions here.
        raise IsthmusError(f"{op_name(call.op)} is no op of torch's: a graph with it has no form in torch.fx")
    arguments = {name: _value(value, inputs) for name, value in call.arguments}
    # A value is laid out row by row, whatever fx's tensor is: ``view`` might refuse it.
    if call.op is _aten.view.default:
        return fx_graph.call_function(_aten.reshape.default, (arguments["self"], arguments["size"]))
    if call.op in _MEMORY:
        arguments["self"] = _laid_out(fx_graph, arguments["self"])
    # ``perform`` brings the seed, the default dtype and the equivalent along.
    elif not _is_plain(node):
        draw = inputs[-1] if call.random else None
        return fx_graph.call_function(perform, (call.op, arguments, draw, call.context[0]))
    args, kwargs = schema_of(call.op).split(schema_of(call.op).ordered((), arguments))
    return fx_graph.call_function(call.op, tuple(args), kwargs)


def _laid_out(fx_graph: fx.Graph, value: fx.Node) -> fx.Node:
    return fx_graph.call_function(_aten.clone.default, (value,), {"memory_format": torch.contiguous_format})


def _value(value: Value, inputs: list[fx.Node]) -> Value:
    if isinstance(value, Input):
        return inputs[value.index]
    return [_value(item, inputs) for item in value] if isinstance(value, tuple) else value


def _is_plain(node: Node) -> bool:
    """Return whether the CPU runs an overload as it was recorded, and gives the results that were."""
    call = node.call
    assert isinstance(call, Call)
    assert isinstance(call.op, OpOverload)
    # Another default dtype would change what a number becomes.
    if call.random or call.op in EQUIVALENTS or call.context[0] != torch.float32:
        return False
    if call.op in WIDENED and any(i.type.dtype in HALVES for i in node.inputs):
        return False
    # A list among several results is flat in a graph, nested in torch.
    if any(result.is_list for result in schema_of(call.op).returns):
        return False
    # Numbers stand for what the inputs will be; only their being numbers matters.
    numbers = [0 if isinstance(i.call, Leaf) and i.call.kind == "number" else None for i in node.inputs]
    arguments = {name: fill(value, numbers) for name, value in call.arguments}
    return not numbers_for_tensors(call.op, arguments)
