"""An FX graph for arguments of given sizes: what its program takes, computes and returns.

``Specialization`` is what a call of a compiled function needs beyond the ``CompiledProgram``: which argument each input
comes from, which storages are written and therefore donated, and how results become tensors. ``program.py`` makes one
for each new key, ``running.py`` compiles and runs it.

The inputs of its program are the *sources* of a call: for each tensor argument the array of its storage, followed by
its storage offset if it has one, and at the end the words of the call's random draw. Source ``i`` is array leaf ``i``
of the graph; a tensor that holds what forward saved for backward is a tuple of arrays, whose leaves come after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import Node as FxNode

from isthmus._device.core.buffer import Buffer, check_reach
from isthmus._device.core.slots import Slot, Static, TensorSlot, slot_for
from isthmus._dynamo.convert import Conversion, Storage
from isthmus._dynamo.layout import Symbols
from isthmus._dynamo.returns import Returns
from isthmus._dynamo.saved_tensors import Contents, Part, contents_of
from isthmus._dynamo.targets import NodeFailure
from isthmus._graph import view_calls
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Node, Type, leaf, temporary
from isthmus._graph.passes import cut, optimise
from isthmus._graph.passes.freeze import freeze
from isthmus._graph.passes.repeated_blocks import repeated_blocks
from isthmus._graph.passes.stages import Stage, in_order
from isthmus._graph.private import storage_id
from isthmus._ops.tensors.views import VIEWS
from isthmus._program import staged
from isthmus._program.evaluate import CallFailure
from isthmus._program.program import CompiledProgram, Places, StateLayout
from isthmus._runtime import compiler, placement
from isthmus._runtime.dtypes import to_torch_dtype
from isthmus._runtime.user_frames import place_in

if TYPE_CHECKING:
    from isthmus._dynamo.program import Program


class Specialization:
    """A program for arguments of given sizes; it keeps none of them."""

    def __init__(self, program: Program, args: list[Any], sources: list[Any]) -> None:
        self.program = program
        index = iter(range(len(sources)))
        self.slots = [_slot(arg, index) for arg in args]
        self.local = [isinstance(a, Tensor) and a.device.type == "jax" for a in args]
        self.devices = {a.device.type for a in args if isinstance(a, Tensor) and contents_of(a) is None}
        for arg in [arg for arg, local in zip(args, self.local, strict=True) if local]:
            check_reach(arg)
        # Targets on one storage are written one after another; each group of them is one output. A tensor of another
        # device arrives as an array of its own.
        storages = [storage_id(args[at]) if self.local[at] else (at,) for at in program.targets]
        self.groups = [storages.index(storage) for storage in storages]
        self.order = list(dict.fromkeys(self.groups))
        # Memory of torch's (a CPU or CUDA tensor that is written to) is not ours to donate, and a tracer has none.
        here = all(self.local[at] for at in program.targets)
        traced = any(isinstance(source, Buffer) and source.signature.traced for source in sources)
        self.donates = here and program.options.donate == "auto" and not traced
        self.arrays, self.inputs, self.shardings = _leaves(sources)
        # Nodes of this graph may hold constants and sub-graphs, which the table of all nodes would keep alive.
        with temporary():
            self.graph, self.returns, self.results, self.origins = self._convert(args)
            self.stages = self._cut()
        # Parameters are no state: other programs read them between two runs of this one.
        self.state = [
            (self.index(target), group)
            for group, target in enumerate(self.targets)
            if not self.stages
            and self.donates
            # Two targets on one storage are two tensors that may be read between runs.
            and self.groups.count(self.order[group]) == 1
            and not args[target].requires_grad
        ]

    @property
    def targets(self) -> list[int]:
        """The first argument of each storage that is written to."""
        # Of several targets on one storage the first; ``groups`` has the numbers of these.
        return [self.program.targets[group] for group in self.order]

    def index(self, at: int) -> int:
        """Return which source holds the storage of a tensor argument."""
        slot = self.slots[at]
        assert isinstance(slot, TensorSlot)
        return slot.index

    def _leaf(self, at: int) -> Node:
        return leaf("array", at, self.arrays[at])

    def _convert(self, args: list[Any]) -> tuple[Graph, Returns, list[Places], dict[Node, FxNode]]:
        """Return the graph, how its results become tensors, and which outputs the program returns."""
        placeholders = self.program.placeholders
        storages = {
            fx: self._storage(slot)
            for fx, slot in zip(placeholders, self.slots, strict=True)
            if isinstance(slot, TensorSlot)
        }
        # The words of the draw are the last source.
        words = self._leaf(len(self.inputs) - 1) if self.program.draw is not None else None
        conversion = Conversion(
            self.program.module,
            Symbols(placeholders, args),
            [self._argument(slot) for slot in self.slots],
            storages,
            words,
        )
        returns = Returns(self.program.module, placeholders, args, conversion)
        outputs: list[Node] = self._written(conversion.written)
        results: list[Places] = []
        for stored in returns.stored:
            nodes = stored if isinstance(stored, tuple) else (stored,)
            places = tuple(range(len(outputs), len(outputs) + len(nodes)))
            outputs += nodes
            results.append(places if isinstance(stored, tuple) else places[0])
        # Effects are outputs that nothing returns, so that they are computed.
        graph = optimise(Graph.of([*outputs, *conversion.effects]), "compile")
        return graph, returns, results, conversion.origins

    def _storage(self, slot: TensorSlot) -> Storage:
        offset = None if slot.offset_index is None else self._leaf(slot.offset_index)
        return Storage(self._leaf(slot.index), slot.spec, offset)

    def _argument(self, slot: Slot | SavedSlot) -> Any:
        """Return an argument of the graph: the node that reads it, or its value where it is no tensor."""
        if isinstance(slot, TensorSlot):
            storage = self._storage(slot)
            return view_calls.read_node(storage.node, storage.spec, storage.offset)
        if isinstance(slot, SavedSlot):
            places = self.inputs[slot.index]
            assert isinstance(places, tuple)
            # Each residual is read from its array by its own view.
            return [view_calls.read_node(self._leaf(places[part.index]), part.spec) for part in slot.parts]
        assert isinstance(slot, Static)
        return slot.value

    def _written(self, written: dict[FxNode, Node]) -> list[Node]:
        """Return the new value of each storage that is written to."""
        values: dict[int, Node] = {}
        for group, at in zip(self.groups, self.program.targets, strict=True):
            slot = self.slots[at]
            assert isinstance(slot, TensorSlot)
            storage = self._storage(slot)
            # The second target on a storage is written into what the first has made of it.
            old = values.get(group, storage.node)
            new = written[self.program.placeholders[at]]
            values[group] = view_calls.write_node(old, slot.spec, new, storage.offset)
        return [values[group] for group in self.order]

    def _constraints(self) -> dict[int, placement.Sharding]:
        """Return how what is written stays split, by number of output; nothing on one device."""
        if placement.home is None:
            return {}
        return {group: self.shardings.get(self.index(target)) for group, target in enumerate(self.targets)}

    def _lines(self) -> dict[Node, str] | None:
        """Return the line of user code of each node as ``file.py:12``; None on one device."""
        if placement.home is None:
            return None
        places = {node: place_in(fx.meta.get("stack_trace") or "") for node, fx in self.origins.items()}
        return {
            node: f"{Path(place.file).name}:{place.line}"
            for node, place in places.items()
            if place is not None
        }

    def _cut(self) -> list[Stage]:
        """Return the stages that passes cut the graph into, none if it is to be one program."""
        program = self.program
        if placement.home is not None:
            return []  # XLA is to see the whole graph, to choose how values between its parts are split
        # Weights and whatever depends on them alone.
        if program.parameters:
            parameters = {at for place in program.parameters for at in self._sources(place)}
            return cut("freeze", "compile", self.graph, lambda graph: freeze(graph, parameters, VIEWS))
        # A graph in stages keeps no state and donates nothing. On other platforms a call costs more than it saves.
        if program.options.blocks == "fuse" or program.targets or compiler.platform() != "cpu":
            return []
        # In the order of FX: a graph's own order mixes the layers of a backward.
        order = {fx: at for at, fx in enumerate(program.module.graph.nodes)}
        graph = in_order(self.graph, {n: order[fx] for n, fx in self.origins.items()})
        return cut("repeated_blocks", "compile", graph, repeated_blocks)

    def _sources(self, place: int) -> list[int]:
        """Return the sources of a tensor argument: its storage and, where it has one, its offset."""
        slot = self.slots[place]
        return (
            [at for at in (slot.index, slot.offset_index) if at is not None]
            if isinstance(slot, TensorSlot)
            else []
        )

    def compile(self) -> staged.Program:
        """Return the program; raise ``NodeFailure`` for a node that has no lowering for these arguments."""
        # State stays with the program between runs: its storages are no slots and its new values no results.
        kept = {group for _, group in self.state}
        state = {index for index, _ in self.state}
        written = [group for group in range(len(self.order)) if group not in kept]
        slots = [places for at, places in enumerate(self.inputs) if at not in state]
        # Memory of arguments that are written and are no state.
        rewritten = {self.index(self.targets[group]) for group in written} if self.donates else set()
        results = [*written, *self.results]
        program = partial(
            CompiledProgram,
            # JAX may transform torch code that calls a compiled function.
            differentiable=True,
            options=self.program.options.xla,
            title=f"{self.program.name} ({len(self.program.module.graph.nodes):,} nodes)",
        )
        try:
            if self.stages:
                once = int(bool(self.program.parameters))
                with temporary():
                    return staged.StagedProgram(
                        self.graph, self.stages, self.arrays, slots, results, program, once
                    )
            return program(
                self.graph,
                self.arrays,
                slots,
                results,
                state=StateLayout(tuple(self.state)),
                donate=[at for at, places in enumerate(slots) if places in rewritten],
                shardings=self.shardings,
                constraints=self._constraints(),
                lines=self._lines(),
            )
        except CallFailure as failure:
            # A node that passes have made has no FX node: the error itself says more.
            if failure.node not in self.origins:
                raise
            raise NodeFailure(self.origins[failure.node], failure.cause) from failure.cause


@dataclass(frozen=True)
class SavedSlot:
    """An argument that holds what forward saved: the source it is, and the values to be found there."""

    index: int
    parts: tuple[Part, ...]


def _slot(arg: Any, index: Iterator[int]) -> Slot | SavedSlot:
    contents = contents_of(arg)
    if contents is not None:
        return SavedSlot(next(index), contents.parts)
    return slot_for(arg, False, index) if isinstance(arg, Tensor) else Static(arg)


def _leaves(
    sources: Sequence[Any],
) -> tuple[dict[int, Type], list[Places], dict[int, placement.Sharding]]:
    """Return the type of every array leaf, the leaf, or the leaves, of each source, and how leaves are split."""
    types: dict[int, Type] = {}
    shardings: dict[int, placement.Sharding] = {}
    # Leaves beyond the sources: the arrays inside of tokens.
    places: list[Places] = []
    following = len(sources)
    for at, source in enumerate(sources):
        described = source.signature if isinstance(source, Buffer) else source
        if isinstance(described, Contents):
            leaves = tuple(range(following, following + len(described.arrays)))
            following += len(leaves)
            types |= {n: _type(array) for n, array in zip(leaves, described.arrays, strict=True)}
            shardings |= {n: array.sharding for n, array in zip(leaves, described.arrays, strict=True)}
            places.append(leaves)
        else:
            types[at] = _type(described)
            shardings[at] = source.signature.sharding if isinstance(source, Buffer) else None
            places.append(at)
    return types, places, {at: sharding for at, sharding in shardings.items() if sharding is not None}


def _type(array: Any) -> Type:
    return Type(tuple(array.shape), to_torch_dtype(array.dtype))
