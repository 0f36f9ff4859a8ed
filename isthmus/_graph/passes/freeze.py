"""What depends on parameters alone becomes a stage of its own, which is run once: ``options={"freeze": True}``.

For inference: a weight that is transposed and cast, inverted or dequantized at every call is computed at the first, and
later changes to it go unseen, as the option says. It serves graphs of ``torch.compile`` without gradients, whose
parameters torch names. ``isthmus.jit`` cannot use it: a replay reads parameters that an optimizer may have written to.
"""

from __future__ import annotations

from collections.abc import Container

from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Item, Leaf, Node
from isthmus._graph.passes.stages import Stage, stages_of
from isthmus._graph.private import Op


def freeze(graph: Graph, parameters: Container[int], free: Container[Op]) -> list[Stage]:
    """Return two stages, of which the first reads only array leaves that are parameters; none if it computes nothing.

    ``free`` are ops that cost nothing, such as views: to keep their results would save nothing.
    """
    frozen = {
        n
        for n in graph.inputs
        if isinstance(n.call, Leaf) and n.call.kind == "array" and n.call.index in parameters
    }
    constants = {n for n in graph.nodes if isinstance(n.call, Call) and not n.inputs}
    # What is made of parameters and of nothing at all can be computed once.
    known = _known(graph, frozen | constants)
    # A constant that the rest needs too is cheaper made there than kept.
    needed = {n for each in graph.nodes if each not in known for n in each.inputs} | set(graph.outputs)
    known = _known(graph, frozen | (constants - needed)) - frozen
    # Views alone: a stage of its own would cost more than it saves.
    if all(isinstance(n.call, Item) or (isinstance(n.call, Call) and n.call.op in free) for n in known):
        return []
    return stages_of(
        graph, [[n for n in graph.nodes if n in known], [n for n in graph.nodes if n not in known]]
    )


def _known(graph: Graph, roots: set[Node]) -> set[Node]:
    """Return the nodes that depend on given ones alone, and these."""
    known = set(roots)
    for n in graph.nodes:
        if n.inputs and known.issuperset(n.inputs):
            known.add(n)
    return known
