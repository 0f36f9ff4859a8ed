"""Mutation rebinds a buffer: in-place and ``out=`` calls compute functionally, then their storages get new values.

JAX arrays never change, so ``x[1].add_(y)`` is a program that takes x's whole storage, computes ``x[1] + y`` by the
lowering of ``aten.add``, writes it through the view's strides, and returns the new storage; x's buffer is then bound to
it. ``Mutation`` holds what is special about such calls, ``plan.Builder`` the rest. Targets on one storage (two
views in one ``_foreach_add_``) are written one after the other and are one output: a *group*.

Where only the buffer holds the old array, it is donated, so that nothing is copied (``donation.py``). Programs are
compiled at most twice, with donation and without (``DonationVariants``).

An ``out=`` of another size is resized. Where it is all of its storage, as ``torch.empty(0)`` is, the result is the new
storage. Where it is a view, or the storage is longer than the result, the rest of the storage stays: the target gets
its new layout first, on a storage that grows if it must, and the call runs again (``preparing``). How long the storage
has to be depends on where the view begins, which is no part of the key, so one program could not do both. A storage of
booleans that is written to as bytes becomes one of bytes in the same way.

What can go wrong: an exception between the run and the binding of its results, and other threads, both of which
``donation.run`` handles; a value check that fails, after which the targets must be as before, so such programs donate
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isthmus import config
from isthmus._device.checks import value_checks
from isthmus._device.core import donation
from isthmus._device.core.buffer import Buffer, Lost, buffer_of, maker
from isthmus._device.core.slots import Slot, TensorSlot, store
from isthmus._device.core.views import holds_booleans, resize_on_storage, store_bytes
from isthmus._device.torch_glue.private import become, restride
from isthmus._graph.layout import Spec, is_dense, span
from isthmus._graph.nodes import Node
from isthmus._graph.private import OpOverload, storage_ids
from isthmus._graph.schema import schema_of
from isthmus._ops.common import cast
from isthmus._ops.value_checks import Error
from isthmus._runtime import memory, placement
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus._runtime.traced_results import compile_with_extra
from isthmus.errors import LoweringError

if TYPE_CHECKING:
    from isthmus._device.core.dispatch import Kernel
    from isthmus._device.core.plan import Builder, Plan


# What no program takes as the array of a target: it is computed, given back or refused first.
_NOT_ARRAYS = frozenset({Node, Lost, *donation.MARKERS})


class Mutation:
    """The targets of a call that writes: which of them share a storage, which are resized.

    ``inferred`` is the answer of ``inference.infer``, or None where torch has no Meta kernel.
    """

    def __init__(
        self,
        op: OpOverload,
        slots: dict[str, Slot],
        values: tuple[Any, ...],
        inferred: tuple[Any, tuple[Any, ...]] | None,
    ) -> None:
        self.op, self.locate = op, locator(op)
        targets = self.locate(values)
        self.slots = [slot for name in schema_of(op).mutated for slot in _tensor_slots(slots[name])]
        storages = storage_ids(targets)
        # Targets on one storage are written one after another; each group of them is one output.
        self.groups = [storages.index(storage) for storage in storages]
        # Outputs are in the order in which storages first occur among the targets.
        self.order = list(dict.fromkeys(self.groups))
        # On Meta the call was made, so its targets have the sizes that torch gives them.
        after = targets if inferred is None else self.locate(inferred[1])
        pairs = zip(after, targets, strict=True)
        self.resized = [None if new.shape == old.shape else Spec.of(new) for new, old in pairs]
        # By identity: an argument that is both read and an ``out=`` target is one tensor.
        read = {id(v) for v, a in zip(values, schema_of(op).arguments, strict=True) if not a.out}
        reread = any(spec and id(target) in read for spec, target in zip(self.resized, targets, strict=True))
        if reread or (any(self.resized) and not schema_of(op).has_out):
            # Some Meta kernels resize what is also read, which torch refuses: the CPU will say so.
            raise LoweringError(f"{op} would resize the tensor it writes to")
        self.storages = [buffer_of(target).signature for target in targets]
        self.booleans = [holds_booleans(target) for target in targets]
        self.repeated = len({id(target) for target in targets}) < len(targets)

    def resize(self, specs: Sequence[Spec | None]) -> None:
        """Give the targets of an ``out=`` form the sizes of what is computed; torch could not infer them."""
        if len(specs) == len(self.slots):
            pairs = [(spec, slot.spec) for spec, slot in zip(specs, self.slots, strict=True)]
            self.resized = [
                None if new is None or new.size == old.size else replace(new, dtype=old.dtype)
                for new, old in pairs
            ]

    def lay_out(self, specs: Sequence[Spec | None]) -> None:
        """Give resized targets these strides: Meta kernels resize to rows."""
        if len(specs) == len(self.resized):
            self.resized = [
                replace(old, stride=new.stride) if old and new and new.size == old.size else old
                for old, new in zip(self.resized, specs, strict=True)
            ]

    @property
    def needs_preparation(self) -> bool:
        """Whether a target's storage must change before the call is made."""
        if any(self.keeps) and self.repeated:
            # One tensor cannot have the sizes of two results: the CPU writes the one after the other.
            raise LoweringError(f"{self.op} would resize a tensor that it writes to twice")
        return any(self.keeps) or any(self.booleans)

    @property
    def keeps(self) -> list[bool]:
        """Which targets are resized on a storage that keeps some of its elements."""
        return [
            # A resized target is made anew unless something of its storage must stay: another target on it, a
            # view with an offset, a storage that is longer than the result or full of gaps.
            spec is not None
            and (
                len(self.order) < len(self.groups)
                or slot.offset_index is not None
                or storage.shrunk
                or storage.nbytes > span(spec.size, spec.stride) * spec.dtype.itemsize
                or not is_dense(spec.size, spec.stride)
            )
            for spec, slot, storage in zip(self.resized, self.slots, self.storages, strict=True)
        ]

    def preparing(self, kernel: Kernel) -> Plan:
        """Return how a call runs that first changes the storages of its targets; then it is made again."""
        resized = [spec if any(self.keeps) else None for spec in self.resized]
        booleans, locate = self.booleans, self.locate

        def run(_: list[Any], values: tuple[Any, ...]) -> Any:
            # Another target on the same storage may have changed it a moment ago.
            for target, spec, boolean in zip(locate(values), resized, booleans, strict=True):
                if boolean and holds_booleans(target):
                    store_bytes(target)
                if spec is not None:
                    resize_on_storage(target, spec.size, spec.stride)
            # The call again, with a key of its own by now: its targets have the sizes that they need.
            args, kwargs = kernel.schema.split(values)
            return kernel.entry(*args, **kwargs)

        return run

    def write(self, results: Sequence[Any], inputs: Sequence[Any], traced: bool) -> list[Any]:
        """Return the new value of each storage that is written to; in a trace JAX may want its derivative."""
        # ``zip`` below would drop results without a word.
        if len(results) != len(self.slots):
            raise LoweringError(
                f"the lowering of {self.op} gave {len(results)} results for {len(self.slots)} targets"
            )
        written: dict[int, Any] = {}
        for group, spec, slot, new in zip(self.groups, self.resized, self.slots, results, strict=True):
            self._check_cast(new, slot.spec.dtype)
            if spec is not None:
                written[group] = store(cast(new, to_jax_dtype(spec.dtype)), spec, self.op)
            else:
                # A second target on one storage starts from what the first one wrote.
                written[group] = slot.write(written.get(group, inputs[slot.index]), inputs, new, traced)
        return [written[group] for group in self.order]

    def stay(self, written: Sequence[Any], examples: Sequence[Any]) -> list[Any]:
        """Return written storages split as they were: else XLA might choose another way, and donation would end.

        A storage that is resized is at home.
        """
        before = [examples[self.slots[group].index] for group in self.order]
        same = [None if w.shape != b.shape else b.sharding for w, b in zip(written, before, strict=True)]
        return [placement.constrain(w, sharding) for w, sharding in zip(written, same, strict=True)]

    def _check_cast(self, new: Any, dtype: torch.dtype) -> None:
        # Not every Meta kernel asks; raising here sends the call to the CPU, which refuses it in its words.
        computed = to_torch_dtype(new.dtype)
        if not torch.can_cast(computed, dtype):
            raise LoweringError(f"result type {computed} can't be cast to the desired output type {dtype}")

    def plan(self, builder: Builder, specs: list[Spec], inputs: list[Any]) -> Plan:
        """Return how a call runs: compute, rebind the storages, resize what must be."""
        places = tuple(self.slots[group].index for group in self.order)
        # The first variant is compiled here, with the inputs of the first call.
        variants = DonationVariants(builder, places, any(self.resized), inputs)
        conditions = value_checks.Conditions(variants.errors)
        shardings = variants.shardings or [None] * len(specs)
        makers = [maker(spec, builder.traced, s) for spec, s in zip(specs, shardings, strict=False)]
        count, order, resized, locate = len(specs), self.order, self.resized, self.locate
        returns = len(schema_of(self.op).returns)
        restrided = any(resized)
        # With either, ``bind`` must renew the signature: ``held`` alone would not do.
        # A resized buffer has another signature; tracers have signatures of their own.
        resigned = restrided or builder.traced

        def settle(outputs: Sequence[Any]) -> None:
            conditions.settle_call(outputs[count + len(order)])

        check = settle if conditions.errors else None

        def run(inputs: list[Any], values: tuple[Any, ...]) -> Any:
            targets = locate(values)
            buffers = [buffer_of(targets[group]) for group in order]

            # Fresh results come first among the outputs, written storages after them.
            def commit(outputs: Sequence[Any]) -> Sequence[Any]:
                for buffer, value in zip(buffers, outputs[count:], strict=False):
                    if resigned:
                        buffer.rebind(value)
                    else:
                        buffer.held = value
                return outputs

            # Tracers belong to this thread, which may hold the compiler's lock.
            if builder.traced or not donation.threaded():
                outputs = donation.run(variants.choose(inputs), inputs, commit, check=check)
            else:
                outputs = _beside_threads(variants, inputs, buffers, places, commit, check)
            if restrided:
                # After the run: until then the tensor must look as it was, in case the run fails.
                restride_all(targets, resized)
            if count:
                fresh = [make(o) for make, o in zip(makers, outputs, strict=False)]
                return fresh[0] if returns == 1 else tuple(fresh)
            return None if returns == 0 else targets[0] if returns == 1 else tuple(targets)

        # Nearly every in-place op: no new results, nothing resized, no value to check.
        if count or resigned or check is not None:
            return run
        return _alone(variants, locate, order, returns, run)


