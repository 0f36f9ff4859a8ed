"""Programs for ranges of sizes: graphs that are alike but for their sizes run by one program, on padded arrays.

A mode asks ``find`` for every graph before it compiles it. The first graph of a skeleton (everything but its integers,
``_graph/size_templates.py``) is compiled exactly. When a second one comes with other sizes, the two are generalised
into a template, the graph is lifted to symbolic sizes and traced once, and from then on every graph whose integers fit
the template runs on padded arrays (``_runtime/padding``). ``_lazy/ranges.py`` calls it, and nothing here knows of lazy
mode::

    match = find(graph, given, options)                     # None: compile exactly
    match.program.run(match.sizes, given(match.program.slots), rest, commit)

Views are read through their strides, which are not linear in sizes. So ``without_strides`` first writes each strided
read and write as a slice of a grid (``strided.find_grid``), whose integers are.

What cannot be padded is counted (``refusals``) and compiled exactly. Outputs whose sizes vary are ``Slack``. Arrays
that die, which the caller names by slot, and arrays that are padded for the call are donated.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from isthmus import config
from isthmus._caches import LruCache
from isthmus._device.core import donation, strided
from isthmus._device.core.host_tensors import copied
from isthmus._device.core.slack import Slack, padded
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Input, Leaf, Node, call_of, node, temporary
from isthmus._graph.passes.rewrite import rewrite
from isthmus._graph.size_templates import Ints, Skeleton, Template, generalise, skeleton
from isthmus._program.program import CompiledProgram
from isthmus._runtime import counters
from isthmus._runtime.padding.program import PaddedExecutable, PaddedProgram, symbolic_axes
from isthmus._runtime.padding.sizes import Refused, Sizes, symbols

Array = jax.Array
T = TypeVar("T")
_aten = torch.ops.aten
# Runs in a narrow range of sizes that pay for a program of its own.
_OFTEN = 32
# Half types are rounded after every op, as they are when ops run one by one.
OPTIONS = {"xla_allow_excess_precision": False}
# After so many graphs of one skeleton that no template fits, its sizes are compiled exactly.
_SAMPLES = 6

refusals: Counter[str] = Counter()
"""How many graphs are compiled exactly, by the primitive that padding refused and why."""


@dataclass(frozen=True)
class Given:
    """The arrays of a call, by slot: exact ones or ``Slack``; and the slots whose arrays nothing else holds."""

    arrays: list[Any]
    dying: frozenset[int] = frozenset()


class SizeFamily:
    """The graphs of one skeleton: the integers seen so far, and the program for a range of their sizes."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.samples: list[Ints] = []
        self.template: Template | None = None
        self.program: RangedProgram | None = None

    def match(self, graph: Graph, found: Skeleton, given: Given) -> tuple[RangedProgram, Ints] | None:
        """Return the program and the sizes for a graph; None where it is to be compiled exactly."""
        sizes = self.template.match(found.ints) if self.template is not None else None
        if sizes is not None and self.program is not None:
            return (self.program, sizes) if _is_prepared(self.program, sizes, given) else None
        if found.ints not in self.samples and len(self.samples) < _SAMPLES:
            self.samples.append(found.ints)
            if len(self.samples) > 1:
                sizes = self._generalise(graph, found, given)
        return (self.program, sizes) if sizes is not None and self.program is not None else None

    def _generalise(self, graph: Graph, found: Skeleton, given: Given) -> Ints | None:
        template = generalise(self.samples, found.dims)
        if template is None:
            refusals["a size that no array has"] += 1
            return None
        sizes = template.match(found.ints)
        if sizes is None:  # the first graph had a size of 0 or 1
            return None
        try:
            program = RangedProgram(graph, template, self.options)
        except Refused as error:
            _note(error)
            return None
        if not _is_prepared(program, sizes, given):
            return None
        self.template, self.program = template, program
        return sizes


def _note(error: Refused) -> None:
    """Count a graph that is compiled exactly."""
    counters.count("sizes refused")
    refusals[str(error)] += 1


def _is_prepared(program: RangedProgram, sizes: Ints, given: Given) -> bool:
    """Compile a program for these sizes, if it is not yet; return whether padding allows it."""
    try:
        program.prepare(sizes, given)
    except Refused as error:
        _note(error)
        return False
    return True


