"""``CompiledProgram``: a graph, compiled by XLA, with explicit slots for what goes in and comes out.

Lazy mode and ``isthmus.jit`` (``_lazy/programs.py``) and ``torch.compile`` (``_dynamo/specialization.py``) make one
from a ``Graph``; they differ in how they get the graph and in how they hand results back. A program is called with

    state, array slots, number packs, moving offsets, draws, check code

and returns

    new state, result slots, check code (only where the graph has value checks)

- **State** stays with the program between runs and is always donated: an input leaf of the graph is replaced by an
  output (``StateLayout.pairs``). Many small arrays travel as one bundle (``resident_state.Packing``).
- **Array slots** are the other array leaves, in the caller's order; a slot may be a tuple of leaves (a tensor that
  holds everything forward saved for backward). Slots in ``donate`` are donated.
- **Numbers** of one dtype are one array: a learning rate that changes does not recompile. **Offsets** say where views
  start; those that have never changed are compiled in (``constants``), the others are one array. **Draws** are the
  (seed, offset) words of random calls.
- The **check code** is 0 while every value check has held, else the number of the first that failed, in this run or in
  an earlier run whose code has not been read (``value_checks.Conditions``).

Tracing is pure: ``_trace`` returns the outputs together with the errors and nodes of the value checks, and the program
is complete when ``__init__`` returns.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import numpy as np
import torch

from isthmus._device.checks.value_checks import Conditions
from isthmus._device.core.resident_state import Kind, Packing
from isthmus._graph.arguments import AnyFunction, Value
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Leaf, Node, Type
from isthmus._ops.common import DType, HostArray, Number
from isthmus._ops.value_checks import Error
from isthmus._program import evaluate
from isthmus._program.evaluate import CallFailure
from isthmus._runtime import compiler, placement
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus._runtime.host_arrays import from_numpy
from isthmus._runtime.placement import Sharding
from isthmus._runtime.traced_results import separated

Array = jax.Array
Places = int | tuple[int, ...]
Words = HostArray
"""A random draw: its seed and offset as four 32-bit words."""
Example = jax.ShapeDtypeStruct | tuple["Example", ...]
_NONE: Mapping[int, Sharding] = {}


@dataclass(frozen=True)
class StateLayout:
    """Which array leaves are state, each with the output that takes its place, and whether small ones are bundled."""

    pairs: tuple[tuple[int, int], ...] = ()
    bundled: bool = True


STATELESS = StateLayout()
NO_LINES: Mapping[Node, str] = {}


class Spread(Protocol):
    """What compiles and runs a graph over several processes."""

    @property
    def build(self) -> AnyFunction:
        """Compile, as ``compiler.build`` does for one process."""


def _alone(graph: Graph) -> Spread | None:
    """Return None: without groups of ``torch.distributed`` every graph is a program of this process."""


across = _alone
"""Returns what compiles and runs a graph over several processes, None for a graph without collectives.

