"""A new key: how calls like this one become nodes. Shapes, dtypes and errors are found here, once per key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import jax
import torch
from torch import Tensor

from isthmus import config
from isthmus._device.core.buffer import Buffer, Signature, buffer_of
from isthmus._device.core.dispatch import Kernel
from isthmus._device.core.entry import make_recording_entry
from isthmus._device.core.mutation import restride_all
from isthmus._device.core.plan import Builder, Plan, build, is_made_like, only
from isthmus._device.core.slots import NumberSlot, Slot, Static, TensorSlot
from isthmus._device.torch_glue.private import empty_tensor, restride
from isthmus._graph import view_calls
from isthmus._graph.layout import Spec, is_as_made, storage_shape
from isthmus._graph.nodes import TABLE, Call, Input, Node, Type, call_of, node
from isthmus._graph.passes.slice_gradients import BACKWARDS
from isthmus._graph.schema import PLACEMENT, schema_of
from isthmus._graph.view_calls import chained
from isthmus._lazy.trace import trace
from isthmus._ops.value_checks import collecting
from isthmus._runtime import compiler, placement
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus._runtime.traced_results import shapes_with_extra
from isthmus._runtime.user_frames import user_line

Values = tuple[Any, ...]
_LIMIT = 4096


def recording_entry(kernel: Kernel) -> Callable[..., Any]:
    """Return the function that records calls of a kernel's op."""

    def new_recipe(key: Any, inputs: list[Node], values: Values) -> Plan:
        epoch = trace.epoch
        examples = [jax.ShapeDtypeStruct(n.type.size, to_jax_dtype(n.type.dtype)) for n in inputs]
        finish = lambda builder: Recipe(builder, [n.type for n in inputs]).plan()  # noqa: E731
        if len(kernel.recipes) >= _LIMIT:  # shapes that never come back must not pile up
            kernel.recipes.clear()
        plan = kernel.recipes[key] = build(kernel, examples, values, False, finish)
        if trace.epoch == epoch:
            return plan
        # Finding the recipe ran what was recorded, so these inputs are gone: start over.
        args, kwargs = kernel.schema.split(values)
        return lambda _, __: entry(*args, **kwargs)

    names = {
        "_lock": trace.lock,
        "_trace": trace,
        "_Node": Node,
        "_new_plan": new_recipe,
        "_array_of": trace.array,
        "_number": _slice_end if kernel.functional in BACKWARDS else trace.number,
        "_offset_of": trace.offset,
        "_draw": trace.draw,
    }
    entry = make_recording_entry(kernel, names)
    return entry


def _slice_end(value: int) -> Node:
    """Return a leaf for where a slice starts or ends: compiled in until it changes, so that passes can look at it.

    Programs for a range of sizes take it as a number: it changes with the sizes.
    """
    return trace.offset(value) if config.current.shapes == "exact" else trace.number(value)


@dataclass(frozen=True)
class Read:
    """One input of the op's node: an input of the call, read by these calls, the last of which may take an offset."""

    at: int
    calls: tuple[Call, ...] = ()
    offset: int | None = None

    def __call__(self, inputs: list[Node]) -> Node:
        """Return the node of what is read."""
        found = chained(self.calls[:-1], inputs[self.at])
        if not self.calls:
            return found
        return node(self.calls[-1], found, *([] if self.offset is None else [inputs[self.offset]]))


@dataclass(frozen=True)
class Write:
    """How a result becomes the new value of a storage."""

    shaped: list[Call]  # cast and expanded to what the target shows
    whole: list[Call] | None  # the storage, if nothing of the old one remains
    parts: tuple[list[Call], Call, list[Call]] | None
    at: int
    offset: int | None
    blank: Call | None = None

    def __call__(self, new: Node, storage: Node | None, inputs: list[Node]) -> Node:
        """Return the new value; ``storage`` is what an earlier write of the same call left."""
        new = chained(self.shaped, new)
        if self.whole is not None:
            return chained(self.whole, new)
        assert self.parts is not None
        before, write, after = self.parts
        old = node(self.blank) if self.blank is not None else storage or inputs[self.at]
        offset = [] if self.offset is None else [inputs[self.offset]]
        return chained(after, node(write, chained(before, old), new, *offset))


