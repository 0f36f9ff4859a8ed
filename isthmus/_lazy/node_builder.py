"""A new key in lazy mode: how calls with that key become nodes.

The recording entry of an op (``_device/core/entry.py``) finds a *recipe* for the key of a call, as an eager entry finds
a plan. ``recording_entry`` makes that entry and, for a new key, the recipe: ``plan.build`` infers shapes, asks the CPU
for refusals and chooses a tier as ever, and hands its ``Builder`` to ``Recipe`` instead of compiling. For
``y = x.t() + 1`` the recipe of ``add`` is::

    reads    permute(%0, [1, 0]); %1            the view that x.t() is of its storage; the number
    call     aten.add.Tensor(%0, %1)
    fresh    []                                 the result is stored as it is

A call with a known key then looks up, or makes, one node, and puts it into the buffer of a new tensor (``_plain``) or
of its target (``_in_place``); calls with views, several results or checks take ``_general``.

What can go wrong: finding a recipe may run what was recorded (a decomposition that reads a value), so its inputs are
gone; the ``epoch`` of the trace shows it, and the call starts over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import jax
import torch
from torch import Tensor

from isthmus import _caches, config
from isthmus._device.core import donation
from isthmus._device.core.buffer import Buffer, Signature, buffer_of
from isthmus._device.core.dispatch import Kernel, kernels
from isthmus._device.core.entry import make_recording_entry
from isthmus._device.core.mutation import locator, restride_all
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
from isthmus._runtime import compiler, placement, tracebacks
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus._runtime.traced_results import shapes_with_extra
from isthmus._runtime.user_frames import user_line

Values = tuple[Any, ...]
# Recipes that one op may have; beyond that all are made anew.
_LIMIT = 4096
# Plain dicts, emptied in place: the recording entry of a kernel reads its dict for every op (``entry.py``).
_caches.register(
    "recipes of recorded ops",
    _LIMIT,
    lambda: max([len(kernel.recipes) for kernel in kernels()], default=0),
    lambda: _forget_recipes(),
)


def _forget_recipes() -> None:
    for kernel in kernels():
        kernel.recipes.clear()


def recording_entry(kernel: Kernel) -> Callable[..., Any]:
    """Return the function that records calls of a kernel's op."""

    def new_recipe(key: Any, inputs: list[Node], values: Values) -> Plan:
        epoch = trace.epoch
        # Abstract inputs: a recipe is made of types, never of the nodes at hand.
        examples = [jax.ShapeDtypeStruct(n.type.size, to_jax_dtype(n.type.dtype)) for n in inputs]
        finish = lambda builder: Recipe(builder, [n.type for n in inputs]).plan()  # noqa: E731
        if len(kernel.recipes) >= _LIMIT:  # shapes that never come back must not pile up
            kernel.recipes.clear()
        try:
            plan = build(kernel, examples, values, False, finish)
            if kernel.schema.mutated:
                plan = _beside_threads(plan, kernel, again)
            kernel.recipes[key] = plan
        except Exception as error:
            tracebacks.shorten(error)
            raise
        if trace.epoch == epoch:
            return plan
        # Finding the recipe ran what was recorded, so these inputs are gone: start over.
        return lambda _, values: again(values)

    def again(values: Values) -> Any:
        args, kwargs = kernel.schema.split(values)
        return entry(*args, **kwargs)

    names = {
        "_lock": trace.lock,
        "_trace": trace,
        "_Node": Node,
        "_new_plan": new_recipe,
        "_array_of": trace.array,
        # A slice's end is compiled in until it moves, for the pass that joins gradients of slices.
        "_number": trace.offset if kernel.functional in BACKWARDS else trace.number,
        "_offset_of": trace.offset,
        "_draw": trace.draw,
    }
    entry = make_recording_entry(kernel, names)
    return entry


def _beside_threads(plan: Plan, kernel: Kernel, again: Callable[[Values], Any]) -> Plan:
    """Return a plan that records a write; where another thread has written since the targets were read, ``again``.

    A program of another thread holds ``donation.lock`` from reading its targets until they are rebound, and so does
    this from looking at what was read until the targets hold nodes: of two writes none is lost.
    """
    locate = locator(kernel.op)

    def run(inputs: list[Node], values: Values) -> Any:
        if not donation.threaded():
            return plan(inputs, values)
        with donation.lock:
            if not any([_is_stale(buffer_of(target), inputs) for target in locate(values)]):
                return plan(inputs, values)
        return again(values)

    return run


def _is_stale(buffer: Buffer, inputs: list[Node]) -> bool:
    """Return whether a buffer that was read for these inputs holds another array by now."""
    at = trace.places.get(id(buffer))
    if at is None or type(buffer.held) is Node or trace.array_nodes[at] not in inputs:
        return False
    return trace.arrays[at] is not buffer.held