class RangedProgram:
    """A graph lifted to symbolic sizes: one trace, one executable per set of padded sizes."""

    def __init__(self, graph: Graph, template: Template, options: Mapping[str, Any]) -> None:
        self._options = options
        names = [f"size{n}" for n in range(len(template.places))]
        self.least = dict(zip(names, template.least, strict=True))
        self.names, self._dims = names, symbols(self.least)
        lifted = template.lift(graph, [self._dims[name] for name in names])
        self.nodes, self.count = lifted.nodes, len(lifted.outputs)
        leaves = [n.call for n in lifted.inputs if isinstance(n.call, Leaf) and n.call.kind == "array"]
        try:
            self.compiled = CompiledProgram(
                lifted,
                {leaf.index: leaf.type for leaf in leaves},
                [leaf.index for leaf in leaves],
                range(len(lifted.outputs)),
                build=self._trace,
            )
        except Refused:
            raise
        except Exception as error:  # the exact program says what is wrong with the graph, if anything is
            raise Refused("trace", f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        self.messages = list(self.compiled.checks.errors)
        self.slots = [leaf.index for leaf in leaves]
        self._donated: dict[Any, tuple[int, ...]] = {}
        self._runs: Counter[Any] = Counter()

    def _trace(self, function: Callable[..., Any], examples: Sequence[Any], *_: Any) -> PaddedProgram:
        self.padded = PaddedProgram(function, examples, self._dims, self.least)
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
            return self._prepare(
                self._ranges(sizes), given
            )  # a narrow range is refused where the wide one was not

    def _prepare(self, ranges: Sizes, given: Given) -> tuple[PaddedExecutable, tuple[int, ...], bool]:
        shapes = [tuple(ranges.padded(n) for n in shape) for shape in self.padded.inputs]
        outputs = [tuple(ranges.padded(n) for n in shape) for shape in self.padded.outputs]
        donate = self._donatable(given, shapes, outputs)
        there = self._donated.get(ranges.key)
        if there is None or set(donate) > set(there):
            executable = self.padded.executable(ranges, None, donate, options=self._options, title="a step")
            self._donated[ranges.key] = donate
            return executable, donate, False
        return self.padded.executable(ranges, None, there), there, True

    def _ranges(self, sizes: Ints) -> Sizes:
        """Return the ranges for these sizes: up to a power of two first, and narrow ones where they come often.

        The first keeps compilations few, the second keeps padding below 1 / ``config.buckets``.
        """
        values = self._values(sizes)
        narrow = self.padded.sizes_for(values, config.buckets)
        return narrow if self._runs[narrow.key] >= _OFTEN else self.padded.sizes_for(values, 1)

    def _donatable(
        self, given: Given, inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Return the slots whose memory an output can take: arrays that die, and those that are padded anew."""
        if config.donate != "auto":
            return ()
        room = Counter(zip(outputs, self.padded.dtypes, strict=True))
        donate = []
        for n, held in enumerate(given.arrays):
            kind = (inputs[n], self.padded.input_dtypes[n])
            if room[kind] and (n in given.dying or self._is_fresh(n, held, inputs[n])):
                room[kind] -= 1
                donate.append(n)
        return tuple(donate)

    def _is_fresh(self, n: int, held: Array | Slack, shape: tuple[int, ...]) -> bool:
        """Return whether the array of a slot has to be padded, so that the padded copy is ours."""
        if not symbolic_axes(self.padded.inputs[n]):
            return False
        return (held.array if type(held) is Slack else held).shape != shape

    def run(
        self,
        sizes: Ints,
        given: Given,
        rest: Sequence[Any],
        commit: Callable[[list[Any], Sequence[Array]], T],
    ) -> T:
        """Run the program; ``commit`` takes the results, some of them ``Slack``, and what the program returned.

        ``rest`` are the arguments after the arrays: numbers, draws and the check code. ``given`` is emptied.
        """
        executable, donate, _ = self.prepare(sizes, given)
        values = self._values(sizes)
        self._runs[self.padded.sizes_for(values, config.buckets).key] += 1
        shapes = self.padded.output_shapes(values)[: self.count]  # the check code comes after the results
        inputs: list[Any] = [self.padded.true_sizes(values)]
        for n, (held, shape) in enumerate(zip(given.arrays, executable.inputs, strict=False)):
            array = self._array(n, held, shape)
            is_ours = n in given.dying or self._is_fresh(n, held, shape)
            inputs.append(copied(array) if n in donate and not is_ours else array)
        given.arrays.clear()
        del held, array

        def keep(results: Sequence[Array]) -> T:
            pairs = zip(results, shapes, strict=False)
            return commit([a if a.shape == shape else Slack(a, shape) for a, shape in pairs], results)

        errors = [(error, _with_values(message, values)) for error, message in self.messages]
        self.compiled.checks.errors = errors
        return donation.run(executable.call, [*inputs, *rest], keep)

    def _array(self, n: int, held: Array | Slack, shape: tuple[int, ...]) -> Array:
        """Return the array of a slot, padded to a shape."""
        if isinstance(held, Slack):
            if held.array.shape == shape and symbolic_axes(self.padded.inputs[n]):
                return held.array
            held = held.exact()
        return held if held.shape == shape else padded(held, shape)


def _with_values(message: str, values: Mapping[str, int]) -> str:
    """Return a message with numbers for the symbols in it."""
    return re.sub(r"size\d+", lambda found: str(values.get(found[0], found[0])), message)


@dataclass(frozen=True)
class Match:
    """A graph that a program for a range of sizes serves: the graph without strides, the program and the sizes."""

    graph: Graph
    program: RangedProgram
    sizes: Ints


_families: LruCache[Any, SizeFamily] = LruCache("graphs alike but for sizes", 256)


def array_leaves(graph: Graph) -> list[int]:
    """Return the array leaves of a graph, which are the slots of its program."""
    return [n.call.index for n in graph.inputs if isinstance(n.call, Leaf) and n.call.kind == "array"]


def find(graph: Graph, given: Callable[[list[int]], Given], options: Mapping[str, Any]) -> Match | None:
    """Return the program for a range of sizes that computes a graph without strides; None where it is compiled exactly.

    ``given`` returns the arrays of these leaves.
    """
    found = skeleton(graph)
    if found is None:
        return None
    key = (found.key, tuple(sorted(options.items())), config.buckets)
    family = _families.get(key)
    if family is None:
        family = _families[key] = SizeFamily(options)
    match = family.match(graph, found, given(array_leaves(graph)))
    return None if match is None else Match(graph, *match)


def lifted_strides(graph: Callable[[], Graph], offsets: Sequence[int] = ()) -> Graph | None:
    """Return a graph without strides, None where it has a view that is no slice."""
    try:
        with temporary():
            return without_strides(graph(), offsets)
    except Refused as error:
        _note(error)
        return None


def without_strides(graph: Graph, offsets: Sequence[int] = ()) -> Graph:
    """Return the graph with slices of grids for strided reads and writes; ``offsets`` are the values of its offsets."""

    def rule(call: Call, inputs: tuple[Node, ...]) -> Node | None:
        if call.op is _aten.as_strided.default:
            grid, size = _grid(call, inputs[:1], inputs[1:], offsets)
            return node(call_of(_read, {"0": Input(0), **grid, "size": size}, call.types), inputs[0])
        if call.op is _aten.as_strided_scatter.default:
            grid, size = _grid(call, inputs[:2], inputs[2:], offsets)
            if any(step != 1 for step in grid["step"]) or 0 in dict(call.arguments)["stride"]:
                raise Refused("as_strided_scatter", "a write that is no slice")
            arguments = {"0": Input(0), "1": Input(1), **grid}
            return node(call_of(_write, arguments, call.types), *inputs[:2])
        return None

    return rewrite(graph, rule)


def _grid(
    call: Call, arrays: tuple[Node, ...], offset: tuple[Node, ...], offsets: Sequence[int]
) -> tuple[dict[str, Any], Ints]:
    """Return the grid of a strided call as arguments, and the size of the view."""
    arguments = dict(call.arguments)
    size, stride, start = arguments["size"], arguments["stride"], arguments.get("storage_offset", 0)
    if offset:
        leaf = offset[0].call
        if not isinstance(leaf, Leaf) or leaf.kind != "offset":
            raise Refused("as_strided", "a view that starts at a computed place")
        start = offsets[leaf.index]
    storage = arrays[0].type.size
    dims = tuple(d for d, (n, s) in enumerate(zip(size, stride, strict=True)) if n > 1 and s != 0)
    grid = None
    if 0 not in size:
        grid = strided.find_grid(storage, [size[d] for d in dims], [stride[d] for d in dims], start)
    if grid is None or math.prod(grid.shape) != math.prod(storage):
        raise Refused(call.op.name(), "a view that is no slice")
    parts = {"shape": grid.shape, "start": grid.start, "count": grid.count, "step": grid.step}
    return {**parts, "order": grid.order, "dims": dims}, size


def _read(
    value: Array, shape: Any, start: Any, count: Any, step: Any, order: Any, dims: Any, size: Any
) -> Array:
    """Return the slice of a grid that a view shows; ``strided.read`` for sizes that may be symbolic."""
    block = value.reshape(shape)
    if any(c != n for c, n in zip(count, shape, strict=True)):
        limit = [a + (n - 1) * k + 1 for a, n, k in zip(start, count, step, strict=True)]
        block = lax.slice(block, start, limit, step)
    rest = [axis for axis in range(len(shape)) if axis not in order]
    block = block.transpose([*order, *rest]).reshape([size[d] for d in dims])
    return lax.broadcast_in_dim(block, size, dims)


def _write(
    value: Array, new: Array, shape: Any, start: Any, count: Any, step: Any, order: Any, dims: Any
) -> Array:
    """Return a grid with the slice that a view shows replaced; ``strided.write_bits`` for symbolic sizes."""
    bits = value if value.dtype == jnp.bool_ else strided.bits_of(value)
    block = new if bits is value else strided.bits_of(new)
    axes = [*order, *[axis for axis in range(len(shape)) if axis not in order]]
    block = block.reshape([count[axis] for axis in axes]).transpose(np.argsort(axes))
    grid = lax.dynamic_update_slice(bits.reshape(shape), block, [jnp.asarray(n, jnp.int32) for n in start])
    grid = grid.reshape(value.shape)
    return grid if bits is value else lax.bitcast_convert_type(grid, value.dtype)