def _alone(
    variants: DonationVariants,
    locate: Callable[[tuple[Any, ...]], list[Tensor]],
    order: Sequence[int],
    returns: int,
    longer: Plan,
) -> Plan:
    """Return ``longer`` for a process of one thread: itself and ``donation.run`` written out, for most calls."""

    def bind(targets: list[Tensor], outputs: Sequence[Any]) -> None:
        for group, value in zip(order, outputs, strict=False):
            buffer_of(targets[group]).held = value

    def run(inputs: list[Any], values: tuple[Any, ...]) -> Any:
        # Another thread started after the plan was made: the longer way, which takes the lock.
        if donation.threaded():
            return longer(inputs, values)
        targets = locate(values)
        # starmap and unpacking, so that no signal handler runs between the call and ``outputs``: see donation.py.
        call, outputs = variants.choose(inputs), None
        try:
            (outputs,) = starmap(call, (inputs,))
            for group, value in zip(order, outputs, strict=False):
                # ``buffer_of`` written out: a fused optimizer writes to hundreds of targets, all known to be ours.
                targets[group].untyped_storage()._buffer.held = value  # type: ignore[attr-defined]
        except BaseException as error:
            if outputs is not None:
                donation.finish(partial(bind, targets, outputs))
            # ``donation.run`` inside ``longer`` drops what is not needed, and tries once more.
            elif memory.is_exhausted(error):
                return longer(inputs, values)
            raise
        return None if returns == 0 else targets[0] if returns == 1 else tuple(targets)

    return run