``_distributed/compiled_collectives.py``, which is above this folder, puts its own function here.
"""


class CheckedConditions(Conditions):
    """Value checks whose errors name the line that recorded the op, where it is known."""

    def __init__(self, errors: Sequence[Error], nodes: Sequence[Node]) -> None:
        super().__init__()
        self.errors, self.nodes = errors, nodes
        self.lines = NO_LINES
        # Held while the lines and the words of one run are in place: threads share programs.
        self.reporting = threading.Lock()

    def error(self, at: int) -> Exception:
        """Return the exception for one of the checks."""
        error, message = self.errors[at]
        line = self.lines.get(self.nodes[at])
        # Only modes that record lines have some.
        return error(f"{message} (recorded at {line})" if line else message)


class CompiledProgram:
    """A graph compiled by XLA: see the module for what it takes and returns.

    Arguments:
        graph: what to compute; its array leaves are numbered as the caller's slots say.
        arrays: the type of every array leaf that the program takes, by its index, whether the graph reads it or not.
        slots: array leaves that are no state, in the order of the call; a tuple of leaves is one argument.
        results: outputs to return after the state, in order; a tuple of outputs is one result.
        state: which leaves stay with the program.
        donate: positions in ``slots`` whose memory the results may take.
        shardings: with a mesh, how array leaves are split, by index; those left out are at home.
        constraints: with a mesh, how outputs must be split, by number; XLA chooses for those left out.
        lines: with a mesh, the lines of user code that nodes come from; collectives are listed by them.
        constants: values of the offsets that are compiled in, by index; ``moving`` are the other offsets.
        differentiable: whether JAX may differentiate through the program.
        build: what compiles the traced function, ``compiler.build`` if None; for symbolic sizes it is traced and
            compiled later.
    """

    def __init__(
        self,
        graph: Graph,
        arrays: Mapping[int, Type],
        slots: Sequence[Places],
        results: Sequence[Places],
        *,
        state: StateLayout = STATELESS,
        donate: Sequence[int] = (),
        shardings: Mapping[int, Sharding] = _NONE,
        constraints: Mapping[int, Sharding] = _NONE,
        lines: Mapping[Node, str] | None = None,
        constants: Mapping[int, int] | None = None,
        moving: Sequence[int] = (),
        differentiable: bool = False,
        build: AnyFunction | None = None,
        options: Mapping[str, str | bool | int] | None = None,
        title: str = "a program",
    ) -> None:
        # All arguments but the state, for ``unbundled``: the graph is needed to trace the program once more.
        self._rebuild = lambda state: CompiledProgram(
            graph,
            arrays,
            slots,
            results,
            state=state,
            donate=donate,
            shardings=shardings,
            constraints=constraints,
            lines=lines,
            constants=constants,
            moving=moving,
            differentiable=differentiable,
            build=build,
            options=options,
            title=title,
        )
        leaves = [n.call for n in graph.inputs if isinstance(n.call, Leaf)]
        kinds = {at: (type.size, to_jax_dtype(type.dtype), shardings.get(at)) for at, type in arrays.items()}
        self._constraints, self._lines = constraints, lines
        self.graph, self.slots, self.results, self.state = graph, tuple(slots), tuple(results), state
        self.packing = Packing(state.pairs, kinds, state.bundled)
        self.constant_offsets, self.moving = dict(constants or {}), list(moving)
        self.numbers = _pack_sizes(leaves)
        # Draws are numbered from 0; a graph that reads only the third still gets three.
        self.draws = 1 + max((leaf.index for leaf in leaves if leaf.kind == "draw"), default=-1)
        self.donated, self._differentiable = tuple(donate), differentiable
        self._packed: dict[torch.dtype, tuple[bytes, Array]] = {}
        # State comes first among the arguments, so positions of slots move up by as many.
        count = len(self.packing)
        donated = (*range(count), *[count + at for at in self.donated])
        # ``separated`` hands back what tracing finds out beside the arrays.
        arrays_of, extras = separated(self._trace)
        try:
            spread = across(graph)
            # A graph with collectives is compiled for all ranks, also where the caller has a ``build`` of its own.
            make = spread.build if spread is not None else build or compiler.build
            self.executable = make(arrays_of, self._examples(kinds), donated, options, title)
        except CallFailure as failure:
            # Named by the node that was recorded, not by what passes made of it.
            raise CallFailure(graph.origins.get(failure.node, failure.node), failure.cause) from failure.cause
        self.call = self.executable.call
        # ``extras`` has one entry per trace, and a program is traced once unless JAX had to begin again.
        self.checks = CheckedConditions(*extras[-1])
        # Made once: a program that checks nothing takes this 0 at every call (``runner.compute``).
        self.nothing_failed = self.checks.before()

    def _examples(self, kinds: Mapping[int, Kind]) -> list[Example]:
        """Return the shape and dtype of each argument."""

        def example(places: Places) -> Example:
            if isinstance(places, tuple):
                return tuple(example(place) for place in places)
            return placement.example(*kinds[places])

        rest: list[tuple[tuple[int, ...], DType]] = [
            ((n,), to_jax_dtype(dtype)) for dtype, n in self.numbers.items()
        ]
        # An argument that would be empty is left out: each costs microseconds per call.
        rest += [((len(self.moving),), np.dtype(np.int64))] if self.moving else []
        rest += [((self.draws, 4), np.dtype(np.uint32))] if self.draws else []
        rest += [((), np.dtype(np.int32))]
        state = [placement.example(*kind) for kind in self.packing.examples()]
        return [*state, *map(example, self.slots), *[jax.ShapeDtypeStruct(*kind) for kind in rest]]

    def _trace(self, *inputs: Value) -> tuple[tuple[Value, ...], tuple[list[Error], list[Node]]]:
        """Compute new state, results and the check code; the errors of the checks and their nodes are extra."""
        # In the order of ``_examples``: state, slots, numbers, offsets, draws, check code.
        left = iter(inputs)
        arrays: dict[int, Array] = self.packing.unpack(left)
        for places in self.slots:
            value = next(left)
            arrays |= dict(zip(places, value, strict=True)) if isinstance(places, tuple) else {places: value}
        numbers = {dtype: next(left) for dtype in self.numbers}
        offsets = dict(zip(self.moving, next(left), strict=True)) if self.moving else {}
        draws = next(left) if self.draws else ()
        before = next(left)

        def value_of(leaf: Leaf) -> Array | Number | int:
            if leaf.kind == "array":
                return arrays[leaf.index]
            if leaf.kind == "number":
                return Number(numbers[leaf.type.dtype][leaf.index], leaf.number)
            if leaf.kind == "draw":
                return draws[leaf.index]
            # An offset that moved once is an input; until then it is a constant, which XLA folds.
            return offsets[leaf.index] if leaf.index in offsets else self.constant_offsets[leaf.index]

        values = [value_of(n.call) for n in self.graph.inputs if isinstance(n.call, Leaf)]
        run = evaluate.run(self.graph, values, self._differentiable, self._lines)
        outputs = list(run.outputs)
        # With a mesh, and where the caller must know how a result is split.
        for at, sharding in self._constraints.items():
            outputs[at] = placement.constrain(outputs[at], sharding)

        def result(places: Places) -> Array | tuple[Array, ...]:
            return tuple(outputs[at] for at in places) if isinstance(places, tuple) else outputs[places]

        # A graph without checks returns no code: one result less per call.
        code = [run.checks.first_failed(before)] if run.checks.errors else []
        origins = [self.graph.origins.get(node, node) for node in run.nodes]
        # State first: XLA gives donated memory to the first result that fits it.
        return (*self.packing.pack(outputs), *map(result, self.results), *code), (run.checks.errors, origins)

    @property
    def parts(self) -> list[CompiledProgram]:
        """What XLA compiled apart: the program itself, or each distinct stage of a ``StagedProgram``."""
        return [self]

    @property
    def result_shardings(self) -> list[Sharding | tuple[Sharding, ...]] | None:
        """Return how each result is split, a tuple for one that is a tuple; None on one device."""
        if self.executable.shardings is None:
            return None
        # State comes first among the results, and is not among these.
        flat = iter(self.executable.shardings[len(self.packing) :])
        return [
            tuple([next(flat) for _ in places]) if isinstance(places, tuple) else next(flat)
            for places in self.results
        ]

    def unbundled(self) -> CompiledProgram:
        """Return the same program with every array of its state on its own."""
        return self._rebuild(replace(self.state, bundled=False))

    @property
    def places(self) -> dict[Places, int]:
        """Return where each result is among those that ``runner.run`` hands to its caller."""
        return {places: n for n, places in enumerate(self.results)}

    def pack_numbers(
        self, numbers: Mapping[torch.dtype, list[complex]], offsets: Sequence[int]
    ) -> list[Array]:
        """Return the arguments made of numbers, by their dtype, and of the offsets that move."""
        packs = [self._pack(dtype, numbers[dtype][:count]) for dtype, count in self.numbers.items()]
        if self.moving:
            packs.append(from_numpy(np.array([offsets[at] for at in self.moving], np.int64)))
        return packs

    def _pack(self, dtype: torch.dtype, numbers: list[complex]) -> Array:
        """Return numbers as one array; the array of the last run, if they are the same."""
        # Compared as bytes: 0.0 == -0.0, and nan != nan would upload at every step.
        packed = np.array(numbers, to_jax_dtype(dtype))
        data = packed.tobytes()
        # Learning rates seldom change from one step to the next, so the array of the last run is used again.
        last = self._packed.get(dtype)
        if last is None or last[0] != data:
            last = self._packed[dtype] = (data, from_numpy(packed))
        return last[1]

    def arguments(
        self, arrays: list[Array], constants: Sequence[Array], draws: Sequence[Words]
    ) -> list[Value]:
        """Return the arguments of ``call`` after the state."""
        # One array for all draws of a call.
        words = [np.stack(draws[: self.draws])] if self.draws else []
        return [*arrays, *constants, *words, self.checks.before()]

    def report(
        self,
        outputs: Sequence[Value],
        lines: Mapping[Node, str] = NO_LINES,
        auto: str = "later",
        errors: Sequence[Error] | None = None,
    ) -> None:
        """Raise for a value check that failed in a run with these outputs, now or at the next read of a value.

        ``lines`` has the line that recorded a node; ``auto`` is when to raise where the settings do not say; ``errors``
        are those of the checks in the words of this run, where they name sizes.
        """
        checks = self.checks
        if checks.errors:
            with checks.reporting:
                checks.lines, checks.errors = lines, checks.errors if errors is None else errors
                checks.settle(outputs[-1], auto)


def _pack_sizes(leaves: Sequence[Leaf]) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = {}
    for leaf in leaves:
        if leaf.kind == "number":
            dtype = leaf.type.dtype
            sizes[dtype] = max(sizes.get(dtype, 0), leaf.index + 1)
    return sizes
