"""Replaying a function: the program that was recorded (``capture.py``), run on other arguments.

``Jitted`` (``jit.py``) keeps several replays for each set of arguments and runs the first that ``holds``. A replay is a
constant: the state it moves on is in buffers and in its program's residence. ``run`` does in order

1. move the generator on as the recording did (``Draws``), whether or not a program reads the numbers;
2. run the program on buffers of arguments and of what the function reaches (``Execution.run``);
3. bind written buffers, make new ones, set gradients, and count versions for autograd (``_write``);
4. report value checks, and return the results in the structure that the function returned (``_give``).

``_write`` may run twice where an interrupt comes between (``donation.run``), so all it does is bind values.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import torch
from torch import Tensor

from isthmus._device.core import generator
from isthmus._device.core.buffer import Buffer, buffer_of, new_tensor
from isthmus._device.core.resident_state import Residence
from isthmus._device.core.views import attach_to
from isthmus._device.torch_glue.private import restride
from isthmus._device.torch_glue.pytree import tree_unflatten
from isthmus._graph.layout import Spec
from isthmus._graph.nodes import Node
from isthmus._graph.size_templates import Ints
from isthmus._lazy import ranges
from isthmus._lazy.captured_objects import Roots
from isthmus._lazy.guards import Guard
from isthmus._lazy.trace import trace
from isthmus._lazy.value_guards import ValueGuard
from isthmus._program import padded_sources, runner
from isthmus._program.program import CompiledProgram, Words
from isthmus._program.ranged_program import RangedProgram
from isthmus._runtime import counters


@dataclass(frozen=True)
class Gradients:
    """Gradients that a replay makes, drops and adds to, each with its owner, a parameter or an argument's place."""

    made: list[tuple[Any, int, Spec]]
    dropped: list[Any]
    added: list[tuple[Any, Tensor]]


@dataclass(frozen=True)
class Draws:
    """The random draws: the generator of each or None for the device's, its offset, and how far that one moves on."""

    generators: list[Any]
    steps: list[int]
    advance: int

    def words(self) -> list[Any]:
        """Return the words for each draw of the recording, and move the generator on as the recording did."""
        # Also nothing to move on: a recording without draws leaves the generator alone.
        if not self.generators:
            return []
        base = generator.advance(self.advance)
        pairs = zip(self.generators, self.steps, strict=True)
        # A generator of the user's draws for itself; the device's counts from where it stands now.
        return [generator.draw(g) if g is not None else generator.words(base, step) for g, step in pairs]


