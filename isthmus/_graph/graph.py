"""A graph: the nodes that some outputs need, in an order in which they can be computed, and its inputs.

Every mode but eager makes one: lazy mode and ``isthmus.jit`` of what they recorded, ``torch.compile`` and
``isthmus.export`` of FX (``_dynamo/convert.py``). Passes rewrite it (``passes/``), ``_program`` compiles it, a backend
of the user's may run it (``Backend``). It prints as::

    %a0: float32[2, 3] = array 0
    %n0: float64[] = number 0
    %0: float32[2, 3] = aten.mul.Tensor(%a0, %n0)
    return %0

A graph is a value: its nodes are immutable and interned (``nodes.py``), so a pass makes another graph, and ``origins``
leads from a node that a pass made to the one that was recorded, for messages that name the user's line. ``check`` has
the four rules that a valid graph keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.fx import GraphModule

from isthmus._graph.arguments import AnyFunction, Arguments, Value
from isthmus._graph.nodes import Call, Callee, Input, Item, Leaf, Node, reachable
from isthmus._graph.private import Op, OpOverload
from isthmus._graph.schema import PLACEMENT, schema_of
from isthmus.errors import IsthmusError

# The last two are leaves of joint graphs, which are looked at and never run (``_dynamo/joint.py``).
_ORDER = {"array": 0, "number": 1, "offset": 2, "draw": 3, "argument": 4, "opaque": 5}


@dataclass(frozen=True)
class Graph:
    """A pure function: ``inputs`` are its leaves, arrays first; ``nodes`` are calls, each after what it needs."""

    inputs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]
    # For nodes that a pass has made, the node that was recorded.
    origins: Mapping[Node, Node] = field(default_factory=dict, compare=False, repr=False)
    # For calls whose line of the user's code is known, that line.
    lines: Mapping[Node, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, outputs: Sequence[Node]) -> Graph:
        """Return the graph that computes these nodes and nothing else."""
        nodes = list(reachable(outputs))
        leaves = [n for n in nodes if isinstance(n.call, Leaf)]
        return cls(
            tuple(sorted(leaves, key=_place)),
            tuple(n for n in nodes if not isinstance(n.call, Leaf)),
            tuple(outputs),
        )

    @property
    # Each op once, in the order of first use: what a backend must be able to run.
    def ops(self) -> tuple[Callee, ...]:
        """Return every op the graph calls, each once, in the order of their first calls."""
        return tuple(dict.fromkeys(n.call.op for n in self.nodes if isinstance(n.call, Call)))

    def run(self, values: Sequence[Value], lower: Callable[[Op, Arguments], Value]) -> list[Value]:
        """Compute the outputs from a value for each input; ``lower`` computes one op.

        It is given the op's arguments by name, defaults included, those that say where a result lives left out; a
        random op's has a ``draw`` too. It returns a list where there are several results.
        """

        def call(node: Node, inputs: list[Value]) -> Value:
            assert isinstance(node.call, Call)
            assert isinstance(node.call.op, OpOverload)
            named = arguments_of(node.call, inputs)
            arguments = {name: value for name, value in named.items() if name not in PLACEMENT}
            return lower(node.call.op, arguments | ({"draw": inputs[-1]} if node.call.random else {}))

        return evaluate(self, values, call)

    def __str__(self) -> str:
        # Not above: ``text`` and ``fx`` import this file.
        from isthmus._graph.text import text

        return text(self, self.lines)

    def dot(self) -> str:
        """Return the graph for Graphviz."""
        from isthmus._graph.text import dot

        return dot(self)

    def to_fx(self) -> GraphModule:
        """Return the graph as a ``torch.fx.GraphModule`` that runs on CPU tensors."""
        from isthmus._graph.fx import to_fx

        return to_fx(self)


def _place(node: Node) -> tuple[int, str, int]:
    leaf = node.call
    assert isinstance(leaf, Leaf)
    # Numbers of one dtype stand together, so that a program can take them as one vector.
    return (_ORDER[leaf.kind], str(leaf.type.dtype) if leaf.kind == "number" else "", leaf.index)


class Backend(Protocol):
    """What runs graphs: the one thing an accelerator has to bring.

    ``compile`` returns a function that is called with a value for each of the graph's inputs: a contiguous CPU tensor
    for an array, a Python number for a number or an offset, a CPU tensor of four uint32 words for a draw. It returns
    a CPU tensor for each output.
    """

    def compile(self, graph: Graph) -> AnyFunction:
        """Return the function that runs the graph."""


def evaluate(
    graph: Graph,
    values: Sequence[Value],
    run: Callable[[Node, list[Value]], Value],
) -> list[Value]:
    """Compute a graph: ``run`` gets a call's node and its inputs, and returns a list where it has several results."""
    results: dict[Node, Value] = dict(zip(graph.inputs, values, strict=True))
    # What is no longer needed is let go, so that memory is bounded as an eager program's is.
    last = {each: n for n in graph.nodes for each in n.inputs}  # later users overwrite earlier ones
    outputs = set(graph.outputs)
    for n in graph.nodes:
        inputs = [results[i] for i in n.inputs]
        # Results of several values are lists; an item picks one.
        results[n] = inputs[0][n.call.index] if isinstance(n.call, Item) else run(n, inputs)
        for i in n.inputs:
            if last[i] is n and i not in outputs:
                results.pop(i, None)
    # An output may be an input of the graph, which the loop never visits.
    return [results[output] for output in graph.outputs]


