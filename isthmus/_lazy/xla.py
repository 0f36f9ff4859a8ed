"""Graphs as XLA programs: every call by its lowering or torch's decomposition, every view by its strides."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isthmus._device.checks.value_checks import Conditions
from isthmus._device.core import decompose, strided
from isthmus._device.core.plan import random_key
from isthmus._device.core.resident_state import Packing
from isthmus._device.core.slots import flatten
from isthmus._graph.graph import Graph, arguments_of, evaluate
from isthmus._graph.nodes import Call, Leaf, Node
from isthmus._lazy.trace import Trace
from isthmus._ops.common import Number
from isthmus._ops.registry import lowering_of
from isthmus._ops.tensors.views import reinterpret
from isthmus._ops.value_checks import collecting
from isthmus._runtime import compiler
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus._runtime.host_arrays import from_numpy
from isthmus.errors import IsthmusError

Array = Any
_aten = torch.ops.aten
# Half types are rounded after every op, as they are when ops run one by one.
_OPTIONS = {"xla_allow_excess_precision": False}


@dataclass(frozen=True)
class Kept:
    """Which leaves of a graph are state, with the outputs that take their places, and the outputs others want."""

    pairs: tuple[tuple[int, int], ...] = ()
    plain: tuple[int, ...] | None = None
    bundled: bool = True


NOTHING = Kept()


class NamedConditions(Conditions):
    """Conditions whose errors name the line that recorded the op, where it is known."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.lines: dict[Node, str] = {}

    def error(self, at: int) -> Exception:
        """Return what to raise for one of the conditions."""
        error, message = self.errors[at]
        line = self.lines.get(self.nodes[at])
        return error(f"{message} (recorded at {line})" if line else message)


class XlaProgram:
    """A graph compiled for XLA; offsets at ``moving`` places are run-time inputs, the others are compiled in.

    Its inputs are the state it keeps, the other arrays, numbers, offsets, draws, and what the conditions of earlier
    runs came to; its results are the new state, the other outputs, and what the conditions come to now.
    """

    def __init__(
        self,
        graph: Graph,
        offsets: dict[int, int],
        moving: Sequence[int],
        dying: frozenset[int],
        lines: Any,
        kept: Kept = NOTHING,
    ) -> None:
        self.graph, self.fixed, self.moving = graph, offsets, list(moving)
        self.lines, self.dying, self.kept = lines, dying, kept
        leaves = [n.call for n in graph.inputs if isinstance(n.call, Leaf)]
        arrays = {leaf.index: leaf for leaf in leaves if leaf.kind == "array"}
        kinds = {at: (leaf.type.size, to_jax_dtype(leaf.type.dtype)) for at, leaf in arrays.items()}
        self.packing = Packing(kept.pairs, kinds, kept.bundled)
        self.arrays = [leaf for at, leaf in arrays.items() if at not in self.packing.inputs]
        plain = range(len(graph.outputs)) if kept.plain is None else kept.plain
        self.places = {at: len(self.packing) + n for n, at in enumerate(plain)}
        self.packs = _pack_sizes(leaves)
        self.draws = 1 + max((leaf.index for leaf in leaves if leaf.kind == "draw"), default=-1)
        self.conditions = NamedConditions()
        self._last: dict[torch.dtype, tuple[bytes, Array]] = {}
        self.donated = self._donated(dying)
        state = len(self.packing)
        donated = (*range(state), *[state + at for at in self.donated])
        self.executable = compiler.build(self._compute, self._examples(), donated, _OPTIONS, title="a step")
        self.call = self.executable.call
        self.lines = None

    def _examples(self) -> list[jax.ShapeDtypeStruct]:
        shapes = self.packing.examples()
        shapes += [(leaf.type.size, to_jax_dtype(leaf.type.dtype)) for leaf in self.arrays]
        shapes += [((n,), to_jax_dtype(dtype)) for dtype, n in self.packs.items()]
        shapes += [((len(self.moving),), np.dtype(np.int64))] if self.moving else []
        shapes += [((self.draws, 4), np.dtype(np.uint32))] if self.draws else []
        shapes += [((), np.dtype(np.int32))]
        return [jax.ShapeDtypeStruct(*shape) for shape in shapes]

    def _donated(self, dying: frozenset[int]) -> tuple[int, ...]:
        """Return the arrays whose memory outputs can take: they die, and an output is of their kind."""
        room = Counter(output.type for output in {self.graph.outputs[at] for at in self.places})
        found = []
        for at, leaf in enumerate(self.arrays):
            if leaf.index in dying and room[leaf.type]:
                room[leaf.type] -= 1
                found.append(at)
        return tuple(found)

    def _compute(self, *inputs: Array) -> tuple[Array, ...]:
        left = iter(inputs)
        arrays = self.packing.unpack(left)
        arrays |= {leaf.index: next(left) for leaf in self.arrays}
        packs = {dtype: next(left) for dtype in self.packs}
        places = dict(zip(self.moving, next(left), strict=True)) if self.moving else {}
        draws = next(left) if self.draws else None
        before = next(left)
        checked = self.conditions.nodes = []

        def value(leaf: Leaf) -> Any:
            if leaf.kind == "array":
                return arrays[leaf.index]
            if leaf.kind == "number":
                return Number(packs[leaf.type.dtype][leaf.index], leaf.number)
            if leaf.kind == "draw":
                assert draws is not None
                return draws[leaf.index]
            return places[leaf.index] if leaf.index in places else self.fixed[leaf.index]

        def run(node: Node, given: list[Any]) -> Any:
            assert isinstance(node.call, Call)
            with self._naming(node):
                result = run_call(node.call, given)
            checked.extend([self.graph.origins.get(node, node)] * (len(found.flags) - len(checked)))
            return result

        leaves = [value(n.call) for n in self.graph.inputs if isinstance(n.call, Leaf)]
        with collecting() as found:
            outputs = evaluate(self.graph, leaves, run)
        self.conditions.errors = found.errors
        failed = [found.first_failed(before)] if found.errors else []
        return (*self.packing.pack(outputs), *[outputs[at] for at in self.places], *failed)

    @contextlib.contextmanager
    def _naming(self, node: Node) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            assert isinstance(node.call, Call)
            where = (
                self.lines.get(self.graph.origins.get(node, node))
                or 'set isthmus.config.lines = "on" to see where'
            )
            raise IsthmusError(f"{node.call.op} could not be compiled ({where}): {error}") from error

    def inputs(self, arrays: list[Array], constants: list[Array], draws: list[Array]) -> list[Array]:
        """Return what ``call`` takes after the state; ``settle`` must be told what it returns."""
        words = [np.stack(draws)] if self.draws else []
        return [*arrays, *constants, *words, self.conditions.before()]

    def unbundled(self) -> XlaProgram:
        """Return the same program with every array of its state on its own."""
        kept = replace(self.kept, bundled=False)
        return XlaProgram(self.graph, self.fixed, self.moving, self.dying, {}, kept)

    def constants(self, trace: Trace) -> list[Array]:
        """Return the inputs made of a trace's numbers and offsets."""
        found = [self._pack(dtype, trace.numbers[dtype][:n]) for dtype, n in self.packs.items()]
        if self.moving:
            found.append(from_numpy(np.array([trace.offsets[at] for at in self.moving], np.int64)))
        return found

    def settle(self, found: Sequence[Array], lines: dict[Node, str]) -> None:
        """Raise for a condition that failed, given what a call returned, when the config says; lines name its place."""
        if self.conditions.errors:
            self.conditions.lines = lines
            self.conditions.settle(found[-1], auto="later")

    def _pack(self, dtype: torch.dtype, numbers: list[Any]) -> Array:
        """Return numbers as one array; numbers that are those of the last step are there already."""
        packed = np.array(numbers, to_jax_dtype(dtype))
        data = packed.tobytes()
        last = self._last.get(dtype)
        if last is None or last[0] != data:
            last = self._last[dtype] = (data, from_numpy(packed))
        return last[1]


