"""A graph as programs: one executable for each set of sizes its arguments come in, run on the tensors' own buffers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from isthmus._device import checks, mode
from isthmus._device.entry import alias_pattern, static_part
from isthmus._device.hosts import copied
from isthmus._device.plan import Slot, Static, TensorSlot, slot_for
from isthmus._device.strided import read
from isthmus._dynamo import crossing, record
from isthmus._dynamo.evaluate import Evaluation
from isthmus._dynamo.layout import Symbols
from isthmus._dynamo.options import Options
from isthmus._dynamo.random import NO_WORDS, Draw
from isthmus._dynamo.returns import Returns
from isthmus._graph.layout import span
from isthmus._ops.checks import collecting
from isthmus._ops.reinterpret import reinterpret
from isthmus._runtime import compiler
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus._runtime.hosts import device_number
from isthmus.errors import Unsupported

# A value only its buffer holds is counted there, in the list of inputs and as an argument of getrefcount. One that
# somebody else holds too is copied before its memory is given away.
_OWNED = 3
_aten = torch.ops.aten
Plan = Callable[[list[Any], list[Any]], list[Any]]


class Program:
    """A graph whose every node is lowered, as a callable of torch tensors."""

    def __init__(self, module: GraphModule, options: Options, name: str) -> None:
        self.module, self.options, self.name = module, options, name
        nodes = list(module.graph.nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.draw = next((node.target for node in nodes if isinstance(node.target, Draw)), None)
        targets = [node.args[0] for node in nodes if node.target is _aten.copy_.default]
        self.targets = [self.placeholders.index(node) for node in dict.fromkeys(targets)]
        self.plans: OrderedDict[Any, Plan] = OrderedDict()

    def __call__(self, args: list[Any]) -> Any:
        """Run one call; ``args`` is emptied."""
        key, inputs = _gather(args)
        if len(self.targets) > 1:
            key.append(alias_pattern(tuple([args[at] for at in self.targets])))
        found = tuple(key)
        plan = self.plans.get(found)
        if plan is None:
            plan = self._new_plan(found, args, inputs)
        elif len(self.plans) > 1:
            self.plans.move_to_end(found)
        if self.draw is not None:
            inputs.append(self.draw.words())
        return plan(args, inputs)

    def _new_plan(self, key: Any, args: list[Any], inputs: list[Any]) -> Plan:
        words = [NO_WORDS] if self.draw is not None else []
        plan = self.plans[key] = Specialization(self, args, [*inputs, *words]).plan()
        if len(self.plans) > self.options.programs:
            self.plans.popitem(last=False)
        return plan


def _gather(args: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return what a program is compiled for, and its inputs: an array for each tensor, an offset where it has one."""
    key: list[Any] = []
    inputs: list[Any] = []
    if mode.current.lazy:
        mode.current.materialise()
    for arg in args:
        if isinstance(arg, Tensor):
            try:
                buffer = arg.untyped_storage()._buffer  # type: ignore[attr-defined]
            except AttributeError:
                inputs.append(crossing.arrive(arg))
                key.append((arg.device, arg.dtype, arg.shape, arg.stride()))
                continue
            offset = arg.storage_offset()
            key.append((buffer.signature, arg.dtype, arg.shape, arg.stride(), offset != 0))
            inputs.append(buffer.held)
            if offset:
                inputs.append(device_number(offset))
        else:
            key.append(static_part(arg))
    return key, inputs


