"""The trace: what has been recorded and not run; one for each thread that records, emptied whenever it runs.

There is one ``trace`` object, which shows the trace of its ``owner``. Its users hold the lock and call
``enter`` first, which parks the trace of another thread; so a trace costs one comparison an op, and threads that record
at once do not mix their graphs. A buffer knows who recorded its node (``Buffer.recorder``): another thread that needs
it has that trace run first.

Recording takes the lock for the length of one op, so that a program never runs between the reading of a value and
the node made of it. What is read from outside becomes a leaf, numbered in the order of its first use.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from isthmus import config
from isthmus._device.core import generator
from isthmus._device.core.buffer import Buffer, Lost, Signature
from isthmus._device.core.donation import MARKERS, settled
from isthmus._device.core.slack import Slack
from isthmus._graph.nodes import Node, Type, leaf
from isthmus._runtime.dtypes import to_torch_dtype
from isthmus._runtime.host_arrays import LARGEST, NUMBER_DTYPES

_NUMBERS = {kind: to_torch_dtype(dtype) for kind, dtype in NUMBER_DTYPES.items()}
NUMBER_TYPES = {dtype: Type((), dtype) for dtype in [*_NUMBERS.values(), torch.uint64]}
OFFSET = Type((), torch.int64)
WORDS = Type((4,), torch.uint32)


def number_dtype(value: Any) -> torch.dtype:
    """Return the dtype in which a Python number enters a program."""
    return torch.uint64 if type(value) is int and value > LARGEST else _NUMBERS[type(value)]


class Trace:
    """Leaves in the order they were met, and the buffers whose contents are nodes."""

    def __init__(self) -> None:
        # Reentrant: recording an op may compile, and compiling runs Python that records.
        self.lock = threading.RLock()
        self.owner = threading.get_ident()
        self.parked: dict[int, dict[str, Any]] = {}
        self.several = False  # whether another thread's trace is parked
        # Nodes of leaves by their place, which all traces share.
        self.known: dict[tuple[int, Signature], Node] = {}
        self.number_nodes: dict[torch.dtype, list[Node]] = {dtype: [] for dtype in NUMBER_TYPES}
        self.offset_nodes: list[Node] = []
        self._begin()

    def _begin(self) -> None:
        """Start an empty trace."""
        self.arrays: list[Any] = []
        self.origins: list[ref[Buffer]] = []
        self.places: dict[int, int] = {}
        self.array_nodes: list[Node] = []
        self.numbers: dict[torch.dtype, list[Any]] = {dtype: [] for dtype in NUMBER_TYPES}
        self.offsets: list[int] = []
        self.draws: list[Any] = []
        self.generators: list[torch.Generator | None] = []
        self.pending: list[ref[Buffer]] = []
        # What buffers made in this trace held before they were written to: an optimizer's moments begin as zeros.
        self.first: dict[int, tuple[ref[Buffer], Node]] = {}
        self.lines: dict[Node, str] = {}
        # The epoch tells a recipe being made whether the trace was run meanwhile (``node_builder``).
        self.size, self.epoch = 0, next(_epochs)
        self.limit = config.graph_size
        # While a function is captured nothing may run: this makes the error that says so.
        self.refusal: Callable[[], Exception] | None = None

    def enter(self, thread: int) -> None:
        """Show the trace of this thread; needs the lock."""
        if thread == self.owner:
            return
        # Only a trace with something in it is parked.
        if self.pending or self.arrays or self.refusal is not None:
            self.parked[self.owner] = {name: vars(self)[name] for name in _OF_A_THREAD}
        self.owner = thread
        parked = self.parked.pop(thread, None)
        if parked is None:
            self._begin()
        else:
            vars(self).update(parked)
        # One test for the entries: with a single trace no buffer need be asked who recorded it.
        self.several = bool(self.parked)

    def array(self, buffer: Buffer) -> Node:
        """Return the leaf of a buffer whose contents are an array, or what it holds already."""
        held = buffer.held
        if type(held) is Node:
            # The node belongs to this trace: it is used as it is.
            if not self.several or buffer.recorder == self.owner:
                return held
            held = buffer.value  # runs the trace of the thread that recorded it
        # A program for a range of sizes takes an array with slack as it is; what isthmus.jit records is exact.
        if type(held) in MARKERS and (type(held) is not Slack or self.refusal is not None):
            held = settled(buffer)
        at = self.places.get(id(buffer))
        # A buffer that died may have left its address to another, but not its array.
        if at is not None and self.arrays[at] is held:
            return self.array_nodes[at]
        at = self.places[id(buffer)] = len(self.arrays)
        if type(held) is Lost:
            raise held.error()
        self.arrays.append(held)
        self.origins.append(ref(buffer))
        key = (at, buffer.signature)
        # The same place and signature give the same node in every step, so graphs are found again.
        node = self.known.get(key) or self._new_array(key)
        self.array_nodes.append(node)
        return node

    def _new_array(self, key: tuple[int, Signature]) -> Node:
        at, signature = key
        type = Type(signature.shape, to_torch_dtype(signature.dtype))
        node = self.known[key] = leaf("array", at, type, sharding=signature.sharding)
        return node

    def number(self, value: Any) -> Node:
        """Return a new leaf for a Python number: two that are equal now may not be in the next step."""
        # A dtype has its own numbering, since numbers of one dtype travel as one array.
        kind = type(value)
        dtype = number_dtype(value)
        numbers, nodes = self.numbers[dtype], self.number_nodes[dtype]
        at = len(numbers)
        if at == len(nodes):
            nodes.append(leaf("number", at, NUMBER_TYPES[dtype], kind))
        numbers.append(value)
        return nodes[at]

    def offset(self, value: int) -> Node:
        """Return a new leaf for where a view starts."""
        at = len(self.offsets)
        if at == len(self.offset_nodes):
            self.offset_nodes.append(leaf("offset", at, OFFSET, int))
        self.offsets.append(value)
        return self.offset_nodes[at]

    def draw(self, source: Any) -> Node:
        """Return a new leaf for the words a random op draws."""
        source = source if isinstance(source, torch.Generator) and not generator.stands_in(source) else None
        at = len(self.draws)
        # Drawn now, in the order of the calls, whatever becomes of the graph.
        self.draws.append(generator.draw(source))
        self.generators.append(source)
        return leaf("draw", at, WORDS)

    def hold(self, buffer: Buffer, node: Node) -> None:
        """Make a node the contents of a buffer that exists."""
        buffer.recorder = self.owner
        if type(buffer.held) is Node:
            # The first node that a buffer of this trace held: what ``programs.restore`` goes back to.
            self.first.setdefault(id(buffer), (ref(buffer), buffer.held))
        else:
            self.pending.append(ref(buffer))
        buffer.held = node

    def live(self) -> list[Buffer]:
        """Return the buffers that are alive and whose contents are nodes."""
        buffers = [reference() for reference in self.pending]
        # A buffer may have been written with an array since.
        return [buffer for buffer in buffers if buffer is not None and type(buffer.held) is Node]

    def reset(self) -> None:
        """Forget everything recorded."""
        for held in (self.arrays, self.origins, self.array_nodes, self.offsets, self.draws, self.generators):
            held.clear()
        for numbers in self.numbers.values():
            numbers.clear()
        self.places.clear()
        self.pending.clear()
        self.first.clear()
        self.lines.clear()
        # Read again: ``config.graph_size`` may have been changed between two steps.
        self.size, self.limit = 0, config.graph_size
        self.epoch = next(_epochs)


# What differs from thread to thread.
_OF_A_THREAD = (
    "arrays", "origins", "places", "array_nodes", "numbers", "offsets", "draws", "generators", "pending", "first",
    "lines", "size", "epoch", "limit", "refusal",
)  # fmt: skip
_epochs = itertools.count()
trace = Trace()
