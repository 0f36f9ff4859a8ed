"""Stages: a graph cut into parts that are programs of their own, run one after another.

Three passes cut graphs, each for another reason; what they return is a list of stages in the order of running:

- ``repeated_blocks.py``: layers that compute the same become stages with the same ``key``, compiled once;
- ``freeze.py``: what depends on parameters alone becomes a first stage, which is run once;
- ``split.py``: what changes from step to step becomes stages apart from what does not, which are found again.

``_program/staged.py`` runs stages for ``torch.compile``, ``_lazy/programs.py`` for lazy mode. A stage is part of a
graph that stays as it is; ``alone`` returns it as a graph of its own, whose array leaves are the values it reads::

    graph    y = tanh(x @ w);  z = y.sum()          stage    (z,) of nodes (tanh, sum), inputs (mm,)
    alone    z = tanh(leaf 0).sum()
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Leaf, Node, exact, leaf, reachable
from isthmus._graph.passes.rewrite import remade


@dataclass(frozen=True)
class Stage:
    """Calls and items, each after what it needs, and those of them that others want."""

    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The values that are read from outside, in the order of their first use."""
        inside = set(self.nodes)
        return tuple(dict.fromkeys(n for each in self.nodes for n in each.inputs if n not in inside))

    @property
    def arrays(self) -> set[int]:
        """Return the places in the trace of the arrays that are read."""
        return {n.call.index for n in self.inputs if isinstance(n.call, Leaf) and n.call.kind == "array"}

    @property
    def key(self) -> Hashable:
        """What the stage computes, whatever it is computed from: equal for stages that one program can run."""
        places = {n: at for at, n in enumerate((*self.inputs, *self.nodes))}
        wiring = tuple((signature(n), *[places[source] for source in n.inputs]) for n in self.nodes)
        return tuple(n.type for n in self.inputs), wiring

    def alone(self, origins: Mapping[Node, Node]) -> Graph:
        """Return the stage as a graph of its own: its n-th input is array leaf n.

        ``origins`` are those of the whole graph (``Graph.origins``).
        """
        leaves = {n: leaf("array", at, n.type) for at, n in enumerate(self.inputs)}
        # Leaves in the place of values from outside: equal stages become equal graphs.
        new = remade(self.nodes, leaves)
        graph = Graph.of(tuple(new[n] for n in self.outputs))
        return replace(graph, origins={new[n]: origins.get(n, n) for n in reversed(self.nodes)})


def signature(node: Node) -> Hashable:
    """Return the signature of a node: nodes of two graphs with equal ones do the same to their inputs."""
    call = node.call
    if not isinstance(call, Call):
        return call
    return (call.op, exact(call.arguments), call.types, call.context, call.random, call.draw, call.layouts)


def in_order(graph: Graph, rank: Mapping[Node, int]) -> Graph:
    """Return the graph with its calls by rank as far as they have one, and items after the call they belong to.

    Nodes of a graph are in the order in which outputs need them, which mixes the layers of a backward pass.
    """
    origins = graph.origins
    ranked = sorted(
        [n for n in graph.nodes if origins.get(n, n) in rank], key=lambda n: rank[origins.get(n, n)]
    )
    known = set(graph.nodes)
    nodes: dict[Node, None] = {}
    for n in reachable([*ranked, *graph.nodes]):
        if n in known and n not in nodes:
            nodes[n] = None
            # Items right behind their call: a stage never has the one without the other.
            nodes |= dict.fromkeys(item for item in n.results if item in known)
    return replace(graph, nodes=tuple(nodes))


def stages_of(graph: Graph, parts: Iterable[Sequence[Node]]) -> list[Stage]:
    """Return the stages of a graph whose nodes are given in parts, in an order in which they can run."""
    tuples = [tuple(part) for part in parts]
    home = {n: at for at, part in enumerate(tuples) for n in part}
    read_outside = {given for n in graph.nodes for given in n.inputs if home.get(given) != home[n]}
    read_outside |= set(graph.outputs)
    return [
        Stage(part, tuple(n for n in part if n in read_outside and len(n.types) == 1))
        for part in tuples
        if part
    ]


def with_common_outputs(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages, those with equal keys with outputs in the same places: what is wanted of one of them."""
    keys = [stage.key for stage in stages]
    needed: dict[Hashable, set[int]] = {}
    for key, stage in zip(keys, stages, strict=True):
        outputs = set(stage.outputs)
        places = {at for at, n in enumerate(stage.nodes) if n in outputs}
        needed.setdefault(key, set()).update(places)
    return [
        Stage(stage.nodes, tuple(stage.nodes[at] for at in sorted(needed[key])))
        for key, stage in zip(keys, stages, strict=True)
    ]
