"""Recorded graphs of a few small ops that every machine computes alike: they run on the host, like such eager ops.

``programs.py`` asks ``find`` for every graph, before it looks for a program. What qualifies is said in
``_device/core/small_ops.py``, here for each call of a graph of at most ``_MOST`` calls::

    ids = torch.cat([ids, token], 1)        # with ``done = done | (token == end)``: integers and booleans alone
    done.all().item()

Such a graph runs by the reference backend, ATen on the CPU, until it has run ``small_ops.OFTEN`` times; on a GPU or a
TPU only where all of its arrays have been computed.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from isthmus import config
from isthmus._caches import LruCache
from isthmus._device.core.slack import Slack
from isthmus._device.core.small_ops import LIMIT, OFTEN, is_exact, is_there
from isthmus._graph.backends import backend_named
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Leaf, Node
from isthmus._graph.private import OpOverload
from isthmus._lazy.custom_backend import HostedProgram
from isthmus._lazy.trace import trace
from isthmus._ops.tensors.views import VIEWS
from isthmus._runtime import counters, placement

# Larger graphs are worth a program, and walking them would cost each run.
_MOST = 32
_MOVES = {*VIEWS, torch.ops.aten.as_strided.default}


class SmallGraph:
    """A graph that runs on the host, which of its outputs each node is, and how often it still runs there."""

    def __init__(self, unique: tuple[Node, ...]) -> None:
        self.graph = Graph.of(unique)
        self.places = {node: place for place, node in enumerate(unique)}
        self.program = HostedProgram(self.graph, backend_named("reference"))
        self.left = OFTEN

    def arrays(self) -> list[Any]:
        """Return the arrays of the trace that the graph reads."""
        leaves = [n.call for n in self.graph.inputs]
        return [trace.arrays[c.index] for c in leaves if isinstance(c, Leaf) and c.kind == "array"]

    def is_accepted(self) -> bool:
        """Run the graph for nothing; return False where the CPU refuses it, since the device may not."""
        arrays = [trace.arrays[at] for at in self.program.slots]
        arrays = [array.exact() if type(array) is Slack else array for array in arrays]
        constants = self.program.pack_numbers(trace.numbers, trace.offsets)
        try:
            self.program.call(*self.program.arguments(arrays, constants, []))
        except Exception:
            return False
        return True


_graphs: LruCache[tuple[Node, ...], list[SmallGraph | None]] = LruCache("small recorded graphs", 1024)


def find(wanted: tuple[Node, ...]) -> SmallGraph | None:
    """Return a function that computes these nodes on the host, None where they are compiled."""
    if config.small_ops != "host" or config.shapes == "exact" or config.backend != "xla":
        # ``shapes = "exact"`` means that every graph gets a program of its own.
        return None
    if placement.home is not None:
        return None
    known = _graphs.get(wanted)
    if known is None:
        # Looked at once per graph; later runs find the answer by the nodes.
        small = SmallGraph(tuple(dict.fromkeys(wanted))) if _is_small(wanted) else None
        if small is not None and not (_is_exact(small.graph) and small.is_accepted()):
            small = None
        known = _graphs[wanted] = [small]
    small = known[0]
    if small is None or small.left == 0 or not all(map(is_there, small.arrays())):
        return None
    small.left -= 1
    counters.count("small ops on the host")
    return small


def _is_small(wanted: tuple[Node, ...]) -> bool:
    """Return whether a graph has few calls, without a look at all of a large one."""
    seen: set[Node] = set()
    left = list(wanted)
    while left:
        n = left.pop()
        if n in seen:
            continue
        # Four nodes per call are generous: leaves, items and views are nodes as well.
        if len(seen) > 4 * _MOST or any(t is not None and math.prod(t.size) > LIMIT for t in n.types):
            return False
        seen.add(n)
        left += n.inputs
    return sum([isinstance(n.call, Call) for n in seen]) <= _MOST


def _is_exact(graph: Graph) -> bool:
    if any(isinstance(n.call, Leaf) and n.call.kind == "draw" for n in graph.inputs):
        # A random op on the host would draw other numbers than the device.
        return False
    return all(_is_exact_call(n) for n in graph.nodes if isinstance(n.call, Call))


def _is_exact_call(n: Node) -> bool:
    call = n.call
    assert isinstance(call, Call)
    if call.random or not isinstance(call.op, OpOverload):
        return False
    types = [*[i.type for i in n.inputs], *[t for t in call.types if t is not None]]
    return call.op in _MOVES or is_exact(call.op, dict(call.arguments), {t.dtype for t in types})
