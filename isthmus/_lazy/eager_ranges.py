"""Eager ops with sizes that change: a plan that runs a program for a range of sizes (``_program/ranges.py``).

With ``isthmus.config.shapes = "auto"``, ``dispatch.Kernel.new_plan`` asks ``finisher`` how to finish a new plan. The
call is written as a graph of one op, as lazy mode would record it. The first size of an op is compiled exactly; when a
call comes that differs from an earlier one in one size only, a program for a range of that size serves both::

    for n in range(8, 64):
        ids = torch.cat([ids, token], 1)     # 8 exactly; then one program up to 16, one up to 32, one up to 64

Graphs of one op are so alike that more must be equal than in lazy mode: every size but one, and all sizes of
parameters, which are not to be padded at each call (``ranges.find_one_size``).

Writes, meshes and what ``isthmus.jit`` records are compiled exactly, and so is what padding refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch

from isthmus import config
from isthmus._device.checks import value_checks
from isthmus._device.core import donation, mode
from isthmus._device.core.buffer import maker
from isthmus._device.core.dispatch import Kernel
from isthmus._device.core.plan import Builder, Finish, PassingFailure, Plan, Values, build
from isthmus._device.core.slack import Slack
from isthmus._graph.arguments import NUMBERS
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Node, Type, leaf, node, temporary
from isthmus._graph.view_calls import chained
from isthmus._lazy.node_builder import Recipe
from isthmus._lazy.trace import NUMBER_TYPES, OFFSET, WORDS, number_dtype
from isthmus._program import ranges
from isthmus._program.ranged_program import Given
from isthmus._program.ranges import Match
from isthmus._runtime import counters, placement, private
from isthmus._runtime.dtypes import to_torch_dtype
from isthmus._runtime.padding.sizes import Refused

_WAITED_FOR = donation.MARKERS - {Slack} | {Node}
# Two threads with one new size compile one program.
_finding = threading.RLock()
# Starts of views that one plan keeps a program for.
_LIMIT = 64
# A call that comes in so many turns of a loop, which transfers tell apart, or so often, is one whose size stays. Its
# exact program runs with less work on the host; of one op only so many sizes get theirs in this way.
_TURNS, _CALLS, _SETTLED = 16, 512, 8


def finisher(kernel: Kernel, inputs: list[Any], values: Values) -> tuple[list[Any], Finish | None]:
    """Return the inputs of a call as examples without padding, and what finishes its plan; None: as ever."""
    if (
        kernel.schema.mutated
        or placement.home is not None
        or mode.current.capture is not None
        or private.is_traced(inputs)
        or not _WAITED_FOR.isdisjoint(map(type, inputs))
    ):
        return inputs, None
    examples = [jax.ShapeDtypeStruct(i.shape, i.array.dtype) if type(i) is Slack else i for i in inputs]

    def finish(builder: Builder) -> Plan:
        call = OneCall(builder, examples, values)
        found = call.find(inputs, call.offsets(values))
        return builder.plan(examples) if found is None else call.run

    return examples, finish


@dataclass(frozen=True)
class _Place:
    """What one input of a call is: an array, an offset, a number or a draw; ``index`` numbers those of its kind."""

    kind: str
    index: int
    type: Type
    number: Any = float  # the Python type of a number
    is_parameter: bool = False

    def leaf(self) -> Node:
        return leaf(self.kind, self.index, self.type, self.number)


class OneCall:
    """Calls of one key: the graph of the op, and the programs for ranges of sizes that compute it."""

    def __init__(self, builder: Builder, examples: Sequence[Any], values: Values) -> None:
        self.builder, self.kernel = builder, builder.kernel
        self._places = list(_places(self.kernel, examples, values))
        self._arrays = [n for n, place in enumerate(self._places) if place.kind == "array"]
        self._fixed = frozenset(place.index for place in self._places if place.is_parameter)
        self._matches: dict[tuple[int, ...], Match | None] = {}
        self._exact: Plan | None = None
        # Calls so far, the turns in which they came, and whether enough came for the exact program alone.
        self._calls, self._turns, self._turn, self._settled = 0, 0, -1, False
        present = [spec for spec in builder.fresh if spec is not None]
        self._makers = [maker(spec, False) for spec in present]
        self._assemble = builder.assembler()

    def offsets(self, values: Values) -> tuple[int, ...]:
        """Return where the views among the arguments start."""
        return tuple(value for kind, value in _plain_values(self.kernel, values) if kind == "offset")

    def find(self, inputs: Sequence[Any], offsets: tuple[int, ...]) -> Match | None:
        """Return the program for views that start there, None where it is compiled exactly."""
        with _finding:
            if offsets not in self._matches:
                if len(self._matches) >= _LIMIT:
                    self._matches.clear()
                self._matches[offsets] = self._find(inputs, offsets)
            return self._matches[offsets]

    def _find(self, inputs: Sequence[Any], offsets: tuple[int, ...]) -> Match | None:
        given = lambda leaves: self._given(inputs, leaves)  # noqa: E731
        try:
            graph = ranges.lifted_strides(
                self._graph, lambda leaf: offsets[leaf.index] if leaf.kind == "offset" else None
            )
            return ranges.find_one_size(graph, given, ranges.OPTIONS, self._fixed)
        except Refused as error:
            ranges.note(error)
            return None
        except Exception as error:  # the exact program says what is wrong with the call, if anything is
            ranges.note(Refused("compile", f"{type(error).__name__}: {str(error).splitlines()[:1]}"))
            return None

    def _graph(self) -> Graph:
        with temporary():
            leaves = [place.leaf() for place in self._places]
            recipe = Recipe(self.builder, [place.type for place in self._places])
            found = node(recipe.call, *[read(leaves) for read in recipe.reads])
            results = found.results or (found,)
            pairs = zip(results, self.builder.fresh, strict=False)
            present = [result for result, spec in pairs if spec is not None]
            stored = zip(recipe.fresh, present, strict=True)
            return Graph.of(
                tuple(chained(calls, result) for (_, calls), result in stored if result is not None)
            )

    def _given(self, inputs: Sequence[Any], leaves: list[int]) -> Given:
        return Given([inputs[self._arrays[at]] for at in leaves])

    def run(self, inputs: list[Any], values: Values) -> Any:
        """Run a call; this is the plan of its key."""
        if self._settled and self._exact is not None:
            # It fails on padding, and the entry takes that away and tries again.
            return self._exact(inputs, values)
        if not _WAITED_FOR.isdisjoint(map(type, inputs)):
            raise RuntimeError("an input is not there yet")  # the entry waits and tries again
        offsets = self.offsets(values)
        match = self.find(inputs, offsets) if config.current.shapes != "exact" else None
        if match is None or self._settles(match):
            return self._exactly(inputs, values)
        program, compiled = match.program, match.program.compiled
        numbers: dict[torch.dtype, list[Any]] = {dtype: [] for dtype in compiled.numbers}
        for kind, value in _plain_values(self.kernel, values):
            if kind == "number" and (dtype := number_dtype(value)) in numbers:
                numbers[dtype].append(value)
        draws = inputs[-1:] if compiled.draws else []
        rest = compiled.arguments([], compiled.pack_numbers(numbers, ()), draws)
        try:
            # Nothing is bound before the value checks have passed: the results are new.
            results, outputs = program.run(match.sizes, self._given(inputs, program.slots), rest, _both)
        except Refused:
            return self._exactly(inputs, values)
        program.report(outputs, auto=value_checks.auto(), sizes=match.sizes)
        tensors = iter([make(value) for make, value in zip(self._makers, results, strict=True)])
        return self._assemble([None if spec is None else next(tensors) for spec in self.builder.fresh])

    def _settles(self, match: Match) -> bool:
        """Count a call; return whether calls of this size have come so often that they get a program of their own."""
        self._calls += 1
        turn = counters.transfers()
        if turn != self._turn:
            self._turn, self._turns = turn, self._turns + 1
        if self._turns < _TURNS and self._calls < _CALLS:
            return False
        settled = match.program.settled
        if match.sizes not in settled and len(settled) >= _SETTLED:
            return False
        # Which program computes a result must not depend on how often it was computed before.
        if torch.are_deterministic_algorithms_enabled():
            return False
        settled.add(match.sizes)
        self._settled = True
        return True

    def _exactly(self, inputs: list[Any], values: Values) -> Any:
        if donation.is_unready(inputs):
            raise RuntimeError("an input is padded")  # the entry takes the padding away and tries again
        if self._exact is None:
            try:
                self._exact = build(self.kernel, inputs, values, False)
            except PassingFailure as failure:
                return failure.plan(inputs, values)
        return self._exact(inputs, values)


def _both(results: list[Any], outputs: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    return results, outputs


def _places(kernel: Kernel, examples: Sequence[Any], values: Values) -> Iterator[_Place]:
    """Yield what each input is, in the order in which ``entry.py`` appends them."""
    counts: dict[Any, int] = {}

    def place(kind: str, type: Type, number: Any = float, is_parameter: bool = False) -> _Place:
        key = (kind, type.dtype) if kind == "number" else kind
        counts[key] = counts.get(key, -1) + 1
        return _Place(kind, counts[key], type, number, is_parameter)

    examples_left = iter(examples)
    for kind, value in _plain_values(kernel, values):
        example = next(examples_left)
        if kind == "array":
            yield place(kind, Type(tuple(example.shape), to_torch_dtype(example.dtype)), is_parameter=value)
        elif kind == "offset":
            yield place(kind, OFFSET, int)
        else:
            yield place(kind, NUMBER_TYPES[number_dtype(value)], type(value))
    if kernel.random:
        yield place("draw", WORDS)


def _plain_values(kernel: Kernel, values: Values) -> Iterator[tuple[str, Any]]:
    """Yield each input but a draw: numbers and offsets as they are, and of arrays whether they are parameters."""
    for argument, value in zip(kernel.schema.arguments, values, strict=True):
        if argument.name != "generator":
            yield from _of_argument(value, kernel.dynamic[argument.name])


def _of_argument(value: Any, dynamic: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield "array", isinstance(value, torch.nn.Parameter)
        if value.device.type == "jax" and (offset := value.storage_offset()):
            yield "offset", int(offset)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _of_argument(item, dynamic)
    elif dynamic and type(value) in NUMBERS:
        yield "number", value