@dataclass(frozen=True)
class Execution:
    """A program, where its inputs come from (``sources`` of leaves, ``inputs`` of slots) and where its results go.

    ``sizes`` are those of a program for a range of sizes, none where it is exact; ``written`` are slots of buffers that
    are written.
    """

    residences: runner.Residences[CompiledProgram | RangedProgram]
    sources: list[tuple[str, Any]]
    inputs: list[tuple[str, Any]]
    constants: list[Any]
    lines: Mapping[Node, str]
    writes: list[tuple[int, int, str, Any]]
    sizes: Ints
    written: Set[int]

    @property
    def program(self) -> CompiledProgram | RangedProgram:
        """The program, which may become another one (``Residences.find``)."""
        return self.residences.program

    def residence(self) -> Residence:
        """Return where the state is; there is one set of buffers."""
        # The key is empty: a replay's state lies in the buffers that the recording met, always the same ones.
        return self.residences.find((), lambda leaf: self.sources[leaf][1])

    def run(
        self,
        residence: Residence,
        sources: Sequence[runner.Source],
        draws: Sequence[Words],
        bind: runner.Bind,
    ) -> Sequence[jax.Array]:
        """Run the program on a source for each slot, and return all of its outputs."""
        program = self.program
        if isinstance(program, RangedProgram):
            # Programs for a range of sizes take padded contents as they are.
            run = partial(padded_sources.run, program, self.sizes, sources, self.written)
            return self._ranged(run, program, draws, bind, residence)
        return runner.run(program, sources, bind, constants=self.constants, draws=draws, residence=residence)

    def run_first(self, residence: Residence, bind: runner.Bind) -> Sequence[jax.Array]:
        """Run the program on the arrays of the trace that it was recorded in."""
        program = self.program
        if isinstance(program, RangedProgram):
            run = partial(program.run, self.sizes, ranges.given(program.slots))
            return self._ranged(run, program, trace.draws, bind, residence)
        return self.run(residence, [trace.arrays[at] for at in program.slots], trace.draws, bind)  # type: ignore[index]  # no slot is a tuple

    def report(self, outputs: Sequence[jax.Array]) -> None:
        """Raise for a value check of the program that failed in a run with these outputs."""
        program = self.program
        if isinstance(program, RangedProgram):
            program.report(outputs, self.lines, sizes=self.sizes)
        else:
            program.report(outputs, self.lines)

    def _ranged(
        self,
        run: Callable[..., Sequence[jax.Array]],
        program: RangedProgram,
        draws: Sequence[Words],
        bind: runner.Bind,
        residence: Residence,
    ) -> Sequence[jax.Array]:
        def keep(values: list[Any], outputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
            bind(values)
            return outputs

        rest = program.compiled.arguments([], self.constants, draws)
        return run(rest, keep, residence if len(program.packing) else None)


@dataclass(frozen=True)
class Replay:
    """What does again what a function did when it was recorded; without an ``execution`` it computed nothing."""

    guard: Guard
    values: list[ValueGuard]
    lasting: frozenset[int]
    shared: list[int | None]
    draws: Draws
    execution: Execution | None
    written: list[Tensor]
    gradients: Gradients
    results: list[tuple[Any, ...]]
    spec: Any

    @property
    def is_ranged(self) -> bool:
        """Whether it runs a program that serves other sizes too."""
        return self.execution is not None and isinstance(self.execution.program, RangedProgram)

    def holds(self, roots: Roots, flat: list[Any]) -> bool:
        """Return whether everything the recording depends on is as it was when it began."""
        if shared_buffers(flat, self.lasting) != self.shared or not self.guard.holds(roots):
            return False
        # Gradients are added to in place, so it must be the same tensor.
        if not all([leaf.grad is grad for leaf, grad in self.gradients.added]):
            return False
        # Reads of values are the last thing compared: it may take a run of a program.
        if not self.values:
            return True
        buffers = [buffer_of(t) if is_ours(t) else None for t in flat]
        return all([value.holds(buffers) for value in self.values])

    def run(self, flat: list[Any]) -> Any:
        """Do what the recording did, on these arguments."""
        draws = self.draws.words()  # also where no program reads them: the generator moves on
        execution = self.execution
        if execution is None:
            return self._given(self._write((), (), flat), flat)
        new: dict[int, Buffer] = {}
        residence = execution.residence()
        outputs = execution.run(
            residence,
            [_source(kind, source, flat) for kind, source in execution.inputs],
            draws,
            # ``_write`` may run twice, after an interrupt; new buffers are simply made again.
            lambda results: new.update(self._write(execution.writes, results, flat)),
        )
        counters.count("replays")
        execution.report(outputs)
        return self._given(new, flat)

    def _given(self, new: dict[int, Buffer], flat: list[Any]) -> Any:
        """Return the function's result, made of the outputs of a replay."""
        return tree_unflatten([_give(result, new, flat) for result in self.results], self.spec)

    def _write(
        self, writes: Sequence[tuple[int, int, str, Any]], results: Sequence[Any], flat: list[Any]
    ) -> dict[int, Buffer]:
        """Give outputs to those they belong to, and return the new buffers by their places."""
        new: dict[int, Buffer] = {}
        touched = list(self.written)
        # Written buffers are bound; a new one is made for each new tensor.
        for at, n, kind, target in writes:
            value = results[at]
            if kind == "buffer":
                target.bind(value)
            elif kind == "argument":
                buffer_of(flat[target]).bind(value)
                touched += [] if flat[target].is_inference() else [flat[target]]
            else:
                new[n] = Buffer(value, target)
        if touched:
            # Autograd notices the write, as it would after the in-place ops that were recorded.
            torch.autograd.graph.increment_version(touched)
        for who in self.gradients.dropped:
            _owner(who, flat).grad = None
        for who, n, layout in self.gradients.made:
            _owner(who, flat).grad = _tensor(new[n], layout)
        return new


def shared_buffers(flat: list[Any], lasting: Container[int]) -> list[int | None]:
    """Return for each tensor argument the buffer, by ``id``, that the function also reaches otherwise, if it is one."""
    buffers = [id(buffer_of(t)) for t in flat if is_ours(t)]
    return [buffer if buffer in lasting else None for buffer in buffers]


def _owner(who: Any, flat: list[Any]) -> Tensor:
    """Return the tensor whose gradient it is: a parameter, or an argument by its place."""
    return flat[who] if type(who) is int else who


def is_ours(value: Any) -> bool:
    """Return whether a value is a tensor of the device."""
    return isinstance(value, Tensor) and value.device.type == "jax"


def _source(kind: str, source: Any, flat: list[Any]) -> Any:
    """Return the buffer or the array of one input."""
    if kind == "argument":
        return buffer_of(flat[source])
    if kind == "moved":
        place, tensor, again = source
        return again(tensor if place is None else flat[place])
    return source


def _tensor(buffer: Buffer, layout: Spec) -> Tensor:
    # The offset apart: a new tensor starts at 0, and is restrided only where it must.
    tensor = new_tensor(layout.size, None if layout.is_as_made else layout.stride, layout.dtype, buffer)
    return restride(tensor, layout.size, layout.stride, layout.offset) if layout.offset else tensor


def _give(result: tuple[Any, ...], new: dict[int, Buffer], flat: list[Any]) -> Any:
    """Return one result of a replay."""
    kind, value, *layout = result
    if kind == "same":
        return value
    if kind == "place":
        return flat[value]
    if kind == "copy":
        return value.clone()
    if kind == "argument":
        view: Spec = layout[0]
        bare = attach_to(view.dtype, flat[value].untyped_storage())
        return restride(bare, view.size, view.stride, view.offset)
    return _tensor(new[value], layout[0])
