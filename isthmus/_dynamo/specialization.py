"""A graph for arguments of given sizes, as a JAX function of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from torch import Tensor
from torch.fx import Node

from isthmus._device.checks.value_checks import Conditions
from isthmus._device.core.buffer import Buffer, check_reach
from isthmus._device.core.resident_state import Packing
from isthmus._device.core.slots import Slot, Static, TensorSlot, slot_for
from isthmus._device.core.strided import read
from isthmus._dynamo.evaluate import Evaluation
from isthmus._dynamo.layout import Symbols
from isthmus._dynamo.returns import Returns
from isthmus._dynamo.saved_tensors import Contents, Part, contents_of
from isthmus._graph.layout import span
from isthmus._ops.tensors.views import reinterpret
from isthmus._ops.value_checks import collecting
from isthmus._runtime import compiler
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus.errors import Unsupported

if TYPE_CHECKING:
    from isthmus._dynamo.program import Program


class Specialization:
    """A program for arguments of given sizes; it keeps none of them."""

    def __init__(self, program: Program, args: list[Any], sources: list[Any]) -> None:
        self.program = program
        index = iter(range(len(sources)))
        self.slots = [_slot(arg, index) for arg in args]
        self.symbols = Symbols(program.placeholders, args)
        self.conditions = Conditions()
        self.kinds = [_kind(source) for source in sources]
        self.local = [isinstance(a, Tensor) and a.device.type == "jax" for a in args]
        for arg in [arg for arg, local in zip(args, self.local, strict=True) if local]:
            check_reach(arg)
        # Targets on one storage are written one after another; each group of them is one output. A tensor of another
        # device arrives as an array of its own.
        storages = [args[at].untyped_storage()._cdata if self.local[at] else (at,) for at in program.targets]
        self.groups = [storages.index(storage) for storage in storages]
        self.order = list(dict.fromkeys(self.groups))
        self.returns = Returns(program.module, program.placeholders, args, self.symbols)
        here = all(self.local[at] for at in program.targets)
        traced = any(isinstance(source, Buffer) and source.signature.traced for source in sources)
        self.donates = here and program.options.donate == "auto" and not traced
        self.state = self._state(args) if self.donates else []
        self.pack(together=True)

    def _state(self, args: list[Any]) -> list[tuple[int, int]]:
        """Return the inputs that stay with the program, with the group that is written there.

        Parameters do not: other programs read them between two runs of this one.
        """
        found = []
        for group, target in enumerate(self.targets):
            alone = self.groups.count(self.order[group]) == 1
            if alone and not args[target].requires_grad:
                found.append((self.index(target), group))
        return found

    @property
    def targets(self) -> list[int]:
        """The first argument of each storage that is written to."""
        return [self.program.targets[group] for group in self.order]

    def index(self, at: int) -> int:
        """Return which input holds the storage of a tensor argument."""
        slot = self.slots[at]
        assert isinstance(slot, TensorSlot)
        return slot.index

    def pack(self, together: bool) -> None:
        """Choose how the state travels."""
        self.packing = Packing(self.state, dict(enumerate(self.kinds)), together)
        self.others = [index for index in range(len(self.kinds)) if index not in self.packing.inputs]
        kept = {group for _, group in self.state}
        self.written = [group for group in range(len(self.order)) if group not in kept]

    @property
    def examples(self) -> list[Any]:
        """An example of each input."""
        kinds = [*self.packing.examples(), *[self.kinds[index] for index in self.others]]
        return [*map(_example, kinds), compiler.abstract(self.conditions.before())]

    def _inputs(self, given: Sequence[Any]) -> list[Any]:
        """Return the inputs in the order of the arguments."""
        left = iter(given)
        found = self.packing.unpack(left)
        found |= {index: next(left) for index in self.others}
        return [found[index] for index in range(len(self.kinds))]

    def compute(self, *given: Any) -> tuple[Any, ...]:
        """Compute state, rewritten storages, new storages, then which condition of a lowering failed first."""
        program, inputs, before = self.program, self._inputs(given[:-1]), given[-1]
        words = inputs[-1] if program.draw is not None else None
        run = Evaluation(program.module, self.symbols, words, self._storages(inputs))
        with collecting() as found:
            run.run([_fill(slot, inputs) for slot in self.slots])
        self.conditions.errors = found.errors
        failed = [found.first_failed(before)] if found.errors else []
        values = self._written(run.written, inputs)
        state = self.packing.pack(values)
        # Rewritten storages come first: XLA gives donated memory to the first result that fits it.
        return (*state, *[values[group] for group in self.written], *self.returns.arrays(run.values), *failed)

    def _storages(self, inputs: Sequence[Any]) -> dict[Node, Callable[[Any, Any, Any], Any]]:
        """Return for each tensor argument how strides are read from its whole storage."""

        def reader(node: Node, slot: TensorSlot) -> Callable[[Any, Any, Any], Any]:
            storage = reinterpret(inputs[slot.index], to_jax_dtype(slot.spec.dtype))

            def of(size: Any, stride: Any, offset: Any) -> Any:
                # torch's fake tensor may start elsewhere in its storage than the argument does.
                start = offset - self.symbols(node.meta["val"].storage_offset())
                if slot.offset_index is None and not 0 <= start <= storage.size - span(size, stride):
                    raise Unsupported("elements before or after those that an argument shows")
                return read(storage, size, stride, slot.offset(inputs) + start)

            return of

        pairs = zip(self.program.placeholders, self.slots, strict=True)
        return {node: reader(node, slot) for node, slot in pairs if isinstance(slot, TensorSlot)}

    def _written(self, written: dict[Node, Any], inputs: Sequence[Any]) -> list[Any]:
        values: dict[int, Any] = {}
        for group, at in zip(self.groups, self.program.targets, strict=True):
            slot = self.slots[at]
            assert isinstance(slot, TensorSlot)
            storage = values.get(group, inputs[slot.index])
            values[group] = slot.write(storage, inputs, written[self.program.placeholders[at]])
        return [values[group] for group in self.order]


@dataclass(frozen=True)
class KeptSlot:
    """An argument that holds what forward kept: the input it is, and the values to be found there."""

    index: int
    parts: tuple[Part, ...]

    def read(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the values."""
        return [part.read(inputs[self.index]) for part in self.parts]


def _slot(arg: Any, index: Iterator[int]) -> Slot | KeptSlot:
    contents = contents_of(arg)
    if contents is not None:
        return KeptSlot(next(index), contents.parts)
    return slot_for(arg, False, index) if isinstance(arg, Tensor) else Static(arg)


def _fill(slot: Slot | KeptSlot, inputs: Sequence[Any]) -> Any:
    return slot.read(inputs) if isinstance(slot, (TensorSlot, KeptSlot)) else slot.value  # type: ignore[union-attr]


def _kind(source: Any) -> Any:
    """Return the shape and dtype of an input, or those of each array of one that is kept."""
    found = source.signature if isinstance(source, Buffer) else source
    if isinstance(found, Contents):
        return [(signature.shape, signature.dtype) for signature in found.arrays]
    return tuple(found.shape), found.dtype


def _example(kind: Any) -> Any:
    if isinstance(kind, list):
        return tuple(jax.ShapeDtypeStruct(*each) for each in kind)
    return jax.ShapeDtypeStruct(*kind)
