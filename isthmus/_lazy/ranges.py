"""Lazy mode for sizes that change: one program for a range of sizes, from the second size of a graph on.

``programs.py`` asks ``find`` for every graph before it compiles it. The first graph of a skeleton (everything but its
integers, ``_graph/size_templates.py``) is compiled exactly. When a second one comes with other sizes, the two are
generalised into a template, the graph is lifted to symbolic sizes and traced once, and from then on every graph whose
integers fit the template runs on padded arrays (``_runtime/padding``)::

    for tokens in sentences:                # lengths 9, 17, 23, 12, ...
        loss = model(tokens).loss           # exact for 9; one program for 17 to 20, one for 21 to 24, ...

Views are read through their strides, which are not linear in sizes. So ``_without_strides`` first writes each strided
read and write as a slice of a grid (``strided.find_grid``), whose integers are.

What cannot be padded is counted (``refusals``) and compiled exactly. Outputs whose sizes vary are ``Slack``; arrays
that only the trace holds are donated, so a cache that grows by ``torch.cat`` is updated in place, and one that
something else holds is not.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from sys import getrefcount
from typing import Any

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
from isthmus._graph.passes import optimise
from isthmus._graph.passes.rewrite import rewrite
from isthmus._graph.size_templates import Ints, Skeleton, Template, generalise, skeleton
from isthmus._lazy.trace import trace
from isthmus._program.program import CompiledProgram
from isthmus._runtime import counters
from isthmus._runtime.padding.program import PaddedExecutable, PaddedProgram, symbolic_axes
from isthmus._runtime.padding.sizes import Refused, Sizes, symbols

Array = jax.Array
_aten = torch.ops.aten
# Arrays that die: the trace holds them, and the function that counts.
_DYING = donation.OWNED - 1
# Runs in a narrow range of sizes that pay for a program of its own.
_OFTEN = 32
# Half types are rounded after every op, as they are when ops run one by one.
OPTIONS = {"xla_allow_excess_precision": False}
# After so many graphs of one skeleton that no template fits, its sizes are compiled exactly.
_SAMPLES = 6

refusals: Counter[str] = Counter()
"""How many graphs are compiled exactly, by the primitive that padding refused and why."""


class SizeFamily:
    """The graphs of one skeleton: the integers seen so far, and the program for a range of their sizes."""

    def __init__(self) -> None:
        self.samples: list[Ints] = []
        self.template: Template | None = None
        self.program: RangedProgram | None = None

    def match(self, graph: Graph, found: Skeleton) -> tuple[RangedProgram, Ints] | None:
        """Return the program and the sizes for a graph; None where it is to be compiled exactly."""
        sizes = self.template.match(found.ints) if self.template is not None else None
        if sizes is not None and self.program is not None:
            return (self.program, sizes) if _is_prepared(self.program, sizes) else None
        if found.ints not in self.samples and len(self.samples) < _SAMPLES:
            self.samples.append(found.ints)
            if len(self.samples) > 1:
                sizes = self._generalise(graph, found)
        return (self.program, sizes) if sizes is not None and self.program is not None else None

    def _generalise(self, graph: Graph, found: Skeleton) -> Ints | None:
        template = generalise(self.samples, found.dims)
        if template is None:
            refusals["a size that no array has"] += 1
            return None
        sizes = template.match(found.ints)
        if sizes is None:  # the first graph had a size of 0 or 1
            return None
        try:
            program = RangedProgram(graph, template)
        except Refused as error:
            _note(error)
            return None
        if not _is_prepared(program, sizes):
            return None
        self.template, self.program = template, program
        return sizes


def _note(error: Refused) -> None:
    """Count a graph that is compiled exactly."""
    counters.count("sizes refused")
    refusals[str(error)] += 1


def _is_prepared(program: RangedProgram, sizes: Ints) -> bool:
    """Compile a program for these sizes, if it is not yet; return whether padding allows it."""
    try:
        program.prepare(sizes)
    except Refused as error:
        _note(error)
        return False
    return True


class RangedProgram:
    """A graph lifted to symbolic sizes: one trace, one executable per set of padded sizes."""

    def __init__(self, graph: Graph, template: Template) -> None:
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

    def prepare(self, sizes: Ints) -> tuple[PaddedExecutable, tuple[int, ...], bool]:
        """Return the executable for these sizes, the slots it is given to overwrite, and whether it was there.

        An executable that overwrites fewer arrays than could be serves as well; one that overwrites more is compiled
        where more arrays die than ever before.
        """
        try:
            return self._prepare(self._ranges(sizes))
        except Refused:
            if not self._runs.pop(self.padded.sizes_for(self._values(sizes), config.buckets).key, 0):
                raise
            return self._prepare(self._ranges(sizes))  # a narrow range is refused where the wide one was not

    def _prepare(self, ranges: Sizes) -> tuple[PaddedExecutable, tuple[int, ...], bool]:
        shapes = [tuple(ranges.padded(n) for n in shape) for shape in self.padded.inputs]
        donate = self._donatable(
            shapes, [tuple(ranges.padded(n) for n in shape) for shape in self.padded.outputs]
        )
        there = self._donated.get(ranges.key)
        if there is None or set(donate) > set(there):
            executable = self.padded.executable(ranges, None, donate, options=OPTIONS, title="a step")
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
        self, inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Return the slots whose memory an output can take: arrays that die, and those that are padded anew."""
        if config.donate != "auto":
            return ()
        room = Counter(zip(outputs, self.padded.dtypes, strict=True))
        donate = []
        for n, at in enumerate(self.slots):
            kind = (inputs[n], self.padded.input_dtypes[n])
            if room[kind] and (self._is_fresh(n, inputs[n]) or _is_dying(at)):
                room[kind] -= 1
                donate.append(n)
        return tuple(donate)

    def _is_fresh(self, n: int, shape: tuple[int, ...]) -> bool:
        """Return whether the array of a slot has to be padded, so that the padded copy is ours."""
        if not symbolic_axes(self.padded.inputs[n]):
            return False
        held = trace.arrays[self.slots[n]]
        return (held.array if type(held) is Slack else held).shape != shape

    def run(
        self, sizes: Ints, lines: Mapping[Node, str], graph: Graph, commit: Callable[[list[Any]], None]
    ) -> tuple[Callable[[], None], bool]:
        """Run the program on the trace's arrays; return what settles its value checks, and whether it was there."""
        executable, donate, there = self.prepare(sizes)
        self._runs[self.padded.sizes_for(self._values(sizes), config.buckets).key] += 1
        # Before arrays are in a list, which would count as a reference.
        held = [
            n for n in donate if not (self._is_fresh(n, executable.inputs[n]) or _is_dying(self.slots[n]))
        ]
        arrays = [self._array(n, executable.inputs[n]) for n in range(len(self.slots))]
        for n in held:
            arrays[n] = copied(arrays[n])
        compiled, values = self.compiled, self._values(sizes)
        constants = compiled.pack_numbers(trace.numbers, trace.offsets)
        inputs = compiled.arguments(arrays, constants, trace.draws[: compiled.draws])
        del arrays
        shapes = self.padded.output_shapes(values)[: self.count]  # the check code comes after the results
        outputs: list[Any] = []

        def keep(results: Sequence[Array]) -> None:
            outputs[:] = results
            pairs = zip(results, shapes, strict=False)
            commit([a if a.shape == shape else Slack(a, shape) for a, shape in pairs])

        donation.run(executable.call, [self.padded.true_sizes(values), *inputs], keep)
        old = dict(zip(self.nodes, graph.nodes, strict=True))
        origins = {new: graph.origins.get(n, n) for new, n in old.items()}
        named = {new: lines[origin] for new, origin in origins.items() if origin in lines}
        checks = compiled.checks
        checks.errors = [(error, _with_values(message, values)) for error, message in self.messages]

        def settle() -> None:
            compiled.report(outputs, named)

        return settle, there

    def _array(self, n: int, shape: tuple[int, ...]) -> Array:
        """Return the array of a slot, padded to a shape."""
        held = trace.arrays[self.slots[n]]
        if type(held) is Slack:
            if held.array.shape == shape and symbolic_axes(self.padded.inputs[n]):
                return held.array
            held = held.exact()
        return held if held.shape == shape else padded(held, shape)


