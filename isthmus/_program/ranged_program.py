"""A program for a range of sizes: one trace of a graph, and an executable for each set of padded sizes.

``RangedProgram`` lifts a graph to the symbols of a template (``_graph/size_templates.py``), traces it once and compiles
what is traced for ranges of its sizes as calls need them (``_runtime/padding``). Arrays are padded on the way in, and
outputs whose sizes vary are ``Slack``: a padded array that knows its true size. For a range ``size0 <= 64``::

    program.run((50,), Given([x, w]), rest, commit)   # x[50, 8] is padded to [64, 8], the result is Slack(50, ...)

Which range serves a call is a trade (``_ranges``): ranges up to a power of two compile least, narrow ones pad least,
and a size that comes very often gets its exact program, compiled in the background. ``_program/ranges.py`` finds the
program for a graph; ``_lazy/value_guards.py`` and ``_program/padded_sources.py`` run it too.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import jax
import torch

from isthmus import config
from isthmus._caches import LruCache
from isthmus._device.core import donation
from isthmus._device.core.host_tensors import copied
from isthmus._device.core.resident_state import Residence
from isthmus._device.core.slack import Slack, padded
from isthmus._graph.arguments import AnyFunction, Value
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Leaf, Node
from isthmus._graph.size_templates import Ints, Template
from isthmus._program.program import NO_LINES, STATELESS, CompiledProgram, StateLayout
from isthmus._runtime import background
from isthmus._runtime.padding.program import PaddedExecutable, PaddedProgram, symbolic_axes
from isthmus._runtime.padding.sizes import Refused, Sizes, SizesKey, symbols

Array = jax.Array
T = TypeVar("T")
Held = Array | Slack
"""The array of a buffer: exact, or padded with its true size."""
XlaOptions = Mapping[str, str | bool | int]
"""Options for XLA's compiler, by name."""
# Runs in a narrow range of sizes that pay for a program of its own.
_OFTEN = 32
# Runs of sizes that a larger program serves at first, where there is one of at most twice their range.
_RARE = 8
# Arrays of at most so many elements cost a launch and no more, whatever they are padded to. Attention has squares of
# sizes that are no result, so there is a longest size as well.
_FREE, _LONGEST_FREE = 4096, 128
# Runs of one size, where padding is not free, after which it gets its exact program.
_HOT = 64
# Sizes whose runs a program counts, and exact programs that it keeps: each takes memory as the program itself does.
_COUNTED, _EXACT = 1024, 16


@dataclass(frozen=True)
class Given:
    """The arrays of a call, by slot: exact ones or ``Slack``; and the slots whose arrays nothing else holds."""

    arrays: list[Held]
    dying: frozenset[int] = frozenset()


