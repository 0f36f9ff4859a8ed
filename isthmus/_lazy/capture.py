"""Recording a function once: what it reads, writes and returns becomes a ``Replay``.

``Jitted`` (``jit.py``) makes a ``Capture`` where no earlier recording fits a call. The function runs in lazy mode with
``mode.current.capture`` set, so that the device reports what a replay has to repeat: tensors that are moved in
(``note_host``) and arrays that are made (``note_own``). When the function has returned, nothing has been computed yet;
``_compute`` sorts the trace into where each leaf comes from and where each live buffer goes::

    sources   [("argument", 0), ("buffer", weight's buffer), ("moved", (1, None, again)), ("constant", array)]
    targets   [("buffer", weight's buffer), ("new", signature of the loss)]

and runs the program (``recorded_program.py``) for the first time. ``replay.py`` does the same with other arguments.

What can go wrong: an op that a replay would not repeat (a read of a value, an op on the CPU) raises ``JitError`` while
the function runs; anything else that a replay could not do leaves a ``reason``, and the function is recorded again at
its next call. An exception before the results are bound leaves parameters as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus._device.core import donation, generator, mode
from isthmus._device.core.buffer import Buffer, buffer_of
from isthmus._device.torch_glue.pytree import tree_flatten, tree_unflatten
from isthmus._graph.layout import Spec
from isthmus._graph.nodes import Node
from isthmus._lazy import programs
from isthmus._lazy.captured_objects import Roots
from isthmus._lazy.guards import Guard
from isthmus._lazy.record_checks import ApiWatch, OpWatch
from isthmus._lazy.recorded_program import Outputs, execution_of
from isthmus._lazy.replay import Draws, Execution, Gradients, Replay, is_ours, shared_buffers
from isthmus._lazy.trace import trace
from isthmus._lazy.value_guards import ValueGuard, guarded
from isthmus._runtime.user_frames import user_line
from isthmus.errors import JitError

# In place of ``config.graph_size``: a recording is one program, however long the function is.
_UNLIMITED = 2**62
REASON = "an isthmus.jit function"
"""Why a graph that was recorded before runs at a call of a jitted function; see ``mode.reason``."""


@dataclass(frozen=True)
class Recorded:
    """What a function did while it was recorded: the leaves of its result, and the tensors of the CPU it made."""

    results: list[Any]
    spec: Any
    born: set[int]
    differentiates: bool


class Capture:
    """A recording of a function with the arguments ``flat``; ``record`` makes the ``replay`` of it.

    While the function runs, the device notes here what it moves in and makes. Everything a replay cannot do again makes
    the recording not ``replayable``, for the ``reason`` it gives; ``complete`` says that the step has happened.
    """

    def __init__(self, roots: Roots, donate: bool, flat: list[Any]) -> None:
        self.roots, self.donate, self.flat = roots, donate, flat
        self.guard = Guard(roots)
        # By identity of the buffer: views of an argument have the same one.
        self.places = {id(buffer_of(t)): n for n, t in enumerate(flat) if is_ours(t)}
        self.hosts: dict[int, tuple[Any, Tensor, Callable[[Tensor], Any]]] = {}
        # Kept alive, so that no later buffer gets the same ``id`` while the function runs.
        self.own: dict[int, Buffer] = {}
        self.values: list[ValueGuard] = []
        self.complete, self.reason = False, ""
        self.replay: Replay | None = None

    @property
    def replayable(self) -> bool:
        """Whether ``run`` does what the function would."""
        return self.reason == ""

    def note_host(self, array: Any, tensor: Tensor, again: Callable[[Tensor], Any]) -> None:
        """Remember that an array was moved in from a tensor of another device, and how to do it again."""
        self.hosts[id(array)] = (array, tensor, again)

    def note_own(self, buffer: Buffer) -> None:
        """Remember that a buffer was made in here, of an array that is there at once."""
        self.own[id(buffer)] = buffer

    def refuse_fallback(self, op: Any, reason: str) -> Exception:
        """Return the error for an op that would run on the CPU."""
        return JitError(
            f"isthmus.jit: {op} would run on the CPU ({reason}; {user_line()}); move it out of the function, or give "
            f"it a lowering (docs/add-a-lowering.md)"
        )

    def read(self, buffer: Buffer) -> Any:
        """Return a value that is read, if it is the same at every replay: made of numbers alone, or guarded."""
        node = buffer.held
        # Made of numbers alone, it is computed at once by a program of its own: a replay has the same numbers.
        if type(node) is not Node or not programs.is_fixed(node):
            guard = guarded(node, self.places)
            if guard is None:
                raise self.refuse_read()
            self.values.append(guard)
            return guard.value
        program = programs.family_of((node,)).find(frozenset())
        constants = program.pack_numbers(trace.numbers, trace.offsets)
        return program.call(*program.arguments([], constants, []))[0]

    def refuse_read(self) -> Exception:
        """Return the error for a value that is read."""
        return JitError(
            f"isthmus.jit: a value is read while the function is recorded ({user_line()}), by .item(), .cpu(), "
            f"bool(), print or an op whose result's size depends on values. Return the tensor and read it outside; "
            f"only a truth of arguments, such as bool(mask.all()), can be read in here"
        )

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the function, make what replays it, and return its result."""
        ours = [t for t in self.flat if is_ours(t)]
        # Before the function runs: afterwards its arguments may lie on other storages.
        layouts = [(buffer_of(t), buffer_of(t).signature, Spec.at(t)) for t in ours]
        leaves = [t for t in ours if t.is_leaf and t.requires_grad]
        grads = [(t, t.grad) for t in [*self.guard.parameters, *leaves]]
        start = generator.state()
        # From here on the function has run: whatever fails below must leave parameters as they were.
        recorded = self._watched(function, args, kwargs)
        try:
            if [(buffer_of(t), buffer_of(t).signature, Spec.at(t)) for t in ours] != layouts:
                self.reason = "it gives an argument another layout or storage"
            if any(t.requires_grad and not t.is_leaf for t in ours):
                self.reason = "an argument is part of an autograd graph from outside"
            return self._compute(recorded, grads, start)
        except BaseException as error:
            # ``complete`` is set where results are bound, so an error before that finds nothing changed.
            if not self.complete:  # the step did not happen: parameters have the values they had
                trace.refusal = None
                programs.restore(error)
            raise
        finally:
            trace.refusal = None
            # Everything recorded is in the replay by now, or is to be forgotten.
            trace.reset()
            self.hosts, self.own = {}, {}

    def _watched(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Recorded:
        """Run the function with every op recorded."""
        lazy, ops = mode.current.lazy, OpWatch()
        with ExitStack() as stack:
            # Backward on this thread, whose ops are the ones that are recorded.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self.roots.watching())
            # ``capture`` is read by the device at every point that a replay could not repeat.
            mode.current.lazy, mode.current.capture = True, self
            trace.refusal, trace.limit = self.refuse_read, _UNLIMITED
            try:
                with ops, ApiWatch(ops):
                    result = function(*args, **kwargs)
                leaves, spec = tree_flatten(result)
                # Lazy conjugates become values in the recording, not after it.
                return Recorded([_resolved(leaf) for leaf in leaves], spec, set(ops.born), ops.differentiates)
            except BaseException:
                # As in eager, what was done before the error is done.
                mode.current.capture = trace.refusal = None
                # The ops before the exception run as if they had been recorded in lazy mode.
                with mode.reason(REASON):
                    programs.materialise()
                raise
            finally:
                mode.current.lazy, mode.current.capture = lazy, None

    def _compute(self, recorded: Recorded, grads: list[tuple[Tensor, Any]], start: tuple[int, int]) -> Any:
        """Compute what was recorded, and return the function's result."""
        live = trace.live()
        # Buffers that outlive the call: those of modules and optimizers, then those of gradients.
        lasting = {id(buffer): tensor for tensor, buffer, _ in self.guard.buffers}
        shared = shared_buffers(self.flat, lasting)
        lasting |= {id(buffer_of(g)): g for _, g in grads if is_ours(g)}
        # Results that are arrays already, moved in or made before, go through the program as well.
        held = {id(buffer_of(t)): buffer_of(t) for t in recorded.results if is_ours(t)}
        extra = [
            b for key, b in held.items() if type(b.held) is not Node and key not in (*self.places, *lasting)
        ]
        wanted = (*[b.held for b in live], *[trace.array(b) for b in extra])
        sources = self._sources(lasting, recorded.born)
        outputs = self._outputs([*live, *extra], lasting)
        # In this order: what a gradient is made of decides what counts as used.
        gradients = self._gradients(grads, outputs, _used(sources, outputs))
        results = [self._result(t, outputs.new, recorded.born) for t in recorded.results]
        draws = self._draws(start)
        used = _used(sources, outputs) | {buffer for buffer in shared if buffer is not None}
        # The first reason stays: later ones often follow from it.
        self.reason = self.reason or self._why_not(used, outputs.new, results, gradients)
        execution = execution_of(
            wanted,
            sources,
            outputs,
            programs.shardings_of([*live, *extra]),
            self.flat,
            donate=self.donate,
            replayable=self.replayable,
        )
        # Whole before the program runs for the first time: an exception of a value check leaves it good for replays.
        self.replay = Replay(
            guard=self.guard,
            values=self.values,
            # Narrowed by now to what the function uses.
            lasting=frozenset(id(buffer) for _, buffer, _ in self.guard.buffers),
            shared=shared,
            draws=draws,
            execution=execution,
            written=outputs.written,
            gradients=gradients,
            results=results,
            spec=recorded.spec,
        )
        if execution is None:
            self.complete = True
        # A function that computes nothing has nothing to run, but its replay still moves the generator on.
        else:
            self._first_run(execution, live)
        self._check_graphs(recorded)
        # The caller gets tensors without a graph; ``_check_graphs`` has raised where one was wanted.
        returned = [t.detach() if is_ours(t) and t.grad_fn is not None else t for t in recorded.results]
        return tree_unflatten(returned, recorded.spec)

    def _sources(self, lasting: dict[int, Tensor], born: set[int]) -> list[tuple[str, Any]]:
        """Say where each leaf's array comes from: an argument, a buffer that lives on, the host, or this recording."""
        sources: list[tuple[str, Any]] = []
        tensors = {id(value): n for n, value in enumerate(self.flat) if isinstance(value, Tensor)}
        for array, origin in zip(trace.arrays, trace.origins, strict=True):
            buffer = origin()
            _, tensor, again = self.hosts.get(id(array), (None, None, None))
            # A CPU tensor that exists before the call is moved again at each replay; one made inside is a
            # constant.
            if tensor is not None and id(tensor) not in born:
                place = tensors.get(id(tensor))
                sources.append(("moved", (place, None if place is not None else tensor, again)))
            elif buffer is not None and id(buffer) in self.places:
                sources.append(("argument", self.places[id(buffer)]))
            elif buffer is not None and id(buffer) in lasting:
                sources.append(("buffer", buffer))
            else:
                sources.append(("constant", array))
                # Made in here, it is the same every time; made outside, nothing tells when it is another.
                if buffer is not None and tensor is None and id(buffer) not in self.own:
                    self.reason = (
                        f"it reads a tensor of shape {tuple(array.shape)} that nothing it holds leads to"
                    )
        return sources

    def _outputs(self, live: list[Buffer], lasting: dict[int, Tensor]) -> Outputs:
        """Say where each output goes: an argument, a buffer that lives on, or a new tensor."""
        # By the buffers of the leaves: a new output that was a leaf is a tensor from elsewhere that was written
        # to.
        origins = {id(origin()) for origin in trace.origins}
        targets: list[tuple[str, Any]] = []
        new: dict[int, int] = {}
        for buffer in live:
            key = id(buffer)
            if key in self.places:
                targets.append(("argument", self.places[key]))
            elif key in lasting:
                targets.append(("buffer", buffer))
            else:
                new[key] = len(targets)
                targets.append(("new", buffer.signature))
                if key in origins and type(buffer.held) is Node:
                    self.reason = "it writes to a tensor that nothing it holds leads to"
        buffers = [target for kind, target in targets if kind == "buffer"]
        # Autograd's version counters of tensors that a replay writes to; inference tensors have none.
        written = [lasting[id(b)] for b in buffers if not lasting[id(b)].is_inference()]
        return Outputs(targets, new, written)

    def _result(self, leaf: Any, new: dict[int, int], born: set[int]) -> tuple[Any, ...]:
        """Say what a replay returns in the place of one result."""
        place = next(
            (n for n, value in enumerate(self.flat) if value is leaf and isinstance(value, Tensor)), None
        )
        if place is not None:
            return ("place", place)
        if not isinstance(leaf, Tensor):
            return ("same", leaf)
        # A CPU tensor: made inside, the caller may write to it, so each replay returns a copy.
        if not is_ours(leaf):
            return ("copy", leaf.clone()) if id(leaf) in born else ("same", leaf)
        key = id(buffer_of(leaf))
        if key in new:
            return ("new", new[key], Spec.at(leaf))
        return ("argument", self.places[key], Spec.at(leaf)) if key in self.places else ("same", leaf)

    def _gradients(self, grads: list[tuple[Tensor, Any]], outputs: Outputs, used: set[int]) -> Gradients:
        """Say which gradients a replay makes and which it drops; those it adds to are buffers that live on."""
        gradients = Gradients([], [], [])
        places = {id(t): n for n, t in enumerate(self.flat)}
        for leaf, before in grads:
            # An argument is known by its place, since every call brings another one; a parameter by itself.
            who, grad = places.get(id(leaf), leaf), leaf.grad
            if grad is None:
                gradients.dropped.extend([who] if before is not None else [])
            elif is_ours(grad) and id(buffer_of(grad)) in outputs.new:
                gradients.made.append((who, outputs.new[id(buffer_of(grad))], Spec.at(grad)))
            elif grad is not before:
                self.reason = "it puts other tensors into .grad"
            # ``backward()`` added to a gradient that was there: the replay needs that very tensor.
            if before is not None and is_ours(before) and id(buffer_of(before)) in used:
                gradients.added.append((who, before))
        if any(type(who) is int for who, _ in gradients.added):
            self.reason = "it adds to the gradient of an argument"
        return gradients

    def _draws(self, start: tuple[int, int]) -> Draws:
        """Say which offsets of the generator are drawn, counted from where it stands when a replay begins."""
        generators = list(trace.generators)
        # The words of each draw as the seed and the offset that they are made of.
        words = [[int(word) for word in draw] for draw in trace.draws]
        drawn = [(high << 32 | low, far << 32 | near) for high, low, far, near in words]
        end = generator.state()
        mine = [*[d for d, g in zip(drawn, generators, strict=True) if g is None], end]
        # A seed inside the function makes draws depend on nothing but itself; a replay adds to what is there.
        if any(seed != start[0] or offset < start[1] for seed, offset in mine):
            self.reason = "it seeds the generator"
        return Draws(generators, [offset - start[1] for _, offset in drawn], end[1] - start[1])

    def _why_not(
        self, used: set[int], new: dict[int, int], results: list[tuple[Any, ...]], gradients: Gradients
    ) -> str:
        """Return why the recording cannot be replayed, or "" if it can."""
        unreachable = self.roots.unreachable_object()
        if unreachable:
            return f"it uses a {unreachable} that nothing it holds leads to"
        # Again, after the function has run: what it reaches may have changed.
        now = self.roots.again()
        self.guard.narrow(used)
        changed = self.guard.changed(now)
        if changed:
            return f"it changes {changed}"
        if any(isinstance(t, Tensor) and is_ours(t) and id(buffer_of(t)) in new for t in now.objects):
            return "it keeps a tensor that it makes"
        # Results and gradients are what a replay hands out; anything else new would be lost.
        wanted = {n for kind, n, *_ in results if kind == "new"} | {n for _, n, _ in gradients.made}
        if set(new.values()) - wanted:
            return "it makes tensors that outlive it and that it does not return"
        return ""

    def _check_graphs(self, recorded: Recorded) -> None:
        """Raise if the caller may want to differentiate a result, whose graph a replay does not have."""
        graphs = any(isinstance(t, Tensor) and t.grad_fn is not None for t in recorded.results)
        if graphs and not recorded.differentiates:
            self.reason = "a result requires grad"
            raise JitError(
                "isthmus.jit: a result requires grad, but a replay has no autograd graph to go back through; call "
                "backward() inside the function, return result.detach(), or call it under torch.no_grad()"
            )

    def _first_run(self, execution: Execution, live: list[Buffer]) -> None:
        """Compute what the recording left, on the arrays it met, and give it to its buffers."""
        program: Any = execution.program
        # The arrays of the trace become the state at once: ``own`` copies those that have another holder.
        whole, bundles = program.packing.pick(trace.arrays.__getitem__)
        residence = execution.residence()

        def bind(results: Sequence[Any]) -> None:
            for place, n, _, _ in execution.writes:
                # Outputs beyond the live buffers are arrays that were there before (``extra``).
                if n < len(live):
                    live[n].compute(results[place])
            self.complete = True

        try:
            residence.begin(donation.own(whole), bundles)
            outputs = execution.run_first(residence, bind)
        except BaseException:
            if not self.complete:
                residence.give_back()
            raise
        execution.report(outputs)


def _used(sources: list[tuple[str, Any]], outputs: Outputs) -> set[int]:
    """Return the buffers, not those of arguments, that the program reads or writes."""
    return {id(b) for kind, b in (*sources, *outputs.targets) if kind == "buffer"}


def _resolved(leaf: Any) -> Any:
    return leaf.resolve_conj().resolve_neg() if is_ours(leaf) else leaf