def _pack_sizes(leaves: list[Leaf]) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = {}
    for leaf in leaves:
        if leaf.kind == "number":
            dtype = leaf.type.dtype
            sizes[dtype] = max(sizes.get(dtype, 0), leaf.index + 1)
    return sizes


def run_call(call: Call, given: list[Any]) -> Any:
    """Compute a call on arrays; a list where it has several results."""
    view = _VIEWS.get(call.op)
    if view is not None:
        return view(**arguments_of(call, given))
    arguments = {name: _as_jax(value) for name, value in arguments_of(call, given).items()}
    if call.random:
        arguments["rng"] = random_key(given[-1])
    tier = lowering_of(call.op) or decompose.function_for(call.op)
    if tier is None:
        raise IsthmusError(f"nothing lowers {call.op}")
    with _context(call):
        results = flatten(tier(arguments))
    return results if len(call.types) != 1 else results[0]


def _as_jax(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_jax(item) for item in value]
    return to_jax_dtype(value) if isinstance(value, torch.dtype) else value


@contextlib.contextmanager
def _context(call: Call) -> Iterator[None]:
    """Restore what torch was told when the call was recorded."""
    dtype, precision = call.context
    now = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    if now == (dtype, precision or now[1]):
        yield
        return
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision or now[1])
    try:
        yield
    finally:
        torch.set_default_dtype(now[0])
        torch.set_float32_matmul_precision(now[1])


def _as_strided(self: Array, size: Any, stride: Any, storage_offset: Any) -> Array:
    return strided.read(self, tuple(size), tuple(stride), _start(storage_offset))


def _scatter(self: Array, src: Array, size: Any, stride: Any, storage_offset: Any) -> Array:
    return strided.write_bits(self, src, tuple(size), tuple(stride), _start(storage_offset))


def _start(offset: Any) -> Any:
    return 0 if offset is None else offset


_VIEWS: dict[Any, Callable[..., Array]] = {
    _aten.view.default: lambda self, size: self.reshape(size),
    _aten.view.dtype: lambda self, dtype: reinterpret(self, to_jax_dtype(dtype)),
    _aten.permute.default: lambda self, dims: self.transpose(dims),
    _aten.expand.default: lambda self, size, implicit=False: jnp.broadcast_to(self, size),
    _aten.as_strided.default: _as_strided,
    _aten.as_strided_scatter.default: _scatter,
}
