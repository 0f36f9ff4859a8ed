"""Passes on the joint graph: forward and backward of a training graph, before AOTAutograd's partitioner splits it.

What forward saves for backward is decided by torch's min-cut partitioner, which works on FX. So the passes of
``_graph/passes`` that change what is saved run here: the FX graph is mirrored as ``_graph`` nodes, the passes of mode
``joint`` give their rules, and each FX node that a rule replaces gets new FX nodes in its place. FX nodes that no rule
touches stay the objects they are, with all of torch's metadata.

The mirror is for looking only: a size that is a symbol stays one (``Symbolic``), and whatever is no ATen call on
tensors is an opaque leaf. A leaf of kind ``argument`` is a placeholder, which may be written to before backward runs.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import Node as FxNode

from isthmus import config
from isthmus._dynamo.private import without_modes
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Input, Item, Leaf, Node, Type, call_of, node, temporary
from isthmus._graph.passes import PASSES, log_change
from isthmus._graph.passes.rewrite import Rule, remade
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import schema_of


@dataclass(frozen=True)
class Symbolic:
    """A size that is a symbol, as something that can be compared."""

    expression: Any


def optimise(graph: FxGraph) -> None:
    """Run the passes of mode ``joint`` on an FX graph, in place."""
    for each in PASSES:
        if "joint" not in each.modes:
            continue
        # Nodes of the mirror hold symbols, which the tables of all nodes must not.
        with temporary():
            mirror = _Mirror(graph)
            with without_modes():  # a pass may compute constants
                rule = each.rule(Graph.of([n for n in mirror.nodes.values() if isinstance(n, Node)]))
            if rule is None:
                continue
            before = str(graph) if config.current.log == "passes" else ""
            if mirror.apply(rule) and before:
                log_change("joint", each.name, before, graph)
    # Replaced nodes are left behind without users.
    graph.eliminate_dead_code()


class _Mirror:
    """An FX graph as nodes: ``nodes`` maps each FX node to its own, ``sources`` maps back."""

    def __init__(self, graph: FxGraph) -> None:
        self.graph = graph
        self.nodes: dict[FxNode, Any] = {}
        self.sources: dict[Node, FxNode] = {}
        for index, fx in enumerate(graph.nodes):
            if fx.op != "output":
                # Of equal calls the first FX node stands for all.
                mirrored = self.nodes[fx] = self._mirrored(fx, index)
                if isinstance(mirrored, Node):
                    self.sources.setdefault(mirrored, fx)

    def _mirrored(self, fx: FxNode, index: int) -> Any:
        if fx.target is operator.getitem:
            whole = self.nodes[fx.args[0]]  # type: ignore[index]
            if isinstance(whole, Node) and whole.results:
                return whole.results[fx.args[1]]  # type: ignore[index, call-overload]
        call = self._call(fx)
        return call if call is not None else self._opaque(fx, index)

    def _opaque(self, fx: FxNode, index: int) -> Node:
        kind = "argument" if fx.op == "placeholder" else "opaque"
        value = fx.meta.get("val")
        type = _type(value) if isinstance(value, Tensor) else Type((), torch.int64)
        return Node(Leaf(kind, index, type), ())

    def _call(self, fx: FxNode) -> Node | None:
        """Return a call of an ATen op on tensors; None for any other node."""
        op, value = fx.target, fx.meta.get("val")
        if not isinstance(op, OpOverload) or schema_of(op).mutated:
            return None
        values = value if isinstance(value, (list, tuple)) else [value]
        # A result that is a number, as attention returns its lengths, is known: nothing reads it from the graph.
        if not values or not all(each is None or isinstance(each, (Tensor, int)) for each in values):
            return None
        types = [_type(each) if isinstance(each, Tensor) else None for each in values]
        if not any(types):
            return None
        inputs: list[Node] = []
        names = [argument.name for argument in schema_of(op).arguments]
        arguments = dict(zip(names, fx.args, strict=False)) | fx.kwargs
        try:
            named = {name: self._argument(argument, inputs) for name, argument in arguments.items()}
            call = call_of(op, named, types)
        except TypeError:  # an argument that cannot be compared
            return None
        return node(call, *inputs)

    def _argument(self, value: Any, inputs: list[Node]) -> Any:
        if isinstance(value, FxNode):
            mirrored = self.nodes[value]
            if not isinstance(mirrored, Node):
                # A size that is a node is no tensor: the call is looked at as opaque.
                raise TypeError
            inputs.append(mirrored)
            return Input(len(inputs) - 1)
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(item, inputs) for item in value)
        return value

    def apply(self, rule: Rule) -> bool:
        """Replace FX nodes whose nodes the rule replaces; return whether there are any."""
        changed = False
        # Calls before their items, as ``remade`` wants them.
        ordered = list(dict.fromkeys(n for n in self.nodes.values() if isinstance(n, Node)))
        calls: list[Node] = []
        for each in ordered:
            source = each.inputs[0] if isinstance(each.call, Item) else each
            if not isinstance(source.call, Leaf):
                calls += [source, each]
        # ``known`` is empty: leaves stay as they are.
        new = remade(dict.fromkeys(calls), {}, rule)
        for fx, old in list(self.nodes.items()):
            if isinstance(old, Node) and new.get(old, old) is not old:
                replacement = self._emit(new[old], fx)
                if replacement is not fx:
                    fx.replace_all_uses_with(replacement)
                    changed = True
        return changed

    def _emit(self, target: Node, before: FxNode) -> FxNode:
        """Return an FX node that computes a node; new ones are put before the one that is replaced."""
        known = self.sources.get(target)
        # Already there: another rule has made it, or it was in the graph.
        if known is not None:
            return known
        inputs = [self._emit(each, before) for each in target.inputs]
        with self.graph.inserting_before(before):
            if isinstance(target.call, Item):
                fx_node = self.graph.call_function(operator.getitem, (inputs[0], target.call.index))
                # An item has the metadata of the call that it is taken from.
                value, meta = inputs[0].meta["val"][target.call.index], inputs[0].meta
            else:
                assert isinstance(target.call, Call)
                args, kwargs = _arguments(target.call, inputs)
                fx_node = self.graph.call_function(target.call.op, args, kwargs)
                value, meta = _announced(fx_node), before.meta
        # torch reads more than the value from metadata: which module a node is from, whether it belongs to backward.
        fx_node.meta = {**meta, "val": value}
        fx_node.meta.pop("tensor_meta", None)
        self.sources[target] = fx_node
        return fx_node


def _type(value: Tensor) -> Type:
    sizes = tuple(n if isinstance(n, int) else Symbolic(n.node.expr) for n in value.shape)
    return Type(sizes, value.dtype)  # type: ignore[arg-type]


def _arguments(call: Call, inputs: list[FxNode]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def fill(value: Any) -> Any:
        if isinstance(value, Input):
            return inputs[value.index]
        return [fill(item) for item in value] if isinstance(value, tuple) else value

    schema = schema_of(call.op)
    args, kwargs = schema.split(schema.ordered((), {name: fill(value) for name, value in call.arguments}))
    return tuple(args), kwargs


def _announced(fx: FxNode) -> Any:
    """Return the fake tensors of a new node, by running its op on those of its arguments."""

    def fake(value: Any) -> Any:
        if isinstance(value, FxNode):
            return value.meta["val"]
        return [fake(item) for item in value] if isinstance(value, (list, tuple)) else value

    assert callable(fx.target)
    return fx.target(*fake(fx.args), **{name: fake(value) for name, value in fx.kwargs.items()})
