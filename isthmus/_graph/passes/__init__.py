"""Passes: rewrites of graphs that compute the same, one file each, run for every mode that can use them.

``optimise(graph, mode)`` runs the passes of a mode in the order of ``PASSES``; a pass is a function that looks at a
graph and returns a ``Rule`` for ``rewrite``, or None where there is nothing to do. The modes:

- ``lazy``: graphs recorded in lazy mode and by ``isthmus.jit``, forward, backward and optimizer in one;
- ``compile``: graphs of ``torch.compile``, after AOTAutograd has split forward from backward;
- ``joint``: the graph of forward and backward together, before it is split (``_dynamo/joint.py``): here a pass decides
  what forward saves for backward;
- ``export``: graphs of ``isthmus.export``, whose sizes may be symbols: a pass compares them and does not order them.

What no output needs is not in a graph (``Graph.of``), and equal calls on equal inputs are one node, so dead code and
common subexpressions need no pass.

Passes in ``CUTS`` make several programs of one graph instead: ``cut(name, mode, graph, how)`` returns the stages
(``stages.py``). They need more than the graph (the last one, which leaves are parameters), so modes call them by name.

To add a pass: write ``passes/NAME.py``, list it here with its modes, and give it a graph in tests/graph/test_passes.py,
which runs it in every mode it claims. ``ISTHMUS_LOG=passes`` shows each graph before and after a pass that changes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from isthmus import config
from isthmus._graph.graph import Graph
from isthmus._graph.passes.attention_masks import attention_masks
from isthmus._graph.passes.constants import fold_constants
from isthmus._graph.passes.cross_entropy import cross_entropy
from isthmus._graph.passes.rewrite import Rule, rewrite
from isthmus._graph.passes.slice_gradients import slice_gradients
from isthmus._graph.passes.stages import Stage
from isthmus._graph.passes.views import fold_views

_log = logging.getLogger("isthmus.passes")


@dataclass(frozen=True)
class Pass:
    """A rewrite, and the modes whose graphs it serves."""

    name: str
    rule: Callable[[Graph], Rule | None]
    modes: frozenset[str]

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph, rewritten."""
        rule = self.rule(graph)
        return graph if rule is None else rewrite(graph, rule)


PASSES = (
    Pass("attention_masks", attention_masks, frozenset({"lazy", "compile", "joint", "export"})),
    Pass("cross_entropy", cross_entropy, frozenset({"lazy", "compile", "joint", "export"})),
    # In lazy mode for slices whose ends have not changed yet: others are run-time numbers.
    Pass("slice_gradients", slice_gradients, frozenset({"lazy", "compile", "joint", "export"})),
    # Not on joint graphs: AOTAutograd has no storages, and its views are cheaper to recompute than to save.
    Pass("fold_views", fold_views, frozenset({"lazy", "compile", "export"})),
    Pass("fold_constants", fold_constants, frozenset({"lazy", "compile", "export"})),
)


CUTS = {
    # Not in lazy mode and isthmus.jit, whose steps keep state in one program: ARCHITECTURE.md has the numbers.
    "repeated_blocks": frozenset({"compile"}),
    "freeze": frozenset({"compile"}),
    "split": frozenset({"lazy"}),
}
"""Passes that cut a graph into stages, and the modes whose graphs they serve."""


def optimise(graph: Graph, mode: str) -> Graph:
    """Return a graph that computes the same with fewer or cheaper calls; unused inputs are gone."""
    for each in PASSES:
        if mode not in each.modes:
            continue
        new = each(graph)
        if config.current.log == "passes" and new.outputs != graph.outputs:
            log_change(mode, each.name, graph, new)
        graph = new
    return graph


def cut(name: str, mode: str, graph: Graph, how: Callable[[Graph], list[Stage]]) -> list[Stage]:
    """Return the stages that one of ``CUTS`` cuts a graph into, none if it leaves it whole."""
    assert mode in CUTS[name]
    stages = how(graph)
    if config.current.log == "passes" and stages:
        log_change(mode, name, graph, "\n\n".join(str(stage.alone({})) for stage in stages))
    return stages


def log_change(mode: str, name: str, before: object, after: object) -> None:
    """Log a graph before and after a pass; by a warning, so that no logging has to be set up to see it."""
    _log.warning("%s, before %s:\n%s\nafter:\n%s", mode, name, before, after)
