"""A graph cut into stages: what differs from the graph of the last round is computed apart from what does not.

In a loop a little thing may grow, as the tokens do that a model has written, and then every round has a graph of its
own. What remains without the little thing is a graph that was there before.
"""

from __future__ import annotations

from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Item, Leaf, Node
from isthmus._graph.passes.stages import Stage, stages_of

# Of how many nodes one may differ, and how many stages there may be. Beyond that one program is better: many small ones
# take longer to compile than it does.
_SHARE, _MOST = 4, 5


def split(old: Graph, new: Graph) -> list[Stage]:
    """Return the stages of a graph that is much like an old one, none if it is not."""
    changed = _changed(old, new)
    if not changed or len(changed) * _SHARE > len(new.nodes):
        return []
    stages = staged(new, changed)
    return stages if len(stages) <= _MOST else []


def staged(graph: Graph, apart: set[Node]) -> list[Stage]:
    """Return stages of a graph that have calls and their results ``apart`` from the others."""
    if any(isinstance(output.call, Leaf) for output in graph.outputs):
        return []  # there is nothing to compute for it
    levels = _levels(graph, apart)
    return stages_of(
        graph, [[n for n in graph.nodes if levels[n] == at] for at in sorted(set(levels.values()))]
    )


def _changed(old: Graph, new: Graph) -> set[Node]:
    """Return the nodes that are not what the old graph has in their places, but for what they read."""
    # Another number of nodes is another loop: nothing can be compared node for node.
    if len(old.nodes) != len(new.nodes):
        return set()
    changed: set[Node] = set()
    for before, after in zip(old.nodes, new.nodes, strict=True):
        if isinstance(after.call, Item):
            differs = after.inputs[0] in changed  # a result goes with its call
        else:
            differs = before.call is not after.call or _reads_other_leaves(before, after)
        if differs:
            changed.add(after)
    return changed


def _reads_other_leaves(before: Node, after: Node) -> bool:
    pairs = zip(before.inputs, after.inputs, strict=True)
    # Leaves are numbered in the order of use, so one more leaf moves those behind it.
    return any(a is not b and (isinstance(a.call, Leaf) or isinstance(b.call, Leaf)) for a, b in pairs)


def _levels(graph: Graph, apart: set[Node]) -> dict[Node, int]:
    """Return the stage of every node: odd for what is apart, even for the rest."""
    # Even and odd levels alternate, so a stage is either what changes or what does not.
    levels: dict[Node, int] = {}
    for n in graph.nodes:
        odd = n in apart
        before = [levels[source] + ((source in apart) is not odd) for source in n.inputs if source in levels]
        levels[n] = max([int(odd), *before])
    # The rest waits for its first reader, so that few stages are left.
    first: dict[Node, int] = {}
    for n in reversed(graph.nodes):
        if n not in apart:
            levels[n] = first.get(n, levels[n])
        for source in n.inputs:
            at = levels[n] - ((source in apart) is not (n in apart))
            first[source] = min(first.get(source, at), at)
    for n in graph.nodes:
        if isinstance(n.call, Item):
            levels[n] = levels[n.inputs[0]]  # a call is there once, with all of its results
    return levels