def arguments_of(call: Call, values: Sequence[Value]) -> Arguments:
    """Return every argument of a call by its schema's name and in its order, inputs filled in and defaults added."""
    if not isinstance(call.op, OpOverload):
        return {name: fill(value, values) for name, value in call.arguments}
    arguments = {name: fill(value, values) for name, value in call.arguments}
    return {
        # In the order of the schema, as lowerings and the CPU's kernels take them.
        a.name: arguments.get(a.name, a.default)
        for a in schema_of(call.op).arguments
        if a.name in arguments or a.has_default
    }


def fill(value: Value, values: Sequence[Value]) -> Value:
    """Return an argument with its inputs filled in, tuples as lists."""
    if isinstance(value, Input):
        return values[value.index]
    return [fill(item, values) for item in value] if isinstance(value, tuple) else value


def check(graph: Graph) -> None:
    """Raise unless the graph is valid: closed, ordered, made of functional calls whose inputs are all there.

    1. Every input of a node is an input of the graph or an earlier node, and so is every output.
    2. Inputs are leaves, each once; nodes are calls and items, each once.
    3. A call's op changes none of its arguments, its arguments are the schema's, and each of its inputs is named.
    4. A node with several results is read through its items only, and a node with one has none.
    """
    known = set(graph.inputs)
    _demand(len(known) == len(graph.inputs), "an input is there twice")
    _demand(all(isinstance(n.call, Leaf) for n in graph.inputs), "an input is not a leaf")
    for n in graph.nodes:
        _demand(n not in known, f"{n} is there twice")
        _demand(all(needed in known for needed in n.inputs), f"{n} comes before what it needs")
        known.add(n)
        if isinstance(n.call, Item):
            _demand(len(n.inputs) == 1 and n in n.inputs[0].results, f"{n} is no result of its input")
            continue
        _demand(isinstance(n.call, Call), f"{n} is neither a call nor an item")
        _check_call(n)
    _demand(all(output in known for output in graph.outputs), "an output is not computed")
    _demand(all(len(output.types) == 1 for output in graph.outputs), "an output has several results")


def _check_call(node: Node) -> None:
    call = node.call
    assert isinstance(call, Call)
    if isinstance(call.op, OpOverload):
        schema = schema_of(call.op)
        _demand(not schema.mutated, f"{call.op} writes to its arguments")
        names = {a.name for a in schema.arguments}
        _demand(all(name in names for name, _ in call.arguments), f"{call.op} has no such argument")
    used = {n for _, value in call.arguments for n in _inputs_in(value)}
    # The draw comes last among the inputs and is named by ``random``.
    used |= {len(node.inputs) - 1} if call.random else set()  # the draw is no argument of the schema
    _demand(used == set(range(len(node.inputs))), f"{call.op} does not name its inputs")
    _demand(all(len(i.types) == 1 for i in node.inputs), f"{call.op} reads several results as one")


def _inputs_in(value: Value) -> list[int]:
    if isinstance(value, Input):
        return [value.index]
    return [n for item in value for n in _inputs_in(item)] if isinstance(value, tuple) else []


def _demand(ok: bool, message: str) -> None:
    if not ok:
        raise IsthmusError(f"this graph is not valid: {message}")