class RangedProgram:
    """A graph lifted to symbolic sizes: one trace, one executable per set of padded sizes.

    State, if there is some, is shared by all executables: a step for another range takes it over as it is.
    """

    def __init__(
        self,
        graph: Graph,
        template: Template,
        options: XlaOptions,
        state: StateLayout = STATELESS,
        results: tuple[int, ...] | None = None,
        most: Sequence[int | None] = (),
    ) -> None:
        self._options = options
        self._remake = lambda state: RangedProgram(graph, template, options, state, results, most)
        names = [f"size{n}" for n in range(len(template.places))]
        self.least = dict(zip(names, template.least, strict=True))
        self._most = {name: n for name, n in zip(names, most, strict=False) if n is not None}
        self.names, self._dims = names, symbols(self.least)
        lifted = template.lift(graph, [self._dims[name] for name in names])
        self.nodes = lifted.nodes
        leaves = [n.call for n in lifted.inputs if isinstance(n.call, Leaf) and n.call.kind == "array"]
        types = {leaf.index: leaf.type for leaf in leaves}
        # State whose size varies travels as other arrays do: padded, in its buffer.
        pairs = tuple(pair for pair in state.pairs if not symbolic_axes(types[pair[0]].size))
        freed = [output for at, output in state.pairs if (at, output) not in pairs]
        kept = {at for at, _ in pairs}
        results = tuple(range(len(lifted.outputs))) if results is None else results
        self.results = tuple(dict.fromkeys([*results, *freed]))
        self.slots = [leaf.index for leaf in leaves if leaf.index not in kept]
        try:
            self.compiled = CompiledProgram(
                lifted,
                types,
                self.slots,
                self.results,
                state=replace(state, pairs=pairs),
                build=self._trace,
            )
        except Refused:
            raise
        except Exception as error:  # the exact program says what is wrong with the graph, if anything is
            raise Refused("trace", f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        self.messages = list(self.compiled.checks.errors)
        self.packing, self.places = self.compiled.packing, self.compiled.places
        self._donated: dict[SizesKey, tuple[int, ...]] = {}
        self._runs: Counter[SizesKey] = Counter()
        self._wide: dict[SizesKey, Sizes] = {}
        self._free: list[Sizes] = []
        self.template, self._graph = template, graph
        self._times: LruCache[Ints, int] = LruCache("runs of a size", _COUNTED)
        self._exact: LruCache[Ints, background.Task[CompiledProgram]] = LruCache(
            "exact programs of sizes", _EXACT
        )
        computed = [
            t.size for n in self.nodes if isinstance(n.call, Call) for t in n.call.types if t is not None
        ]
        shapes = {*computed, *self.padded.inputs, *self.padded.outputs}
        self._varying = [shape for shape in shapes if symbolic_axes(shape)]
        # Sizes that a single op has an exact program for by now (``_lazy/eager_ranges.py``).
        self.settled: set[Ints] = set()

    def _trace(
        self, function: AnyFunction, examples: Sequence[jax.ShapeDtypeStruct], *_: object
    ) -> PaddedProgram:
        self.padded = PaddedProgram(function, examples, self._dims, self.least, self._most)
        return self.padded

    def _values(self, sizes: Ints) -> dict[str, int]:
        return dict(zip(self.names, sizes, strict=True))

    def prepare(self, sizes: Ints, given: Given) -> tuple[PaddedExecutable, tuple[int, ...], bool]:
        """Return the executable for these sizes, the slots it is given to overwrite, and whether it was there.

        An executable that overwrites fewer arrays than could be serves as well; one that overwrites more is compiled
        where more arrays die than ever before.
        """
        try:
            return self._prepare(self._ranges(sizes), given)
        except Refused:
            if not self._runs.pop(self.padded.sizes_for(self._values(sizes), config.buckets).key, 0):
                raise
            # A narrow range is refused where the wide one was not.
            return self._prepare(self._ranges(sizes), given)

    def _prepare(self, ranges: Sizes, given: Given) -> tuple[PaddedExecutable, tuple[int, ...], bool]:
        shapes = [ranges.padded_shape(shape) for shape in self.padded.inputs]
        outputs = [ranges.padded_shape(shape) for shape in self.padded.outputs]
        donate = self._donatable(given, shapes, outputs, ranges in self._free)
        there = self._donated.get(ranges.key)
        known = there is not None and not set(donate) > set(there)
        if there is None or not known:
            there = self._donated[ranges.key] = donate
        start = len(self.packing)
        places = (*range(start), *[start + n for n in there])
        executable = self.padded.executable(ranges, None, places, options=self._options, title="a step")
        return executable, there, known

    def _ranges(self, sizes: Ints) -> Sizes:
        """Return the ranges for these sizes: up to a power of two first, and narrow ones where they come often.

        The first keeps compilations few, the second keeps padding below 1 / ``config.buckets``. Sizes that are rare
        share the program of the next power of two, if there is one. Where padding is free there is one program for all
        sizes that it is free for.
        """
        values = self._values(sizes)
        wide = self.padded.sizes_for(values, 1)
        if torch.are_deterministic_algorithms_enabled():
            # Sums over more padding may round otherwise, so how much there is must follow from the size alone.
            return wide
        for known in self._free:
            if all(values[name] <= bound for name, bound in known.bounds.items()):
                return known
        if self._is_free(wide):
            free = self._as_long_as_free(wide)
            self._free.append(free)
            return free
        narrow = self.padded.sizes_for(values, config.buckets)
        if self._runs[narrow.key] >= _OFTEN:
            return narrow
        if wide.key in self._wide or self._runs[narrow.key] >= _RARE:
            return self._wide.setdefault(wide.key, wide)
        # A list first: another thread may add ranges meanwhile.
        larger = [known for known in list(self._wide.values()) if _is_a_little_larger(known, wide)]
        return larger[0] if larger else self._wide.setdefault(wide.key, wide)

    def _is_free(self, ranges: Sizes) -> bool:
        """Return whether all arrays whose sizes vary are small."""
        sizes = [math.prod(ranges.padded_shape(shape)) for shape in self._varying]
        return max(sizes, default=0) <= _FREE and max(ranges.bounds.values()) <= _LONGEST_FREE

    def _as_long_as_free(self, ranges: Sizes) -> Sizes:
        """Return ranges that are doubled in turn as long as their arrays stay small."""
        growing = list(self.names)
        while growing:
            name = min(growing, key=lambda name: ranges.bounds[name])
            longer = self.padded.doubled(ranges, name)
            if self._is_free(longer):
                ranges = longer
            else:
                growing.remove(name)
        return ranges

    def _donatable(
        self,
        given: Given,
        inputs: Sequence[tuple[int, ...]],
        outputs: Sequence[tuple[int, ...]],
        is_free: bool,
    ) -> tuple[int, ...]:
        """Return the slots whose memory an output can take: arrays that die, and those that are padded anew.

        Where padding is free, arrays whose sizes vary are not worth it: whether they die would make two programs.
        """
        if config.donate != "auto":
            return ()
        start = len(self.packing)
        room = Counter(zip(outputs[start:], self.padded.dtypes[start:], strict=True))
        donate = []
        for n, held in enumerate(given.arrays):
            kind = (inputs[start + n], self.padded.input_dtypes[start + n])
            if is_free and self._varies(n):
                continue
            if room[kind] and (n in given.dying or self._is_fresh(n, held, inputs[start + n])):
                room[kind] -= 1
                donate.append(n)
        return tuple(donate)

    def _is_fresh(self, n: int, held: Held, shape: tuple[int, ...]) -> bool:
        """Return whether the array of a slot has to be padded, so that the padded copy is ours."""
        if not self._varies(n):
            return False
        if type(held) is Slack and held.array.shape == shape:
            return False
        return tuple(held.shape) != shape  # without padding it is the array that the slack keeps

    def _varies(self, n: int) -> bool:
        """Return whether the array of a slot has an axis whose size varies."""
        return bool(symbolic_axes(self.padded.inputs[len(self.packing) + n]))

    def run(
        self,
        sizes: Ints,
        given: Given,
        rest: Sequence[Value],
        commit: Callable[[list[Held], Sequence[Array]], T],
        residence: Residence | None = None,
    ) -> T:
        """Run the program; ``commit`` takes the results, some of them ``Slack``, and what the program returned.

        ``rest`` are the arguments after the arrays: numbers, draws and the check code. ``given`` is emptied.
        ``residence`` is where the program's state is, if it has some.
        """
        # An exact program keeps no state.
        exact = self._exact_for(sizes, given) if residence is None else None
        if exact is not None:
            return self._run_exact(exact, given, rest, commit)
        executable, donate, _ = self.prepare(sizes, given)
        values = self._values(sizes)
        self._runs[self.padded.sizes_for(values, config.buckets).key] += 1
        start = len(self.packing)
        # State comes before the results, the check code after them.
        shapes = self.padded.output_shapes(values)[start : start + len(self.results)]
        inputs: list[Array] = []
        held = array = None
        for n, (held, shape) in enumerate(zip(given.arrays, executable.inputs[start:], strict=False)):
            array = self._array(n, held, shape)
            is_ours = n in given.dying or self._is_fresh(n, held, shape)
            inputs.append(array if is_ours or n not in donate else copied(array))
        given.arrays.clear()
        del held, array

        def keep(results: Sequence[Array]) -> T:
            pairs = zip(results[start:], shapes, strict=False)
            return commit([a if a.shape == shape else Slack(a, shape) for a, shape in pairs], results)

        true_sizes = self.padded.true_sizes(values)
        if residence is None:
            return donation.run(executable.call, [true_sizes, *inputs, *rest], keep)
        return residence.run(partial(executable.call, true_sizes), [*inputs, *rest], keep)

    @cached_property
    def _apart(self) -> RangedProgram:
        return self._remake(replace(self.compiled.state, bundled=False))

    def unbundled(self) -> RangedProgram:
        """Return the same program with every array of its state on its own."""
        return self._apart

    def pack_numbers(
        self, numbers: Mapping[torch.dtype, list[complex]], offsets: Sequence[int]
    ) -> list[Array]:
        """Return the arguments made of numbers (``CompiledProgram.pack_numbers``)."""
        return self.compiled.pack_numbers(numbers, offsets)

    def report(
        self,
        outputs: Sequence[Value],
        lines: Mapping[Node, str] = NO_LINES,
        auto: str = "later",
        sizes: Ints = (),
    ) -> None:
        """Raise for a value check that failed in a run of these sizes (``CompiledProgram.report``)."""
        if self.messages:
            values = self._values(sizes)
            errors = [(error, _with_values(message, values)) for error, message in self.messages]
            self.compiled.report(outputs, lines, auto, errors)

    def _exact_for(self, sizes: Ints, given: Given) -> CompiledProgram | None:
        """Return the exact program of a size that comes often, if it is there; it is compiled in the background."""
        self._times[sizes] = times = (self._times.get(sizes) or 0) + 1
        if times < _HOT or torch.are_deterministic_algorithms_enabled():
            return None
        task = self._exact.get(sizes)
        if task is None:
            if self._ranges(sizes) in self._free:
                return None
            # The arrays that die are those of this run; what dies with later ones is copied, or not donated.
            task = self._exact[sizes] = background.Task(partial(self._compile_exact, sizes, given.dying))
        exact = task.result()
        # Its checks are numbered as those of the program for a range, by which they are reported.
        return exact if exact is None or len(exact.checks.errors) == len(self.messages) else None

    def _compile_exact(self, sizes: Ints, dying: frozenset[int]) -> CompiledProgram:
        graph = self.template.lift(self._graph, sizes)
        leaves = [n.call for n in graph.inputs if isinstance(n.call, Leaf) and n.call.kind == "array"]
        room = Counter(graph.outputs[n].type for n in self.results)
        donate = []
        for n, leaf in enumerate(leaves):
            if config.donate == "auto" and n in dying and room[leaf.type]:
                room[leaf.type] -= 1
                donate.append(n)
        types = {leaf.index: leaf.type for leaf in leaves}
        return CompiledProgram(graph, types, self.slots, self.results, donate=donate, options=self._options)

    def _run_exact(
        self,
        exact: CompiledProgram,
        given: Given,
        rest: Sequence[Value],
        commit: Callable[[list[Held], Sequence[Array]], T],
    ) -> T:
        """Run the exact program of a size; padded arrays are cut."""
        inputs: list[Array] = []
        held = array = None
        for n, held in enumerate(given.arrays):
            array = held.exact() if isinstance(held, Slack) else held
            is_ours = n in given.dying
            inputs.append(array if is_ours or n not in exact.donated else copied(array))
        given.arrays.clear()
        del held, array
        return donation.run(
            exact.call, [*inputs, *rest], lambda results: commit(list(results[: len(self.results)]), results)
        )

    def _array(self, n: int, held: Held, shape: tuple[int, ...]) -> Array:
        """Return the array of a slot, padded to a shape."""
        if isinstance(held, Slack):
            if held.array.shape == shape and self._varies(n):
                return held.array
            held = held.exact()
        return held if held.shape == shape else padded(held, shape)


def _is_a_little_larger(known: Sizes, wide: Sizes) -> bool:
    """Return whether ranges contain others and are at most twice as long."""
    return all(n <= known.bounds[name] <= 2 * n + 1 for name, n in wide.bounds.items())


def _with_values(message: str, values: Mapping[str, int]) -> str:
    """Return a message with numbers for the symbols in it."""
    return re.sub(r"size\d+", lambda match: str(values.get(match[0], match[0])), message)