def _is_dying(at: int) -> bool:
    """Return whether only the trace holds an array, or the slack around it."""
    if getrefcount(trace.arrays[at]) != _DYING:
        return False
    return type(trace.arrays[at]) is not Slack or getrefcount(trace.arrays[at].array) == _DYING


def _with_values(message: str, values: Mapping[str, int]) -> str:
    """Return a message with numbers for the symbols in it."""
    return re.sub(r"size\d+", lambda found: str(values.get(found[0], found[0])), message)


class Match:
    """A graph that a program for a range of sizes serves: the program and the sizes."""

    def __init__(self, graph: Graph, program: RangedProgram, sizes: Ints) -> None:
        self.graph, self.program, self.sizes = graph, program, sizes


_families: LruCache[Any, SizeFamily] = LruCache("graphs alike but for sizes", 256)
_matches: LruCache[Any, list[Match | None]] = LruCache("graphs of a known size", 1024)


def find(wanted: tuple[Node, ...]) -> Match | None:
    """Return the program for a range of sizes that computes these nodes; None where they are compiled exactly."""
    if any(isinstance(n.call, Leaf) for n in wanted):
        return None
    # Offsets are integers of the graph here, so they are part of what is looked up.
    key = (wanted, tuple(trace.offsets), config.buckets)
    known = _matches.get(key)
    if known is None:
        known = [_match(wanted)]
        _matches[key] = known
    return known[0]


def _match(wanted: tuple[Node, ...]) -> Match | None:
    try:
        with temporary():
            graph = _without_strides(optimise(Graph.of(wanted), "lazy"), trace.offsets)
    except Refused as error:
        _note(error)
        return None
    found = skeleton(graph)
    if found is None:
        return None
    family = _families.get(found.key)
    if family is None:
        family = _families[found.key] = SizeFamily()
    match = family.match(graph, found)
    return None if match is None else Match(graph, *match)


def _without_strides(graph: Graph, offsets: Sequence[int]) -> Graph:
    """Return the graph with slices of grids for strided reads and writes; it has no offsets."""

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
        if not isinstance(leaf, Leaf):
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