class Specialization:
    """A program for arguments of given sizes; it keeps none of them."""

    def __init__(self, program: Program, args: list[Any], inputs: list[Any]) -> None:
        self.program = program
        index = iter(range(len(inputs)))
        self.slots = [_slot(arg, index) for arg in args]
        self.symbols = Symbols(program.placeholders, args)
        self.conditions = checks.Conditions()
        self.examples = [compiler.abstract(value) for value in [*inputs, self.conditions.before()]]
        self.local = [isinstance(a, Tensor) and a.device.type == "jax" for a in args]
        # Targets on one storage are written one after another; each group of them is one output. A tensor of another
        # device arrives as an array of its own.
        storages = [args[at].untyped_storage()._cdata if self.local[at] else (at,) for at in program.targets]
        self.groups = [storages.index(storage) for storage in storages]
        self.order = list(dict.fromkeys(self.groups))
        self.returns = Returns(program.module, program.placeholders, args, self.symbols)

    def compute(self, *given: Any) -> tuple[Any, ...]:
        """Compute rewritten storages, new storages, then which condition of a lowering failed first."""
        program = self.program
        *inputs, before = given
        words = inputs[-1] if program.draw is not None else None
        run = Evaluation(program.module, self.symbols, words, self._storages(inputs))
        with collecting() as found:
            run.run([_fill(slot, inputs) for slot in self.slots])
        self.conditions.errors = found.errors
        failed = [found.first_failed(before)] if found.errors else []
        # Rewritten storages come first: XLA gives donated memory to the first result that fits it.
        return (*self._written(run.written, inputs), *self.returns.arrays(run.values), *failed)

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

    def plan(self) -> Plan:
        """Return how a call runs: compute, rebind what is written, wrap what is new."""
        targets = [self.program.targets[group] for group in self.order]
        indices = [slot.index for slot in [self.slots[at] for at in targets] if isinstance(slot, TensorSlot)]
        here = all(self.local[at] for at in targets)
        donated = tuple(indices) if here and self.program.options.donate == "auto" else ()
        call = record.compile(self, donated)
        written, wrap = len(targets), self.returns.wrapper()
        rebind = _rebinder(targets, [self.slots[at] for at in targets], here)
        conditions = self.conditions
        auto, checked = checks.auto(), bool(conditions.errors)
        foreign = not all(
            here for here, slot in zip(self.local, self.slots, strict=True) if isinstance(slot, TensorSlot)
        )

        def run(args: list[Any], inputs: list[Any]) -> list[Any]:
            for index in donated:
                if getrefcount(inputs[index]) != _OWNED:
                    inputs[index] = copied(inputs[index])
            outputs = call(*inputs, conditions.before())
            inputs.clear()
            if foreign:
                for output in outputs:
                    output.block_until_ready()
            if written:
                rebind(args, outputs)
            result = wrap(args, outputs[written:] if written else outputs)
            args.clear()
            if checked:
                conditions.settle(outputs[-1], auto)
            return result

        return run


def _slot(arg: Any, index: Iterator[int]) -> Slot:
    return slot_for(arg, False, index) if isinstance(arg, Tensor) else Static(arg)


def _fill(slot: Slot, inputs: Sequence[Any]) -> Any:
    return slot.read(inputs) if isinstance(slot, TensorSlot) else slot.value  # type: ignore[union-attr]


def _rebinder(places: list[int], slots: list[Any], here: bool) -> Callable[[list[Any], Sequence[Any]], None]:
    """Return the function that gives written arguments their new contents."""

    def rebind(args: list[Any], outputs: Sequence[Any]) -> None:
        targets = [args[at] for at in places]
        for target, value in zip(targets, outputs, strict=False):
            target.untyped_storage()._buffer.held = value  # type: ignore[attr-defined]
        if not targets[0].is_inference():
            torch.autograd.graph.increment_version(targets)

    def copy_back(args: list[Any], outputs: Sequence[Any]) -> None:
        for at, slot, value in zip(places, slots, outputs, strict=False):
            target = args[at]
            if target.device.type == "jax":
                target.untyped_storage()._buffer.held = value
                torch.autograd.graph.increment_version(target)
                continue
            with torch.no_grad():
                target.copy_(crossing.depart(value, slot.spec.size, slot.spec.stride, target.device))

    return rebind if here else copy_back
