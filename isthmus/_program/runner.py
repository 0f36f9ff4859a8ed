"""The runner: every mode runs its compiled programs here, and differs only in where inputs come from and results go.

``run(program, sources, bind)`` takes a *source* for each array slot of a program: a ``Buffer``, whose array is read,
or an array. It runs the program, hands the results to ``bind``, and returns all outputs, the check code among them::

    outputs = run(program, [weight_buffer, batch_array], bind)
    program.report(outputs)             # raises for a value check that failed, now or at the next read of a value

- lazy mode (``_lazy/programs.py``): sources are arrays of the trace; ``bind`` gives them to the buffers of its nodes;
- ``isthmus.jit`` (``_lazy/capture.py``): buffers of arguments and of what the function reaches, which ``bind`` writes;
- ``torch.compile`` (``_dynamo/running.py``): buffers of arguments, or arrays that share other devices' memory; ``bind``
  writes to arguments.

What is the same for all happens here: the arrays of buffers are waited for where another thread is at work on them;
donated ones are made safe to overwrite; ``bind`` is finished whatever interrupts (``donation.run``); a program that
finds no memory is tried once more; state that stays with the program joins the inputs (``Residences``).

What can go wrong: ``bind`` may run twice, so it only binds values. A caller that holds an array of a donated source in
a local variable makes the donation a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Generic, Protocol, Self, TypeVar

import jax

from isthmus._caches import LruCache
from isthmus._device.core import donation
from isthmus._device.core.buffer import Buffer
from isthmus._device.core.resident_state import Packing, Residence
from isthmus._graph.arguments import AnyFunction, Value
from isthmus._program.program import Words
from isthmus._program.staged import Program
from isthmus._runtime import memory
from isthmus._runtime.private import forgetting_callers

Array = jax.Array
Source = Buffer | Array
Bind = Callable[[Sequence[Array]], object]
# How many sets of buffers a program keeps the state of: two models of one class take turns in the same program.
_RESIDENCES = 8
_HELD = attrgetter("held")


class Runnable(Protocol):
    """What the runner needs of a program: ``CompiledProgram``, or a graph on another backend."""

    donated: tuple[int, ...]
    packing: Packing

    @property
    def call(self) -> AnyFunction:
        """The program, as a function of its state and ``arguments``."""

    def arguments(
        self, arrays: list[Array], constants: Sequence[Array], draws: Sequence[Words]
    ) -> list[Value]:
        """Return the arguments of ``call`` after the state."""


def run(
    program: Runnable,
    sources: Sequence[Source],
    bind: Bind,
    *,
    constants: Sequence[Array] = (),
    draws: Sequence[Words] = (),
    residence: Residence | None = None,
) -> Sequence[Array]:
    """Run a program, bind its results and return all of its outputs.

    Arguments:
        program: what to run.
        sources: a buffer or an array for each of its array slots. The array of a buffer in a donated slot is copied
            first if something else holds it; an array in such a slot is given away as it is.
        bind: gets the results, in the order of the program's result slots.
        constants: numbers and offsets (``CompiledProgram.pack_numbers``).
        draws: words for each random draw.
        residence: where the program's state is, if it has some.
    """
    # State comes first among what the program returns.
    start = len(program.packing)

    def commit(outputs: Sequence[Array]) -> Sequence[Array]:
        bind(outputs[start:] if start else outputs)
        return outputs

    # Arrays of a trace are donated as they are: nothing else holds them.
    owners = [source for source in map(sources.__getitem__, program.donated) if isinstance(source, Buffer)]
    while True:
        # Before the lock is taken: a buffer may have been recorded by another thread, whose trace is then run.
        arrays = [source.value if isinstance(source, Buffer) else source for source in sources]
        # Nothing is overwritten: no lock, no reference counts, no undo.
        if residence is None and not owners:
            with forgetting_callers():
                return donation.run(program.call, program.arguments(arrays, constants, draws), commit)
        with donation.lock, forgetting_callers():
            if donation.threaded():
                # Another thread may have given its array away, or kept it in a program, since it was read.
                arrays = [donation.settled(s) if isinstance(s, Buffer) else s for s in sources]
                # Or recorded a write: a thread that records waits for this lock, so it must not be waited for here.
                if donation.is_unready(arrays):
                    continue
            # From here on the arrays of these buffers are hidden from other threads.
            undo = donation.take(arrays, program.donated, owners) if owners else None
            inputs = program.arguments(arrays, constants, draws)
            if residence is None:
                return donation.run(program.call, inputs, commit, undo)
            return residence.run(program.call, inputs, commit, undo)


def compute(program: Program, buffers: Sequence[Buffer]) -> Sequence[Array]:
    """Run a program that writes, keeps and checks nothing on the arrays of buffers: no more than a call."""
    try:
        with forgetting_callers():
            # The only argument after the arrays is the check code, which is 0 for a program without checks.
            return program.call(*map(_HELD, buffers), program.nothing_failed)  # type: ignore[no-any-return]
    except Exception as error:
        if not (memory.is_exhausted(error) or donation.is_unready([*map(_HELD, buffers)])):
            raise
    # Another thread was rewriting a buffer or had only recorded it, or there was no memory.
    return run(program, buffers, lambda results: None)


class Stateful(Protocol):
    """What a program has that may keep state."""

    packing: Packing

    def unbundled(self) -> Self:
        """Return the same program with every array of its state on its own."""


P = TypeVar("P", bound=Stateful)


class Residences(Generic[P]):
    """A program that keeps state, and where the state of each set of buffers is that it has run on."""

    def __init__(self, program: P) -> None:
        self.program = program
        self._residences: LruCache[Hashable, Residence] = LruCache(
            "state of programs", _RESIDENCES, Residence.give_back
        )

    def find(self, key: Hashable, buffer: Callable[[int], Buffer]) -> Residence:
        """Return the residence of the buffers that ``key`` stands for; ``buffer`` gives the one of an array leaf.

        ``program`` is another one afterwards where the state is read so often that bundles do not pay.
        """
        residence = self._residences.get(key)
        if residence is not None and residence.is_read_too_often:
            # Bundles were joined and parted for nothing several times; a program without them takes over.
            self.program, residence = self.program.unbundled(), None
            # Each gives its arrays back to its buffers.
            self._residences.clear()
        if residence is None or residence.dead:
            residence = self._residences[key] = Residence(*self.program.packing.pick(buffer))
        return residence