class Recipe:
    """How calls of one key are recorded: reads, one op, stores and writes."""

    def __init__(self, builder: Builder, types: list[Type]) -> None:
        self.builder, self.types = builder, types
        self.reads: list[Read] = []
        results, self.checked = self._infer()
        self.call = self._call(results)
        count = len(builder.fresh)
        self.fresh = [
            self._store(result, spec)
            for result, spec in zip(results[:count], builder.fresh, strict=True)
            if spec is not None
        ]
        self.writes = self._writes(results[count:]) if builder.mutation is not None else []

    def _infer(self) -> tuple[list[Type | None], bool]:
        """Return what the tier computes, and whether it requires conditions on values."""
        builder = self.builder
        with compiler.scoped_x64(), collecting():
            _, facts = shapes_with_extra(builder.program, builder.examples)
        types = [None if r is None else Type(tuple(r.shape), to_torch_dtype(r.dtype)) for r in facts.computed]
        return types, bool(facts.errors)

    def _call(self, results: list[Type | None]) -> Call:
        builder = self.builder
        outs = {a.name for a in builder.schema.arguments if a.out}
        skipped = outs | PLACEMENT
        arguments = {n: self._argument(slot) for n, slot in builder.slots.items() if n not in skipped}
        if arguments.get("dtype", 0) is None and not self.reads:
            arguments["dtype"] = results[0].dtype if results[0] is not None else None
        kernel = builder.kernel
        if kernel.random:
            self.reads.append(Read(len(self.types) - 1))
        precision = torch.get_float32_matmul_precision() if kernel.matmul else None
        context = (torch.get_default_dtype(), precision)
        return call_of(kernel.functional, arguments, results, context=context, random=kernel.random)

    def _argument(self, slot: Slot) -> Any:
        if isinstance(slot, list):
            return tuple(self._argument(item) for item in slot)
        if isinstance(slot, Static):
            return slot.value
        if isinstance(slot, NumberSlot):
            self.reads.append(Read(slot.index))
        else:
            calls = view_calls.read(self.types[slot.index], slot.spec, slot.offset_index is not None)
            self.reads.append(Read(slot.index, tuple(calls), slot.offset_index))
        return Input(len(self.reads) - 1)

    def _store(self, result: Type | None, spec: Spec) -> tuple[Spec, list[Call]]:
        assert result == Type(spec.size, spec.dtype)
        return spec, view_calls.store(spec)

    def _writes(self, results: list[Type | None]) -> list[tuple[int, Write]]:
        mutation = self.builder.mutation
        assert mutation is not None
        rows = zip(mutation.groups, mutation.resized, mutation.slots, results, strict=True)
        return [(group, self._write(spec, slot, result)) for group, spec, slot, result in rows]

    def _write(self, resized: Spec | None, slot: TensorSlot, result: Type | None) -> Write:
        assert result is not None
        spec = resized or slot.spec
        if resized is not None:
            storage = Type(storage_shape(spec.size, spec.stride), spec.dtype)
            blank = view_calls.blank(spec)
        else:
            storage, blank = self.types[slot.index], None
        shaped = view_calls.shaped(result, storage, spec)
        offset = None if resized is not None else slot.offset_index
        whole = view_calls.replaces(storage, spec, offset is not None)
        parts = None if whole is not None else view_calls.scatter(storage, spec, offset is not None)
        return Write(shaped, whole, parts, slot.index, offset, blank)

    def plan(self) -> Plan:
        """Return how a call is recorded."""
        if placement.home is not None and self.builder.mutation is None:
            made_of_nothing = not any(map(_has_tensor, self.builder.slots.values()))
            if made_of_nothing or is_made_like(self.builder.op):
                return _placing(self._general(), not made_of_nothing)
        plain = self._is_plain()
        single = len(self.call.types) == 1 and not self.checked
        if plain and single and self.builder.mutation is None and self.builder.assembler() is only:
            spec, _ = self.fresh[0]
            if is_as_made(spec.size, spec.stride):
                return _plain(self.call, spec)
        if plain and single and len(self.writes) == 1 and not self.fresh:
            return self._in_place() or self._general()
        return self._general()

    def _is_plain(self) -> bool:
        """Return whether the op reads the inputs of the call as they are."""
        return [read.at for read in self.reads] == list(range(len(self.types))) and not any(
            read.calls for read in self.reads
        )

    def _in_place(self) -> Plan | None:
        """Return the short way to record a write that replaces all of one storage."""
        mutation = self.builder.mutation
        assert mutation is not None
        _, write = self.writes[0]
        if write.shaped or write.whole or write.whole is None or any(mutation.resized):
            return None
        call, locate, returns = self.call, mutation.locate, len(schema_of(self.builder.op).returns)

        def run(inputs: list[Node], values: Values) -> Any:
            key = (call, *inputs)
            found = TABLE.get(key) or node(call, *inputs)
            (target,) = locate(values)
            trace.hold(target.untyped_storage()._buffer, found)  # type: ignore[attr-defined]
            trace.size += 1
            if config.current.lines == "on":
                trace.lines.setdefault(found, user_line())
            return target if returns else None

        return run

    def _general(self) -> Plan:
        call, checked = self.call, self.checked
        reads = None if self._is_plain() else self.reads
        makers = [maker(spec, calls) for spec, calls in self.fresh]
        present = [spec is not None for spec in self.builder.fresh]
        count = len(present)
        write = self._writer() if self.writes else None
        mutation = self.builder.mutation
        assemble = self.builder.assembler() if mutation is None else None
        returns = len(schema_of(self.builder.op).returns)

        def run(inputs: list[Node], values: Values) -> Any:
            found = node(call, *(inputs if reads is None else [read(inputs) for read in reads]))
            trace.size += 1
            if checked or config.current.lines == "on":
                trace.lines.setdefault(found, user_line())
            results = found.results or (found,)
            make = iter(makers)
            fresh = [
                next(make)(r) if r and there else None for r, there in zip(results, present, strict=False)
            ]
            if assemble is not None:
                return assemble(fresh)
            assert write is not None
            targets = write(results[count:], inputs, values)
            if count:
                kept = [tensor for tensor in fresh if tensor is not None]
                return kept[0] if returns == 1 else tuple(kept)
            return None if returns == 0 else targets[0] if returns == 1 else tuple(targets)

        return run

    def _writer(self) -> Callable[[Any, list[Node], Values], list[Tensor]]:
        mutation = self.builder.mutation
        assert mutation is not None
        order, resized, locate = mutation.order, mutation.resized, mutation.locate
        restrided = any(resized)
        # None where the result is the storage's new value as it is.
        writes = [(g, step if step.shaped or step.whole or step.parts else None) for g, step in self.writes]
        specs = dict(zip(mutation.groups, resized, strict=True))

        def write(results: Any, inputs: list[Node], values: Values) -> list[Tensor]:
            targets = locate(values)
            written: dict[int, Node] = {}
            for (group, step), result in zip(writes, results, strict=True):
                written[group] = step(result, written.get(group), inputs) if step else result
            for group in order:
                trace.hold(targets[group].untyped_storage()._buffer, written[group])  # type: ignore[attr-defined]
            if restrided:
                for group in order:
                    spec = specs[group]
                    if spec is not None:
                        targets[group].untyped_storage()._buffer.signature = signature_of(spec)  # type: ignore[attr-defined]
                restride_all(targets, resized)
            return targets

        return write


