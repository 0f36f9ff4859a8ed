"""Runs of one specialization: which sources are state, what is written to arguments, what becomes a tensor.

``Program.__call__`` finds the ``Run`` for its arguments and calls it with them and with the sources of its inputs;
``_program/runner.py`` runs the program. A run that writes and checks nothing is a call and ``Returns.wrapper``.

Written arguments that the program keeps as state (an optimizer's moments) have no result: their arrays stay with the
program (``resident_state.py``). Other written arguments of the device take their results by assignment; those of the
CPU or of CUDA are copied back, all of one kind in one call. In both cases autograd's version counters are moved on,
so that a backward that saved the old value notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from isthmus._device.checks import value_checks
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.slots import TensorSlot
from isthmus._dynamo import compile_log, dlpack
from isthmus._dynamo.saved_tensors import Contents
from isthmus._dynamo.specialization import SavedSlot, Specialization
from isthmus._program import runner, staged


class Run:
    """A specialization, compiled, as a callable of its arguments and the sources of its inputs."""

    def __init__(self, specialization: Specialization) -> None:
        self.specialization = one = specialization
        self.residences = runner.Residences(compile_log.compile(one))
        self.auto = value_checks.auto()
        self.state = [index for index, _ in one.state]
        self.others = [at for at in range(len(one.inputs)) if at not in self.state]
        # Targets whose array stays with the program: they take no result.
        self.kept = [at for at in one.targets if one.index(at) in self.state]
        self.targets = [at for at in one.targets if at not in self.kept]
        self.wrap = one.returns.wrapper(self.shardings)
        slots = zip(one.local, one.slots, strict=True)
        tensors = [here for here, slot in slots if isinstance(slot, (TensorSlot, SavedSlot))]
        # Any source that is no buffer makes the call take the longer way.
        self.foreign, self.checked = not all(tensors), bool(self.program.checks.errors)
        # torch's stream waits for what leaves the program; what forward saves does not leave it.
        leaves = bool(self.targets) or any(not isinstance(spec, Contents) for spec in one.returns.specs)
        self.waits = self.foreign and (dlpack.waits(one.devices) or not leaves)
        self.rebind = _rebinder(one, self.targets)
        # Where every source is a buffer and nothing is written or required, a run is no more than a call.
        plain = not self.foreign and len(tensors) == len(one.inputs)
        self.pure = plain and not (one.targets or self.checked)
        self.quick: Callable[..., Any] | None = None

    @property
    def program(self) -> staged.Program:
        """The program of the next run."""
        return self.residences.program

    @property
    def shardings(self) -> list[Any] | None:
        """How the new storages are split, which follow the results that are written; None on one device."""
        shardings = self.program.result_shardings
        return None if shardings is None else shardings[len(self.targets) :]

    def __call__(self, args: list[Any], sources: list[Any]) -> Any:
        """Run one call; ``args`` is emptied."""
        if self.pure:
            result = self.wrap(args, runner.compute(self.program, sources))
            args.clear()
            return result
        residence = None
        # By identity: the state belongs to these buffers, and another model has its own in the same program.
        if self.state:
            # Identities are safe as keys: a residence that lost a buffer is dead, and is replaced.
            key = tuple([id(sources[at]) for at in self.state])
            residence = self.residences.find(key, sources.__getitem__)
            sources = [sources[at] for at in self.others]

        def bind(results: Sequence[Any]) -> None:
            # torch has to see the write, or a backward that saved the old value would go through unnoticed.
            if self.kept and not args[self.kept[0]].is_inference():
                torch.autograd.graph.increment_version([args[at] for at in self.kept])
            # Memory of torch's is shared: torch may write to it as soon as this call returns.
            if self.waits:
                jax.block_until_ready(results)
            if self.targets:
                self.rebind(args, results)

        program = self.program
        outputs = runner.run(program, sources, bind, residence=residence)
        # State comes first, then written arguments, then what is returned.
        result = self.wrap(args, outputs[len(program.packing) + len(self.targets) :])
        args.clear()
        program.report(outputs, auto=self.auto)
        return result


def _rebinder(one: Specialization, places: list[int]) -> Callable[[list[Any], Sequence[Any]], None]:
    """Return the function that gives written arguments their new contents."""
    slots: list[Any] = [one.slots[at] for at in places]

    def rebind(args: list[Any], outputs: Sequence[Any]) -> None:
        targets = [args[at] for at in places]
        for target, value in zip(targets, outputs, strict=False):
            buffer_of(target).bind(value)
        if not targets[0].is_inference():
            torch.autograd.graph.increment_version(targets)

    def copy_back(args: list[Any], outputs: Sequence[Any]) -> None:
        depart = dlpack.Departures()
        foreign: dict[tuple[torch.device, torch.dtype], tuple[list[Any], list[Any]]] = {}
        for at, slot, value in zip(places, slots, outputs, strict=False):
            target = args[at]
            if target.device.type == "jax":
                buffer_of(target).bind(value)
                torch.autograd.graph.increment_version(target)
                continue
            new = depart(value, slot.spec.size, slot.spec.stride, target.device)
            targets, values = foreign.setdefault((target.device, target.dtype), ([], []))
            targets.append(target)
            values.append(new)
        # One call for all: an optimizer's step writes hundreds of tensors.
        with torch.no_grad():
            for targets, values in foreign.values():
                torch._foreach_copy_(targets, values)

    return rebind if all(one.local[at] for at in places) else copy_back
