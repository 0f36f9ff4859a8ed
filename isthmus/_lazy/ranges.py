"""Lazy mode for sizes that change: finds and runs programs for ranges of sizes (``_program/ranges.py``).

``programs.py`` asks ``find`` for nodes that have no exact program yet::

    for tokens in sentences:                # lengths 9, 17, 23, 12, ...
        loss = model(tokens).loss           # exact for 9; then one program up to 32, one up to 16, ...

Arrays that only the trace holds are donated, so a cache that grows by ``torch.cat`` is updated in place, and one that
something else holds is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from sys import getrefcount
from typing import Any

from isthmus import config
from isthmus._caches import LruCache
from isthmus._device.core import donation
from isthmus._device.core.slack import Slack
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Leaf, Node
from isthmus._graph.passes import optimise
from isthmus._lazy.trace import trace
from isthmus._program import ranges
from isthmus._program.ranges import Given, Match

# Half types are rounded after every op, as they are when ops run one by one.
OPTIONS = {"xla_allow_excess_precision": False}
# Arrays that die: the trace holds them, and the function that counts.
_DYING = donation.OWNED - 1
_matches: LruCache[Any, list[Match | None]] = LruCache("graphs of a known size", 1024)


def find(wanted: tuple[Node, ...]) -> Match | None:
    """Return the program for a range of sizes that computes these nodes; None where they are compiled exactly."""
    if any(isinstance(n.call, Leaf) for n in wanted):
        return None
    # Offsets are integers of the graph here, so they are part of what is looked up.
    key = (wanted, tuple(trace.offsets), config.buckets)
    known = _matches.get(key)
    if known is None:
        graph = ranges.lifted_strides(lambda: optimise(Graph.of(wanted), "lazy"), trace.offsets)
        known = _matches[key] = [None if graph is None else ranges.find(graph, _given, OPTIONS)]
    return known[0]


def _given(leaves: list[int]) -> Given:
    """Return the arrays of these leaves, and which of them only the trace holds."""
    dying = frozenset(
        n for n, at in enumerate(leaves) if _is_dying(at)
    )  # before a list of them holds them too
    return Given([trace.arrays[at] for at in leaves], dying)


def _is_dying(at: int) -> bool:
    """Return whether only the trace holds an array, or the slack around it."""
    if getrefcount(trace.arrays[at]) != _DYING:
        return False
    return type(trace.arrays[at]) is not Slack or getrefcount(trace.arrays[at].array) == _DYING


def run(
    match: Match, lines: Mapping[Node, str], commit: Callable[[Sequence[Any]], None]
) -> Callable[[], None]:
    """Run a program on the trace's arrays; return what settles its value checks."""
    program, compiled = match.program, match.program.compiled
    constants = compiled.pack_numbers(trace.numbers, trace.offsets)
    rest = compiled.arguments([], constants, trace.draws[: compiled.draws])
    outputs: list[Any] = []

    def keep(values: list[Any], results: Sequence[Any]) -> None:
        outputs[:] = results
        commit(values)

    program.run(match.sizes, _given(program.slots), rest, keep)
    origins = zip(program.nodes, [match.graph.origins.get(n, n) for n in match.graph.nodes], strict=True)
    named = {new: lines[origin] for new, origin in origins if origin in lines}
    return lambda: compiled.report(outputs, named)
