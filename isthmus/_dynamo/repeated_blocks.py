"""Identical blocks of a graph, such as the layers of a transformer: found, so that each is compiled once.

A graph's nodes in their order are read as a string of signatures: what a node calls, with which constants, on tensors
of which layouts. A piece that repeats itself end to end is a candidate; the copies whose nodes are also wired alike
share one program, which is called once for each. What lies before, between and after becomes programs of its own.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from isthmus._dynamo.options import Options
from isthmus._dynamo.program import Program
from isthmus._dynamo.random import Draw, Keyed
from isthmus._runtime import compiler

# Fewer copies, or smaller ones, compile about as fast in one program, and may run faster there.
COPIES, NODES = 6, 16
_aten = torch.ops.aten


@dataclass(frozen=True)
class Segment:
    """A run of nodes that becomes one call; ``key`` is equal for those that compute the same."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    key: Any


def segments(module: GraphModule) -> list[Segment] | None:
    """Return a graph's nodes as segments of which several are copies of one another, or None."""
    if compiler.platform() != "cpu":
        return None  # a call costs more there than it saves: kernels are launched one by one
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    if any(isinstance(node.target, (Draw, Keyed)) for node in nodes):
        return None  # each copy would draw the same numbers
    found = _repeats([_signature(node) for node in nodes])
    if found is None:
        return None
    start, period, copies = found
    ends = [0, *range(start, start + period * copies + 1, period), len(nodes)]
    pieces = [nodes[a:b] for a, b in itertools.pairwise(ends) if a < b]
    cut = [segment(piece) for piece in pieces]
    most = Counter(each.key for each in cut).most_common(1)[0]
    return cut if most[1] >= COPIES and _flows(cut, most[0]) else None


def _flows(cut: list[Segment], key: Any) -> bool:
    """Return whether the nodes of a block mostly compute on each other, and are not a list of like calls."""
    block = next(each for each in cut if each.key == key)
    inside = set(block.nodes)
    fed = sum(any(arg in inside for arg in node.all_input_nodes) for node in block.nodes)
    return 2 * fed >= len(block.nodes)


def _signature(node: Node) -> Any:
    """Return what a node computes, whatever it is computed from."""
    return (node.target, _frozen((node.args, node.kwargs)), _layouts(node.meta.get("val")))


def _frozen(value: Any) -> Any:
    if isinstance(value, Node):
        return ("node", _layouts(value.meta.get("val")))
    if isinstance(value, (list, tuple)):
        return tuple([_frozen(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _frozen(item)) for name, item in value.items()])
    return repr(value)  # 1, 1.0 and True are equal, and not the same


def _layouts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str((value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), value.device))
    if isinstance(value, (list, tuple)):
        return tuple([_layouts(item) for item in value])
    return str(value)


def _repeats(signatures: Sequence[Any]) -> tuple[int, int, int] | None:
    """Return (start, period, copies) of the piece that repeats itself most, or None."""
    numbers: dict[Any, int] = {}
    text = [numbers.setdefault(signature, len(numbers)) for signature in signatures]
    best, saved = None, 0
    for period in _periods(text):
        for start, length in _runs(text, period):
            copies = length // period + 1
            if copies >= COPIES and (copies - 1) * period > saved:
                best, saved = (start, period, copies), (copies - 1) * period
    return best


def _periods(text: Sequence[int]) -> list[int]:
    """Return the distances at which most nodes find their like again."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for place, number in enumerate(text):
        if number in last:
            distances[place - last[number]] += 1
        last[number] = place
    return [period for period, _ in distances.most_common(12) if period >= NODES]


def _runs(text: Sequence[int], period: int) -> list[tuple[int, int]]:
    """Return (start, length) of each stretch whose every node equals the one a period later."""
    runs, start = [], None
    for place in range(len(text) - period + 1):
        same = place < len(text) - period and text[place] == text[place + period]
        if same and start is None:
            start = place
        elif not same and start is not None:
            runs.append((start, place - start))
            start = None
    return runs


def segment(nodes: Sequence[Node]) -> Segment:
    """Return a run of nodes with its inputs, numbered as they are met, and the key of its wiring."""
    inside = {node: place for place, node in enumerate(nodes)}
    inputs: dict[Node, int] = {}
    wiring = []
    for node in nodes:
        refers = [
            ("in", inside[arg]) if arg in inside else ("out", inputs.setdefault(arg, len(inputs)))
            for arg in _arguments(node)
        ]
        wiring.append((_signature(node), tuple(refers)))
    return Segment(tuple(nodes), tuple(inputs), tuple(wiring))


def _arguments(node: Node) -> list[Node]:
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def split(
    module: GraphModule, cut: list[Segment], options: Options, name: str
) -> tuple[GraphModule, list[Program]]:
    """Return a graph of calls of programs, one for each segment, and the programs, one for each key."""
    results = _results(module, cut)
    graph = Graph()
    made: dict[Any, Program] = {}
    values: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            values[node] = graph.node_copy(node, lambda n: values[n])
    for each in cut:
        if each.key not in made:
            title = f"{name}, part {len(made)}"
            made[each.key] = Program(_submodule(module, each, results[each.key]), options, title)
        call = graph.call_function(
            caller(made[each.key], f"part_{len(values)}"), tuple(values[n] for n in each.inputs)
        )
        for index, place in enumerate(results[each.key]):
            values[each.nodes[place]] = graph.call_function(getitem, (call, index))
    (output,) = [node for node in module.graph.nodes if node.op == "output"]
    graph.output(map_arg(output.args[0], lambda n: values[n]))
    return GraphModule(module, graph), list(made.values())


def getitem(results: Sequence[Any], index: int) -> Any:
    """Return one result of a program."""
    return results[index]


def _results(module: GraphModule, cut: list[Segment]) -> dict[Any, list[int]]:
    """Return, for each key, the places of the nodes that some copy's surroundings ask for."""
    found: dict[Any, set[int]] = defaultdict(set)
    for each in cut:
        inside = set(each.nodes)
        for place, node in enumerate(each.nodes):
            if any(user not in inside for user in node.users):
                found[each.key].add(place)
    return {each.key: sorted(found[each.key]) for each in cut}


def _submodule(module: GraphModule, segment: Segment, places: list[int]) -> GraphModule:
    graph = Graph()
    values: dict[Node, Node] = {}
    for node in segment.inputs:
        values[node] = graph.placeholder(node.name)
        values[node].meta = dict(node.meta)
    for node in segment.nodes:
        values[node] = graph.node_copy(node, lambda n: values[n])
    graph.output([values[segment.nodes[place]] for place in places])
    return GraphModule(module, graph)


def caller(program: Program, name: str) -> Callable[..., Any]:
    """Return a program as a function of tensors, for a graph to call."""

    def call(*args: Any) -> Any:
        return program(list(args))

    call.__name__, call.program = name, program  # type: ignore[attr-defined]
    return call


def calling(cut: GraphModule) -> Callable[[list[Any]], Any]:
    """Return a graph of programs as a callable of torch's list of arguments."""

    def run(args: list[Any]) -> Any:
        result = cut.forward(*args)
        args.clear()
        return result

    run.cut = cut  # type: ignore[attr-defined]
    return run