@dataclass(frozen=True)
class Read:
    """One input of the op's node: an input of the call, read by these calls, the last of which may take an offset."""

    at: int
    calls: tuple[Call, ...] = ()
    offset: int | None = None

    def __call__(self, inputs: list[Node]) -> Node:
        """Return the node of what is read."""
        value = chained(self.calls[:-1], inputs[self.at])
        if not self.calls:
            # The last call may take the offset as its second input.
            return value
        return node(self.calls[-1], value, *([] if self.offset is None else [inputs[self.offset]]))


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
        # A resized target has no old elements, so a storage of zeros stands for it.
        old = node(self.blank) if self.blank is not None else storage or inputs[self.at]
        offset = [] if self.offset is None else [inputs[self.offset]]
        return chained(after, node(write, chained(before, old), new, *offset))


class Recipe:
    """How calls of one key are recorded: reads, one op, stores and writes."""

    def __init__(self, builder: Builder, types: list[Type]) -> None:
        self.builder, self.types = builder, types
        self.reads: list[Read] = []
        # Traced, not compiled: shapes, dtypes, and whether lowerings check values.
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
        """Return the types of the tier's results, and whether it requires conditions on values."""
        builder = self.builder
        with compiler.scoped_x64(), collecting():
            _, facts = shapes_with_extra(builder.program, builder.examples)
        types = [None if r is None else Type(tuple(r.shape), to_torch_dtype(r.dtype)) for r in facts.computed]
        return types, bool(facts.errors)

    def _call(self, results: list[Type | None]) -> Call:
        builder = self.builder
        outs = {a.name for a in builder.schema.arguments if a.out}
        # ``out=`` targets are written afterwards, and placement is the device layer's business.
        skipped = outs | PLACEMENT
        arguments = {n: self._argument(slot) for n, slot in builder.slots.items() if n not in skipped}
        # A factory without a dtype takes torch's default one, which may be another when the graph runs.
        if arguments.get("dtype", 0) is None and not self.reads:
            arguments["dtype"] = results[0].dtype if results[0] is not None else None
        kernel = builder.kernel
        if kernel.random:
            # The draw is the last input of the call, as the entry appends it.
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
        # A resized target: nothing of the old storage is read.
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
            # Factories with a mesh say themselves how the result is split.
            made_of_nothing = not any(map(_has_tensor, self.builder.slots.values()))
            if made_of_nothing or is_made_like(self.builder.op):
                return _placing(self._general(), not made_of_nothing)
        plain = self._is_plain()
        single = len(self.call.types) == 1 and not self.checked
        # The cases of nearly all ops, each as a closure with nothing to decide.
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
        # Any of these needs more than handing the result to the buffer.
        if write.shaped or write.whole or write.whole is None or any(mutation.resized):
            return None
        call, locate, returns = self.call, mutation.locate, len(schema_of(self.builder.op).returns)

        def run(inputs: list[Node], values: Values) -> Any:
            key = (call, *inputs)
            # The table first: in the second step every node is there.
            result = TABLE.get(key) or node(call, *inputs)
            (target,) = locate(values)
            trace.hold(target.untyped_storage()._buffer, result)  # type: ignore[attr-defined]
            trace.size += 1
            if config.current.lines == "on":
                trace.lines.setdefault(result, user_line())
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
            result = node(call, *(inputs if reads is None else [read(inputs) for read in reads]))
            trace.size += 1
            if checked or config.current.lines == "on":
                trace.lines.setdefault(result, user_line())
            results = result.results or (result,)
            make = iter(makers)
            fresh = [
                next(make)(r) if r and there else None for r, there in zip(results, present, strict=False)
            ]
            if assemble is not None:
                return assemble(fresh)
            assert write is not None
            targets = write(results[count:], inputs, values)
            if count:
                tensors = [tensor for tensor in fresh if tensor is not None]
                return tensors[0] if returns == 1 else tuple(tensors)
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
                # ``hold`` keeps the node that the buffer had first, for the case that the program fails.
                trace.hold(targets[group].untyped_storage()._buffer, written[group])  # type: ignore[attr-defined]
            if restrided:
                for group in order:
                    spec = specs[group]
                    if spec is not None:
                        # A new size is a new signature, which later ops key on.
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
    # OPEN: XLA says how it splits the result when the program has been compiled.
    sharding = None if placement.home is None else placement.OPEN
    return Signature.intern(
        storage_shape(spec.size, spec.stride), to_jax_dtype(spec.dtype), sharding=sharding
    )


def maker(spec: Spec, calls: list[Call]) -> Callable[[Node], Tensor]:
    """Return a function that makes tensors of this spec on new storages, of a result that these calls lay out."""
    size, stride, dtype = spec.size, spec.stride, spec.dtype
    signature, contiguous = signature_of(spec), is_as_made(size, stride)

    def make(result: Node) -> Tensor:
        tensor = empty_tensor(size, dtype)
        if not contiguous:
            tensor = restride(tensor, size, stride)
        buffer = Buffer(chained(calls, result), signature)
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
        result = TABLE.get(key) or node(call, *inputs)
        trace.size += 1
        if config.current.lines == "on":
            trace.lines.setdefault(result, user_line())
        tensor = empty_tensor(size, dtype)
        buffer = tensor.untyped_storage()._buffer = Buffer(result, signature)  # type: ignore[attr-defined]
        buffer.recorder = trace.owner
        trace.pending.append(ref(buffer))
        return tensor

    return run
