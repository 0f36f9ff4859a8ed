"""Rewriting a graph: a rule looks at one call whose inputs are rewritten already, and returns what replaces it.

Nodes are immutable and made once, so a rewrite makes new nodes and leaves the old graph as it was. A rule is called for
every call, inputs before users; ``None`` keeps the call. One round is enough for rules that look at inputs only::

    def rule(call, inputs):                 # x.neg().neg() -> x
        if call.op is aten.neg.default and is_call(inputs[0], aten.neg.default):
            return inputs[0].inputs[0]

    rewrite(graph, rule)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace

from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Input, Item, Leaf, Node, Type, call_of, node
from isthmus._graph.private import Op

Rule = Callable[[Call, tuple[Node, ...]], Node | None]


def rewrite(graph: Graph, rule: Rule, leaves: dict[Node, Node] | None = None) -> Graph:
    """Return the graph with each call replaced by the node that the rule gives for it, if it gives one."""
    new = remade(graph.nodes, leaves or {}, rule)
    # In reverse, so that of several old nodes that became one the first gives its name.
    origins = {new[old]: graph.origins.get(old, old) for old in reversed(graph.nodes)}
    # ``Graph.of`` drops what the new outputs do not need.
    return replace(Graph.of(tuple(new.get(output, output) for output in graph.outputs)), origins=origins)


def remade(
    nodes: Iterable[Node], known: Mapping[Node, Node], rule: Rule = lambda call, inputs: None
) -> dict[Node, Node]:
    """Return nodes made anew, those ``known`` among their inputs replaced; inputs in neither stay as they are."""
    new = dict(known)
    for old in nodes:
        inputs = tuple(new.get(source, source) for source in old.inputs)
        # The call in front of it has been remade, so its item exists already.
        if isinstance(old.call, Item):
            item = inputs[0].results[old.call.index]
            assert item is not None
            new[old] = item
        else:
            assert isinstance(old.call, Call)
            new[old] = rule(old.call, inputs) or node(old.call, *inputs)
    return new


def share_offsets(graph: Graph, values: dict[int, int]) -> Graph:
    """Return the graph with one leaf for all offsets that have the same value, by their index, in ``values``."""
    first: dict[int, Node] = {}
    leaves: dict[Node, Node] = {}
    for n in graph.inputs:
        # Only offsets that are compiled in: equal ones that vary need not stay equal.
        if isinstance(n.call, Leaf) and n.call.kind == "offset" and n.call.index in values:
            leaves[n] = first.setdefault(values[n.call.index], n)
    return rewrite(graph, lambda call, inputs: None, leaves) if len(first) < len(leaves) else graph


def fill_offsets(graph: Graph, values: Mapping[int, int], ops: Container[Op]) -> Graph:
    """Return the graph with offsets that have a value, by their index, written into the arguments of these ops."""

    def rule(call: Call, inputs: tuple[Node, ...]) -> Node | None:
        if call.op not in ops:
            return None
        known = {at: _value(n, values) for at, n in enumerate(inputs)}
        # Inputs that stay are numbered anew, in their old order.
        left = [at for at, value in known.items() if value is None]
        if len(left) == len(inputs):
            return None
        new = {at: Input(left.index(at)) if value is None else value for at, value in known.items()}
        arguments = {n: new[v.index] if isinstance(v, Input) else v for n, v in call.arguments}
        filled = call_of(call.op, arguments, call.types, context=call.context)
        return node(filled, *[inputs[at] for at in left])

    return rewrite(graph, rule)


def _value(source: Node, values: Mapping[int, int]) -> int | None:
    leaf = source.call
    return values.get(leaf.index) if isinstance(leaf, Leaf) and leaf.kind == "offset" else None


def is_call(value: Node, op: Op) -> bool:
    """Return whether a node is a call of this op."""
    return isinstance(value.call, Call) and value.call.op is op


def type_of(call: Call) -> Type:
    """Return the type of a call with one result."""
    (result,) = call.types
    assert result is not None
    return result
