"""The program of a recording: what it computes, where its inputs come from, where its results go, what stays with it.

``Capture`` (``capture.py``) has sorted the trace of a function into sources of leaves and targets of outputs;
``execution_of`` finds or compiles the program for that and returns the ``Execution`` that replays run (``replay.py``).

A leaf that comes from a buffer which lives on, and whose buffer an output is written to, is *state*: a parameter or an
optimizer's moment. It stays with the program from run to run, so its buffer is neither an input nor a result::

    sources = [("buffer", weight), ("argument", 0)]     targets = [("buffer", weight), ("new", loss)]
    state   = StateLayout(pairs=((0, 0),))              # leaf 0 is replaced by output 0
    inputs  = [("argument", 0)]                         writes = [("new", loss)]

With ``config.shapes = "auto"`` a program for a range of sizes may serve the graph (``ranges.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isthmus import config
from isthmus._device.core.buffer import Signature, buffer_of
from isthmus._device.torch_glue.private import largest_sizes
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Leaf, Node
from isthmus._graph.size_templates import Ints
from isthmus._lazy import programs, ranges
from isthmus._lazy.replay import Execution
from isthmus._lazy.trace import trace
from isthmus._program import runner
from isthmus._program.program import STATELESS, StateLayout
from isthmus._program.ranges import Limits, Match
from isthmus._runtime import placement

Sources = list[tuple[str, Any]]
"""Where each leaf's array comes from: ("argument", place), ("buffer", it), ("moved", ...) or ("constant", array)."""


@dataclass(frozen=True)
class Outputs:
    """Where each output of the program goes, which are new buffers (by ``id``), and the tensors it writes to."""

    targets: list[tuple[str, Any]]
    new: dict[int, int]
    written: list[Tensor]


def execution_of(
    wanted: tuple[Node, ...],
    sources: Sources,
    outputs: Outputs,
    shardings: programs.Shardings,
    flat: Sequence[Any],
    *,
    donate: bool,
    replayable: bool,
) -> Execution | None:
    """Return the program that computes what was recorded; None where nothing is computed.

    Arguments:
        wanted: the nodes to compute, one for each of ``outputs.targets``.
        sources: where each leaf of the trace comes from.
        outputs: where each result goes.
        shardings: with a mesh, how each result is split.
        flat: the arguments of the call, whose marks may name largest sizes.
        donate: whether arrays may be overwritten.
        replayable: whether the program will run again; one that will not keeps no state.
    """
    if not wanted:
        return None
    # With a mesh every graph is exact: padding does not know how arrays are split.
    ranged = _ranged(wanted, sources, outputs, flat, donate, replayable) if shardings is None else None
    if ranged is not None:
        match, order = ranged
        program: Any = match.program
        sizes: Ints = match.sizes
        lines: Mapping[Node, str] = ranges.lines_of(match, trace.lines)
    else:
        family = programs.family_of(wanted, shardings)
        order = family.order(wanted, shardings)
        state, results = _state(
            family.graph.inputs, wanted, order, sources, outputs, stays=donate and replayable
        )
        # State is always donated, and is not a matter of reference counts.
        dying = programs.dying(family) - {leaf for leaf, _ in state.pairs} if donate else frozenset()
        program = family.find(dying, state, results)
        sizes, lines = (), dict(trace.lines)
    # What stays with the program is no output of it: its new value is the next run's input.
    resident = {id(sources[leaf][1]) for leaf in program.packing.inputs}
    places = program.places
    inputs = [sources[at] for at in program.slots]
    return Execution(
        residences=runner.Residences(program),
        sources=sources,
        inputs=inputs,
        constants=program.pack_numbers(trace.numbers, trace.offsets),
        lines=lines,
        writes=[
            (places[order[n]], n, kind, _computed(program, order[n], target) if kind == "new" else target)
            for n, (kind, target) in enumerate(outputs.targets)
            if kind != "buffer" or id(target) not in resident
        ],
        sizes=sizes,
        written=_written(inputs, outputs) if donate else frozenset(),
    )


def _ranged(
    wanted: tuple[Node, ...],
    sources: Sources,
    outputs: Outputs,
    flat: Sequence[Any],
    donate: bool,
    replayable: bool,
) -> tuple[Match, list[int]] | None:
    """Return the program for a range of sizes that computes these nodes, and which of its outputs each is."""
    # A node wanted twice is computed once; ``order`` says which result each one is.
    places = {node: place for place, node in enumerate(dict.fromkeys(wanted))}
    order = [places[node] for node in wanted]
    state, results = _state(
        Graph.of(tuple(places)).inputs, wanted, order, sources, outputs, stays=donate and replayable
    )
    match = programs.ranged(wanted, state, results, donate, _limits(sources, flat))
    return None if match is None else (match, order)


def _limits(sources: Sources, flat: Sequence[Any]) -> Limits:
    """Return the largest sizes that marks on arguments name, by leaf and dim."""
    limits: dict[tuple[int, int], int] = {}
    for leaf, (kind, source) in enumerate(sources):
        tensor = flat[source] if kind == "argument" else None
        # Only where the argument is all of its storage: a mark on a view says nothing about the rest.
        if tensor is not None and buffer_of(tensor).signature.shape == tuple(tensor.shape):
            limits |= {(leaf, dim): most for dim, most in largest_sizes(tensor).items()}
    return limits


def _state(
    inputs: Sequence[Node],
    wanted: tuple[Node, ...],
    order: Sequence[int],
    sources: Sources,
    outputs: Outputs,
    stays: bool,
) -> tuple[StateLayout, tuple[int, ...] | None]:
    """Return the state of the program, read from buffers that live on and written to them; and its other results."""
    # State may be overwritten, so nothing stays where donation is off, or a backend that has none runs it.
    if not (stays and config.donate == "auto" and config.backend == "xla"):
        return STATELESS, None
    written = {id(target): n for n, (kind, target) in enumerate(outputs.targets) if kind == "buffer"}
    pairs, as_state = [], set()
    for leaf in [n.call for n in inputs if isinstance(n.call, Leaf) and n.call.kind == "array"]:
        kind, buffer = sources[leaf.index]
        n = written.get(id(buffer)) if kind == "buffer" else None
        # The same type, or the next run would not accept what this one returns.
        if n is not None and wanted[n].type == leaf.type:
            pairs.append((leaf.index, order[n]))
            as_state.add(n)
    plain = dict.fromkeys(place for n, place in enumerate(order) if n not in as_state)
    return StateLayout(tuple(pairs)), tuple(plain)


def _computed(program: Any, place: int, signature: Signature) -> Signature:
    """Return the signature of a new buffer; where XLA was to choose how it is split, it has."""
    if signature.sharding is not placement.OPEN:
        return signature
    sharding = program.result_shardings[program.results.index(place)]
    return Signature.intern(signature.shape, signature.dtype, sharding=sharding)


def _written(inputs: Sequence[tuple[str, Any]], outputs: Outputs) -> frozenset[int]:
    """Return the slots of buffers that the program writes to."""
    targets = [target for kind, target in outputs.targets if kind in ("argument", "buffer")]
    return frozenset(
        n
        for n, (kind, source) in enumerate(inputs)
        if kind in ("argument", "buffer") and any(source is target or source == target for target in targets)
    )
