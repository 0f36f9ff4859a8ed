"""Lazy mode for sizes that change: finds and runs programs for ranges of sizes (``_program/ranges.py``).

``programs.py`` asks ``find`` for nodes that have no exact program yet::

    for tokens in sentences:                # lengths 9, 17, 23, 12, ...
        loss = model(tokens).loss           # exact for 9; then one program up to 32, one up to 16, ...

Arrays that only the trace holds are donated, so a cache that grows by ``torch.cat`` is updated in place, and one that
something else holds is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from sys import getrefcount
from typing import Any

from isthmus import config
from isthmus._caches import LruCache
from isthmus._device.core import donation
from isthmus._device.core.slack import Slack
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Leaf, Node
from isthmus._graph.passes import optimise
from isthmus._graph.passes.rewrite import fill_offsets
from isthmus._graph.passes.slice_gradients import BACKWARDS
from isthmus._lazy.trace import trace
from isthmus._program import ranges
from isthmus._program.program import STATELESS, StateLayout
from isthmus._program.ranged_program import Given
from isthmus._program.ranges import NO_LIMITS, Limits, Match
from isthmus._runtime.padding.sizes import Refused

# Arrays that die: the trace holds them, and the function that counts.
_DYING = donation.OWNED - 1
_matches: LruCache[Any, list[Match | Refused | None]] = LruCache("graphs of a known size", 1024)


def find(
    wanted: tuple[Node, ...],
    state: StateLayout = STATELESS,
    results: tuple[int, ...] | None = None,
    donate: bool = True,
    limits: Limits = NO_LIMITS,
) -> Match | None:
    """Return the program for a range of sizes that computes these nodes; None where they are compiled exactly.

    That is so for the first sizes, and where padding was refused (``refusal``). ``state`` are the leaves that stay with
    the program, ``results`` the numbers of the nodes to return, by default all. ``donate`` is whether arrays that only
    the trace holds may be overwritten, ``limits`` are the largest sizes of dims of leaves for which they are known.
    """
    if any(isinstance(n.call, Leaf) for n in wanted):
        return None
    key = _key(wanted, state, results, donate, limits)
    known = _matches.get(key)
    if known is None:
        known = _matches[key] = [_found(wanted, state, results, donate, limits)]
    return known[0] if isinstance(known[0], Match) else None


def _found(
    wanted: tuple[Node, ...],
    state: StateLayout,
    results: tuple[int, ...] | None,
    donate: bool,
    limits: Limits,
) -> Match | Refused | None:
    try:
        graph = ranges.lifted_strides(lambda: _graph_of(wanted), _offset)
        return ranges.find(graph, partial(given, donate=donate), ranges.OPTIONS, state, results, limits)
    except Refused as error:
        ranges.note(error)
        return error


def _graph_of(wanted: tuple[Node, ...]) -> Graph:
    """Return the optimised graph; where gradients of slices start and end are integers of it, since sizes are."""
    offsets = dict(enumerate(trace.offsets))
    return optimise(fill_offsets(Graph.of(wanted), offsets, BACKWARDS), "lazy")


def refusal(wanted: tuple[Node, ...]) -> str:
    """Return what refused to be padded when a program for a range of sizes was looked for, "" if nothing did."""
    known = _matches.get(_key(wanted))
    return str(known[0]) if known is not None and isinstance(known[0], Refused) else ""


def _key(
    wanted: tuple[Node, ...],
    state: StateLayout = STATELESS,
    results: tuple[int, ...] | None = None,
    donate: bool = True,
    limits: Limits = NO_LIMITS,
) -> Any:
    # Offsets are integers of the graph here, so they are part of what is looked up.
    return (wanted, tuple(trace.offsets), config.buckets, state, results, donate, tuple(limits.items()))


def _offset(leaf: Leaf) -> int | None:
    return trace.offsets[leaf.index] if leaf.kind == "offset" else None


def given(leaves: list[int], donate: bool = True) -> Given:
    """Return the arrays of these leaves, and which of them only the trace holds, if they may be overwritten."""
    dying = frozenset(
        n for n, at in enumerate(leaves) if donate and _is_dying(at)
    )  # before a list of them holds them too
    return Given([trace.arrays[at] for at in leaves], dying)


def _is_dying(at: int) -> bool:
    """Return whether only the trace holds an array, or the slack around it."""
    if getrefcount(trace.arrays[at]) != _DYING:
        return False
    return type(trace.arrays[at]) is not Slack or donation.is_unshared(trace.arrays[at])


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

    program.run(match.sizes, given(program.slots), rest, keep)
    return lambda: program.report(outputs, lines_of(match, lines), sizes=match.sizes)


def lines_of(match: Match, lines: Mapping[Node, str]) -> dict[Node, str]:
    """Return the lines of recorded nodes by the nodes of a program for a range of sizes."""
    origins = zip(
        match.program.nodes, [match.graph.origins.get(n, n) for n in match.graph.nodes], strict=True
    )
    return {new: lines[origin] for new, origin in origins if origin in lines}
