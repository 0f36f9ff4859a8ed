"""Graphs to read: as text, a value a line, and as Graphviz.

``print(graph)``, ``isthmus.graph_of``, ``isthmus.explain`` and the log of passes (``ISTHMUS_LOG=passes``) show this
text. Names are short and stable: ``%a0`` is the first array, ``%n0`` a number, ``%o0`` an offset, ``%d0`` a draw,
``%0`` the first call. Arguments are written as in Python, those that come first by position; a branch or body of
control flow is an indented graph. With ``isthmus.config.lines = "on"`` the user's line stands behind a call.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping

import torch

from isthmus._graph.arguments import Value
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Callee, Input, Item, Leaf, Node
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import schema_of


def names(graph: Graph) -> dict[Node, str]:
    """Return a short name for each node: a0, n0, o0, d0 for arrays, numbers, offsets and draws, 0 for a call."""
    count: Counter[str] = Counter()
    by_node: dict[Node, str] = {}
    for node in (*graph.inputs, *graph.nodes):
        # The first letter of a leaf's kind: a0, n0, o0, d0.
        prefix = node.call.kind[0] if isinstance(node.call, Leaf) else ""
        by_node[node] = f"{prefix}{count[prefix]}"
        count[prefix] += 1
    return by_node


def text(graph: Graph, lines: Mapping[Node, str] | None = None) -> str:
    """Return a graph as text, with the line of the user's code that recorded each call where ``lines`` has it."""
    known = {node: f"%{name}" for node, name in names(graph).items()}
    rows = []
    for node in (*graph.inputs, *graph.nodes):
        line = (lines or {}).get(node, "")
        rows.append(f"{_row(node, known)}{f'  # {line}' if line else ''}")
    rows.append(f"return {', '.join(known[output] for output in graph.outputs)}")
    return "\n".join(rows)


def _row(node: Node, known: Mapping[Node, str]) -> str:
    return f"{known[node]}: {_types(node)} = {_made(node, known)}"


def _types(node: Node) -> str:
    if len(node.types) == 1:
        return str(node.types[0])
    return f"({', '.join(str(t) for t in node.types)})"


def _made(node: Node, known: Mapping[Node, str]) -> str:
    """Return how a node is made of others."""
    call = node.call
    if isinstance(call, Leaf):
        return f"{call.kind} {call.index}"
    if isinstance(call, Item):
        return f"{known[node.inputs[0]]}[{call.index}]"
    shown = _arguments(call, [known[i] for i in node.inputs])
    return f"{op_name(call.op)}({', '.join(shown)})"


def op_name(op: Callee) -> str:
    """Return the name of an overload, or of a Python function."""
    return str(op) if isinstance(op, OpOverload) else getattr(op, "__name__", repr(op))


def _arguments(call: Call, inputs: list[str]) -> list[str]:
    """Return the arguments as in a call: those that come first by position, the others by name."""
    if not isinstance(call.op, OpOverload):
        return [_value(value, inputs) for _, value in call.arguments]
    positions = {a.name: None if a.keyword_only else a.position for a in schema_of(call.op).arguments}
    texts = []
    for place, (name, value) in enumerate(call.arguments):
        shown = _value(value, inputs)
        # A positional argument after one that was left out needs its name.
        texts.append(shown if positions[name] == place else f"{name}={shown}")
    if call.random:
        texts.append(f"draw={inputs[-1]}")
    return texts


def _value(value: Value, inputs: list[str]) -> str:
    if isinstance(value, Input):
        return inputs[value.index]
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item, inputs) for item in value)}]"
    if isinstance(value, Graph):  # a branch or a body, indented
        return "{\n" + textwrap.indent(text(value), "  ") + "\n}"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def dot(graph: Graph) -> str:
    """Return a graph in the language of Graphviz."""
    known = names(graph)
    rows = ["digraph {", "  node [shape=box, fontname=monospace]"]
    for node, name in known.items():
        kind = ", style=rounded" if isinstance(node.call, Leaf) else ""
        rows.append(f'  "{name}" [label="{_label(node)}\\n{_types(node)}"{kind}]')
        rows += [f'  "{known[source]}" -> "{name}"' for source in node.inputs]
    for place, output in enumerate(graph.outputs):
        rows.append(f'  "return {place}" [shape=plain]')
        rows.append(f'  "{known[output]}" -> "return {place}"')
    return "\n".join([*rows, "}"])


def _label(node: Node) -> str:
    call = node.call
    if isinstance(call, Leaf):
        return f"{call.kind} {call.index}"
    return f"[{call.index}]" if isinstance(call, Item) else op_name(call.op)