def _beside_threads(
    variants: DonationVariants,
    inputs: list[Any],
    buffers: Sequence[Buffer],
    places: Sequence[int],
    commit: Callable[[Sequence[Any]], Sequence[Any]],
    check: Callable[[Sequence[Any]], None] | None,
) -> Sequence[Any]:
    """Run a call while other threads exist: from reading its targets to rebinding them, no other thread writes."""
    show = partial(donation.show, buffers, inputs, places)
    while True:
        with donation.lock:
            try:
                donation.hide(buffers, inputs, places)
                owned = variants.donates(inputs, hidden=True)
                ready = not any([type(inputs[index]) in _NOT_ARRAYS for index in places])
            except BaseException:
                show()
                raise
            # Compiled once per answer, and not under this lock.
            call = variants.calls.get(owned)
            if call is not None and ready:
                return donation.run(call, inputs, commit, show, check)
            show()
        # Compiling takes seconds and a lock of its own, and so does running what another thread recorded.
        # Not under the lock: reading may wait for a thread that wants it.
        for index, buffer in zip(places, buffers, strict=True):
            inputs[index] = buffer.value
        if call is None:
            variants.compile(owned)


class DonationVariants:
    """One program compiled at most twice: with its targets' memory donated, and without."""

    def __init__(self, builder: Builder, donated: tuple[int, ...], resized: bool, inputs: list[Any]) -> None:
        # A resized storage is another size, so its memory is of no use; a tracer's is not ours to give.
        self.builder, self.donated, self.fixed = builder, donated, resized or builder.traced
        self.calls: dict[bool, Callable[..., Any]] = {}
        # Of all results; both variants have the same.
        self.shardings: Sequence[placement.Sharding] | None = None
        # Both variants have the same conditions, so those of the first one are those of the plan.
        self.errors = self._add(self.donates(inputs))

    def donates(self, inputs: list[Any], hidden: bool = False) -> bool:
        """Return whether a call donates its targets: if only their buffers hold the arrays."""
        may = not self.fixed and config.current.donate == "auto"
        return may and donation.is_owned(inputs, self.donated, hidden)

    def choose(self, inputs: list[Any]) -> Callable[..., Any]:
        """Return the variant for these inputs."""
        owned = self.donates(inputs)
        call = self.calls.get(owned)
        if call is not None:
            return call
        self.compile(owned)
        return self.calls[owned]

    def compile(self, owned: bool) -> None:
        """Compile a variant that is not there yet."""
        self._add(owned)

    def _add(self, owned: bool) -> list[Error]:
        """Add the variant that donates the targets, if they are owned, or the other; return its conditions."""
        builder = self.builder
        # Inside a JAX trace there is nothing to compile, nor memory to donate: the program is inlined.
        if builder.traced:
            self.calls[owned] = builder.inlined()
            return []
        executable, facts = compile_with_extra(
            builder.program, builder.examples, self.donated if owned else (), str(builder.op)
        )
        # Found while tracing, so it takes a second compilation for an op that checks values, once per key.
        if facts.errors:
            # A program that checks values keeps its targets, so that a failed call leaves them unchanged.
            self.fixed = True
            if owned:
                owned = False
                executable, facts = compile_with_extra(
                    builder.program, builder.examples, name=str(builder.op)
                )
        # The targets are overwritten whole, so both variants are this program.
        if executable.unread.issuperset(self.donated):
            self.fixed, owned = True, False
        self.calls[owned] = executable.call
        self.shardings = executable.shardings
        return facts.errors


def locator(op: OpOverload) -> Callable[[tuple[Any, ...]], list[Tensor]]:
    """Return a function that finds the tensors a call writes to."""
    positions = [a.position for a in schema_of(op).arguments if a.mutated]
    # Most ops write to one tensor: a closure over its position is all that a call needs.
    if len(positions) == 1 and schema_of(op).arguments[positions[0]].kind == "tensor":
        position = positions[0]
        return lambda values: [values[position]]

    def locate(values: tuple[Any, ...]) -> list[Tensor]:
        # Not ``tensors_in``: a fused optimizer has hundreds of targets, and this runs at every call.
        targets = [values[position] for position in positions]
        tensors = [item for value in targets for item in (value if isinstance(value, list) else [value])]
        return [tensor for tensor in tensors if isinstance(tensor, Tensor)]

    return locate


def _tensor_slots(slot: Slot) -> list[TensorSlot]:
    return [s for s in (slot if isinstance(slot, list) else [slot]) if isinstance(s, TensorSlot)]


def restride_all(targets: list[Tensor], resized: list[Spec | None]) -> None:
    """Give resized targets their new layouts."""
    for target, spec in zip(targets, resized, strict=True):
        if spec is not None:
            become(target, restride(target, spec.size, spec.stride))