def _has_tensor(slot: Slot) -> bool:
    return any(map(_has_tensor, slot)) if isinstance(slot, list) else isinstance(slot, TensorSlot)


def _placing(plan: Plan, follows: bool) -> Plan:
    """Return the plan of a factory, with a mesh: ``zeros`` is at home, ``full_like`` split as the tensor it is like."""

    def run(inputs: list[Node], values: Values) -> Any:
        tensor = plan(inputs, values)
        if isinstance(tensor, Tensor):
            buffer = buffer_of(tensor)
            mine, its = buffer.signature, buffer_of(values[0]).signature if follows else None
            sharding = its.sharding if its is not None and its.shape == mine.shape else None
            buffer.signature = Signature.intern(mine.shape, mine.dtype, sharding=sharding)
        return tensor

    return run


def signature_of(spec: Spec) -> Signature:
    """Return the signature of a new storage for this spec; with a mesh XLA chooses how it is split."""
    sharding = None if placement.home is None else placement.OPEN
    return Signature.intern(
        storage_shape(spec.size, spec.stride), to_jax_dtype(spec.dtype), sharding=sharding
    )


def maker(spec: Spec, calls: list[Call]) -> Callable[[Node], Tensor]:
    """Return a function that makes tensors of this spec on new storages, of a result that these calls lay out."""
    size, stride, dtype = spec.size, spec.stride, spec.dtype
    signature, contiguous = signature_of(spec), is_as_made(size, stride)

    def make(found: Node) -> Tensor:
        tensor = empty_tensor(size, dtype)
        if not contiguous:
            tensor = restride(tensor, size, stride)
        buffer = Buffer(chained(calls, found), signature)
        buffer.recorder = trace.owner
        tensor.untyped_storage()._buffer = buffer  # type: ignore[attr-defined]
        trace.pending.append(ref(buffer))
        return tensor

    return make


def _plain(call: Call, spec: Spec) -> Plan:
    """Return how an op with one contiguous result is recorded: the shortest path there is."""
    size, dtype, signature = spec.size, spec.dtype, signature_of(spec)

    def run(inputs: list[Node], values: Values) -> Tensor:
        # What the maker does, written out: this runs for nearly every op.
        key = (call, *inputs)
        found = TABLE.get(key) or node(call, *inputs)
        trace.size += 1
        if config.current.lines == "on":
            trace.lines.setdefault(found, user_line())
        tensor = empty_tensor(size, dtype)
        buffer = tensor.untyped_storage()._buffer = Buffer(found, signature)  # type: ignore[attr-defined]
        buffer.recorder = trace.owner
        trace.pending.append(ref(buffer))
        return tensor

    return run
