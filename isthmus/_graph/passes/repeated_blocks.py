"""Equal blocks of a graph, such as the layers of a transformer, become stages that one program runs.

The calls of a graph in their order are read as a string of signatures: an op, its constants, the types of its results.
A piece that repeats itself end to end is a candidate; the copies whose calls are wired alike too share one program,
which is called once for each. What lies before, between and after becomes programs of its own.

What it saves is compilation: of a GPT's 12 layers XLA compiles one. What it costs is fusion across the cuts and a
call of a few microseconds for each, and a graph in stages keeps no state and donates nothing: so it serves
``torch.compile`` on the CPU, in graphs that write to none of their arguments. On a GPU kernels are launched one by one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence

from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Item, Node
from isthmus._graph.passes.stages import Stage, signature, stages_of, with_common_outputs

# Fewer copies, or smaller ones, compile about as fast in one program, and may run faster there.
COPIES, CALLS = 6, 16
# How many of the distances at which calls find their like again are tried as lengths of a block.
_PERIODS = 12


def repeated_blocks(graph: Graph) -> list[Stage]:
    """Return a graph's stages, of which several have the same key; none if it has no equal blocks."""
    calls = [n for n in graph.nodes if not isinstance(n.call, Item)]
    repetition = repeats([signature(n) for n in calls])
    if repetition is None:
        return []
    start, period, copies = repetition
    # The ends of what lies before, of each copy, and of what lies after.
    ends = [0, *range(start, start + period * copies + 1, period), len(calls)]
    pieces = [_with_items(calls[a:b], graph) for a, b in itertools.pairwise(ends)]
    stages = stages_of(graph, pieces)
    # Copies that read alike may be wired differently, as the first and last layer often are.
    counts = Counter(stage.key for stage in stages)
    key, most = counts.most_common(1)[0]
    block = next(stage for stage in stages if stage.key == key)
    return with_common_outputs(stages) if most >= COPIES and _flows(block) else []


def _with_items(calls: Sequence[Node], graph: Graph) -> list[Node]:
    """Return calls, each followed by those of its results that the graph reads."""
    known = set(graph.nodes)
    return [n for call in calls for n in (call, *[item for item in call.results if item in known]) if n]


def _flows(block: Stage) -> bool:
    """Return whether the calls of a block mostly compute on each other, and are not a list of like calls."""
    inside = set(block.nodes)
    fed = sum(any(source in inside for source in n.inputs) for n in block.nodes)
    # A list of casts of parameters repeats itself too, and nothing in it feeds the next.
    return 2 * fed >= len(block.nodes)


def repeats(signatures: Sequence[Hashable]) -> tuple[int, int, int] | None:
    """Return (start, period, copies) of the piece that repeats itself most, or None."""
    numbers: dict[Hashable, int] = {}
    # Small numbers in place of signatures, which are long tuples: they are compared very often.
    text = [numbers.setdefault(each, len(numbers)) for each in signatures]
    best, saved = None, 0
    for period in _periods(text):
        for start, length in _runs(text, period):
            # A run of ``length`` equal calls is that many periods, and the first copy itself.
            copies = length // period + 1
            # The best piece is the one that leaves most calls to copies.
            if copies >= COPIES and (copies - 1) * period > saved:
                best, saved = (start, period, copies), (copies - 1) * period
    return best


def _periods(text: Sequence[int]) -> list[int]:
    """Return the distances at which most calls find their like again."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for place, number in enumerate(text):
        if number in last:
            distances[place - last[number]] += 1
        last[number] = place
    return [period for period, _ in distances.most_common(_PERIODS) if period >= CALLS]


def _runs(text: Sequence[int], period: int) -> list[tuple[int, int]]:
    """Return (start, length) of each stretch whose every call equals the one a period later."""
    runs, start = [], None
    for place in range(len(text) - period + 1):
        same = place < len(text) - period and text[place] == text[place + period]
        if same and start is None:
            start = place
        elif not same and start is not None:
            runs.append((start, place - start))
            start = None
    return runs
