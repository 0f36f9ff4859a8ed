"""Runs of one specialization: its state stays with it, what it writes is rebound, what is new is wrapped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import jax
import torch

from isthmus._device.checks import value_checks
from isthmus._device.core import donation
from isthmus._device.core.buffer import Buffer, buffer_of
from isthmus._device.core.resident_state import Residence
from isthmus._device.core.slots import TensorSlot
from isthmus._dynamo import compile_log, dlpack
from isthmus._dynamo.saved_tensors import Contents
from isthmus._dynamo.specialization import SavedSlot, Specialization
from isthmus._runtime import memory
from isthmus._runtime.private import forgetting_callers

# How many sets of buffers a program keeps the state of: two models of one class take turns in the same program.
_RESIDENCES = 8
_HELD = attrgetter("held")


class Run:
    """A specialization, compiled, as a callable of its arguments and the sources of its inputs."""

    def __init__(self, specialization: Specialization) -> None:
        self.specialization = specialization
        self.residences: OrderedDict[tuple[int, ...], Residence] = OrderedDict()
        self.auto = value_checks.auto()
        self._compile()

    def _compile(self, bundled: bool = True) -> None:
        one = self.specialization
        self.program = program = compile_log.compile(one, bundled)
        kept = {index for index, _ in one.state}
        self.others = [at for at in range(len(one.inputs)) if at not in kept]
        targets = [target for target in one.targets if one.index(target) not in kept]
        self.donated, self.call = program.donated, program.call
        self.wrap = one.returns.wrapper()
        here = all(one.local[at] for at in targets)
        self.rebind = _rebinder(targets, [one.slots[at] for at in targets], here)
        self.state, self.written = len(program.packing), len(targets)
        self.kept = [at for at in one.targets if one.index(at) in kept]
        tensors = [
            here
            for here, slot in zip(one.local, one.slots, strict=True)
            if isinstance(slot, (TensorSlot, SavedSlot))
        ]
        # torch's stream waits for what leaves the program; what forward saves does not leave it.
        leaves = bool(targets) or any(not isinstance(spec, Contents) for spec in one.returns.specs)
        self.waits = not all(tensors) and (dlpack.waits(one.devices) or not leaves)
        self.foreign, self.checked = not all(tensors), bool(program.checks.errors)
        # Where every source is a buffer, they are read in a loop that Python does not run.
        self.plain = not self.foreign and len(tensors) == len(one.inputs)
        # Where nothing is written and nothing required, a run is no more than a call.
        self.pure = self.plain and not (one.state or targets or self.checked)
        self.nothing_failed = program.checks.before()
        self.quick: Callable[..., Any] | None = None

    def __call__(self, args: list[Any], sources: list[Any]) -> Any:
        """Run one call; ``args`` and ``sources`` are emptied."""
        outputs = self._compute(sources) if self.pure else self._rewrite(args, sources)
        result = self.wrap(args, outputs)
        args.clear()
        if self.checked:
            self.program.checks.settle(outputs[-1], self.auto)
        return result

    def _compute(self, sources: list[Any]) -> Sequence[Any]:
        """Run a program that writes nothing, and return its results."""
        with forgetting_callers():
            try:
                outputs = self.call(*map(_HELD, sources), self.nothing_failed)
            except Exception as error:
                if memory.is_exhausted(error):
                    memory.make_room(error, [*map(_HELD, sources)])
                elif not donation.is_unready([*map(_HELD, sources)]):
                    raise
                # Another thread was rewriting a buffer, or had only recorded it: its value is waited for.
                inputs = [*[source.value for source in sources], self.nothing_failed]
                outputs = donation.run(self.call, inputs, list)
        sources.clear()
        return outputs

    def _rewrite(self, args: list[Any], sources: list[Any]) -> Sequence[Any]:
        """Run a program on its state, rebind what it writes, and return its other results."""
        one = self.specialization
        residence = self._residence(sources) if one.state else None

        def commit(outputs: Sequence[Any]) -> Sequence[Any]:
            if residence is not None and not args[self.kept[0]].is_inference():
                torch.autograd.graph.increment_version([args[at] for at in self.kept])
            if self.waits:
                jax.block_until_ready(outputs)
            fresh = outputs[self.state :] if self.state else outputs
            if self.written:
                self.rebind(args, fresh)
                fresh = fresh[self.written :]
            return fresh

        with donation.lock, forgetting_callers():
            chosen = [sources[at] for at in self.others] if one.state else sources
            inputs = self._inputs(chosen)
            undo = donation.take(inputs, self.donated, [chosen[place] for place in self.donated])
            sources.clear()
            inputs.append(self.program.checks.before())
            if residence is None:
                return donation.run(self.call, inputs, commit, undo)
            return residence.run(self.call, inputs, commit, undo)

    def _inputs(self, sources: list[Any]) -> list[Any]:
        """Return the arrays of sources."""
        if self.plain and not donation.threaded():
            inputs = [*map(_HELD, sources)]
            if not donation.is_unready(inputs):
                return inputs
        return [source.value if isinstance(source, Buffer) else source for source in sources]

    def _residence(self, sources: list[Any]) -> Residence:
        """Return where the state of these buffers is."""
        one = self.specialization
        buffers = [sources[index] for index, _ in one.state]
        key = tuple(map(id, buffers))
        found = self.residences.get(key)
        if found is not None and found.wears:
            self._compile(bundled=False)
            self.residences.clear()
            found = None
        if found is None or found.dead:
            found = self.residences[key] = Residence(*self.program.packing.pick(sources.__getitem__))
            if len(self.residences) > _RESIDENCES:
                self.residences.popitem(last=False)[1].give_back()
        return found


def _rebinder(places: list[int], slots: list[Any], here: bool) -> Callable[[list[Any], Sequence[Any]], None]:
    """Return the function that gives written arguments their new contents."""

    def rebind(args: list[Any], outputs: Sequence[Any]) -> None:
        targets = [args[at] for at in places]
        for target, value in zip(targets, outputs, strict=False):
            buffer_of(target).bind(value)
        if not targets[0].is_inference():
            torch.autograd.graph.increment_version(targets)

    def copy_back(args: list[Any], outputs: Sequence[Any]) -> None:
        foreign: dict[tuple[torch.device, torch.dtype], tuple[list[Any], list[Any]]] = {}
        for at, slot, value in zip(places, slots, outputs, strict=False):
            target = args[at]
            if target.device.type == "jax":
                buffer_of(target).bind(value)
                torch.autograd.graph.increment_version(target)
                continue
            new = dlpack.depart(value, slot.spec.size, slot.spec.stride, target.device)
            targets, values = foreign.setdefault((target.device, target.dtype), ([], []))
            targets.append(target)
            values.append(new)
        # One call for all: an optimizer's step writes hundreds of tensors.
        with torch.no_grad():
            for targets, values in foreign.values():
                torch._foreach_copy_(targets, values)

    return rebind if here else copy_back
