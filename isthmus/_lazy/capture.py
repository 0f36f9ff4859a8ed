"""One recording of a function, to be replayed: what it reads, what it writes, what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isthmus import config
from isthmus._device.core import donation, generator, mode
from isthmus._device.core.buffer import Buffer, Signature, buffer_of, new_tensor
from isthmus._device.core.resident_state import Residence
from isthmus._device.core.views import attach_to
from isthmus._device.torch_glue.private import restride
from isthmus._device.torch_glue.pytree import tree_flatten, tree_unflatten
from isthmus._graph.graph import Graph
from isthmus._graph.layout import is_as_made
from isthmus._graph.nodes import Leaf, Node
from isthmus._lazy import programs
from isthmus._lazy.captured_objects import Roots
from isthmus._lazy.guards import Guard
from isthmus._lazy.record_checks import ApiWatch, OpWatch
from isthmus._lazy.trace import trace
from isthmus._lazy.value_guards import ValueGuard, guarded
from isthmus._program import runner
from isthmus._program.program import STATELESS, StateLayout
from isthmus._runtime import counters, placement
from isthmus._runtime.user_frames import user_line
from isthmus.errors import JitError

_UNLIMITED = 2**62
REASON = "an isthmus.jit function"
"""Why a graph that was recorded before runs at a call of a jitted function; see ``mode.reason``."""
Layout = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


class Capture:
    """A function recorded once with given arguments; ``run`` does what the recording did, on other tensors.

    Everything it cannot do again makes it not ``replayable``, for the ``reason`` it gives.
    """

    def __init__(self, roots: Roots, donate: bool) -> None:
        self.roots, self.donate = roots, donate
        self.hosts: dict[int, tuple[Any, Tensor, Callable[[Tensor], Any]]] = {}
        self.own: dict[int, Buffer] = {}
        self.values: list[ValueGuard] = []
        self.complete, self.reason = False, ""
        self.residences: runner.Residences | None = None

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
        """Run the function, keep what a replay needs, and return its result."""
        with mode.reason(REASON):
            programs.materialise()
        flat, _ = tree_flatten((args, kwargs))
        self.guard = Guard(self.roots)
        ours = [t for t in flat if _is_ours(t)]
        self.places = {id(buffer_of(t)): n for n, t in enumerate(flat) if _is_ours(t)}
        layouts = [(buffer_of(t), buffer_of(t).signature, _layout(t)) for t in ours]
        leaves = [t for t in ours if t.is_leaf and t.requires_grad]
        grads = [(t, t.grad) for t in [*self.guard.parameters, *leaves]]
        start = generator.state()
        result, born = self._watched(function, args, kwargs)
        try:
            if [(buffer_of(t), buffer_of(t).signature, _layout(t)) for t in ours] != layouts:
                self.reason = "it gives an argument another layout or storage"
            if any(t.requires_grad and not t.is_leaf for t in ours):
                self.reason = "an argument is part of an autograd graph from outside"
            return self._keep(result, flat, grads, born, start)
        except BaseException as error:
            if not self.complete:  # the step did not happen: parameters have the values they had
                trace.refusal = None
                programs.restore(error)
            raise
        finally:
            trace.refusal = None
            trace.reset()
            self.hosts, self.own = {}, {}

    def _watched(self, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, set[int]]:
        """Return the function's result, and which tensors of the CPU it made."""
        lazy, ops = mode.current.lazy, OpWatch()
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self.roots.watching())
            mode.current.lazy, mode.current.capture = True, self
            trace.refusal, trace.limit = self.refuse_read, _UNLIMITED
            try:
                with ops, ApiWatch(ops):
                    found = function(*args, **kwargs)
                leaves, self.spec = tree_flatten(found)
                self.differentiates = ops.differentiates
                return [_resolved(leaf) for leaf in leaves], set(ops.born)
            except BaseException:
                # As in eager, what was done before the error is done.
                mode.current.capture = trace.refusal = None
                with mode.reason(REASON):
                    programs.materialise()
                raise
            finally:
                mode.current.lazy, mode.current.capture = lazy, None

    def _keep(
        self, result: list[Any], flat: list[Any], grads: list[tuple[Tensor, Any]], born: set[int], start: Any
    ) -> Any:
        live = trace.live()
        at = self.places
        lasting = {id(buffer): tensor for tensor, buffer, _ in self.guard.buffers}
        self.lasting = frozenset(lasting)
        self.shared = self._shared(flat)
        lasting |= {id(buffer_of(g)): g for _, g in grads if _is_ours(g)}
        # Results that are arrays already, moved in or made before, go through the program as well.
        held = {id(buffer_of(t)): buffer_of(t) for t in result if _is_ours(t)}
        extra = [b for key, b in held.items() if type(b.held) is not Node and key not in (*at, *lasting)]
        wanted = (*[b.held for b in live], *[trace.array(b) for b in extra])
        self._find_inputs(flat, at, lasting, born)
        self._find_outputs([*live, *extra], at, lasting)
        self._find_grads(grads, flat)
        self.results = [self._result(t, flat, at, born) for t in result]
        self._find_draws(start)
        self.reason = self.reason or self._why_not()
        self._first_run(wanted, live, programs.shardings_of([*live, *extra]))()
        self._check_graphs(result)
        given = [t.detach() if _is_ours(t) and t.grad_fn is not None else t for t in result]
        return tree_unflatten(given, self.spec)

    def _shared(self, flat: list[Any]) -> list[Any]:
        """Return for each argument which buffer it is that the function also reaches otherwise, if it is one."""
        buffers = [id(buffer_of(t)) for t in flat if _is_ours(t)]
        return [buffer if buffer in self.lasting else None for buffer in buffers]

    def _find_inputs(
        self, flat: list[Any], at: dict[int, int], lasting: dict[int, Tensor], born: set[int]
    ) -> None:
        """Say where each leaf's array comes from: an argument, a buffer that lives on, the host, or this recording."""
        self.sources: list[tuple[str, Any]] = []
        places = {id(value): n for n, value in enumerate(flat) if isinstance(value, Tensor)}
        for array, origin in zip(trace.arrays, trace.origins, strict=True):
            buffer = origin()
            _, tensor, again = self.hosts.get(id(array), (None, None, None))
            if tensor is not None and id(tensor) not in born:
                place = places.get(id(tensor))
                self.sources.append(("moved", (place, None if place is not None else tensor, again)))
            elif buffer is not None and id(buffer) in at:
                self.sources.append(("argument", at[id(buffer)]))
            elif buffer is not None and id(buffer) in lasting:
                self.sources.append(("buffer", buffer))
            else:
                self.sources.append(("constant", array))
                # Made in here, it is the same every time; made outside, nothing tells when it is another.
                if buffer is not None and tensor is None and id(buffer) not in self.own:
                    self.reason = (
                        f"it reads a tensor of shape {tuple(array.shape)} that nothing it holds leads to"
                    )

    def _find_outputs(self, live: list[Buffer], at: dict[int, int], lasting: dict[int, Tensor]) -> None:
        """Say where each output goes: an argument, a buffer that lives on, or a new tensor."""
        origins = {id(origin()) for origin in trace.origins}
        self.targets: list[tuple[str, Any]] = []
        self.born: dict[int, int] = {}
        for buffer in live:
            key = id(buffer)
            if key in at:
                self.targets.append(("argument", at[key]))
            elif key in lasting:
                self.targets.append(("buffer", buffer))
            else:
                self.born[key] = len(self.targets)
                self.targets.append(("new", buffer.signature))
                if key in origins and type(buffer.held) is Node:
                    self.reason = "it writes to a tensor that nothing it holds leads to"
        buffers = [target for kind, target in self.targets if kind == "buffer"]
        self.written = [lasting[id(b)] for b in buffers if not lasting[id(b)].is_inference()]

    def _result(self, found: Any, flat: list[Any], at: dict[int, int], born: set[int]) -> tuple[Any, ...]:
        """Say what a replay returns in the place of one result."""
        place = next(
            (n for n, value in enumerate(flat) if value is found and isinstance(value, Tensor)), None
        )
        if place is not None:
            return ("place", place)
        if not isinstance(found, Tensor):
            return ("same", found)
        if not _is_ours(found):
            return ("copy", found.clone()) if id(found) in born else ("same", found)
        key = id(buffer_of(found))
        if key in self.born:
            return ("new", self.born[key], _layout(found))
        return ("argument", at[key], _layout(found)) if key in at else ("same", found)

    def _find_grads(self, grads: list[tuple[Tensor, Any]], flat: list[Any]) -> None:
        """Say which gradients a replay makes and which it drops; those it adds to are buffers that live on."""
        self.grads: list[tuple[Any, int, Layout]] = []
        self.dropped: list[Any] = []
        self.added: list[tuple[Any, Tensor]] = []
        places = {id(t): n for n, t in enumerate(flat)}
        used = {id(b) for kind, b in (*self.sources, *self.targets) if kind == "buffer"}
        for leaf, before in grads:
            who, grad = places.get(id(leaf), leaf), leaf.grad
            if grad is None:
                self.dropped += [who] if before is not None else []
            elif _is_ours(grad) and id(buffer_of(grad)) in self.born:
                self.grads.append((who, self.born[id(buffer_of(grad))], _layout(grad)))
            elif grad is not before:
                self.reason = "it puts other tensors into .grad"
            if before is not None and _is_ours(before) and id(buffer_of(before)) in used:
                self.added.append((who, before))
        if any(type(who) is int for who, _ in self.added):
            self.reason = "it adds to the gradient of an argument"

    def _find_draws(self, start: tuple[int, int]) -> None:
        """Say which offsets of the generator are drawn, counted from where it stands when a replay begins."""
        self.generators = list(trace.generators)
        words = [[int(word) for word in draw] for draw in trace.draws]
        drawn = [(high << 32 | low, far << 32 | near) for high, low, far, near in words]
        end = generator.state()
        mine = [*[d for d, g in zip(drawn, self.generators, strict=True) if g is None], end]
        if any(seed != start[0] or offset < start[1] for seed, offset in mine):
            self.reason = "it seeds the generator"
        self.advance = end[1] - start[1]
        self.steps = [offset - start[1] for _, offset in drawn]

    def _why_not(self) -> str:
        """Return why the recording cannot be replayed, or "" if it can."""
        stranger = self.roots.stranger()
        if stranger:
            return f"it uses a {stranger} that nothing it holds leads to"
        now = self.roots.again()
        self.guard.narrow(self._used())
        self.lasting = frozenset(id(buffer) for _, buffer, _ in self.guard.buffers)
        changed = self.guard.changed(now)
        if changed:
            return f"it changes {changed}"
        if any(isinstance(t, Tensor) and _is_ours(t) and id(buffer_of(t)) in self.born for t in now.found):
            return "it keeps a tensor that it makes"
        wanted = {n for kind, n, *_ in self.results if kind == "new"} | {n for _, n, _ in self.grads}
        if set(self.born.values()) - wanted:
            return "it makes tensors that outlive it and that it does not return"
        return ""

    def _used(self) -> set[int]:
        """Return the buffers, not those of arguments, that the program reads or writes, and those arguments share."""
        used = {id(b) for kind, b in (*self.sources, *self.targets) if kind == "buffer"}
        return used | {buffer for buffer in self.shared if buffer is not None}

    def _check_graphs(self, result: list[Any]) -> None:
        """Raise if the caller may want to differentiate a result, whose graph a replay does not have."""
        if any(isinstance(t, Tensor) and t.grad_fn is not None for t in result) and not self.differentiates:
            self.reason = "a result requires grad"
            raise JitError(
                "isthmus.jit: a result requires grad, but a replay has no autograd graph to go back through; call "
                "backward() inside the function, return result.detach(), or call it under torch.no_grad()"
            )

    def _first_run(
        self, wanted: tuple[Node, ...], live: list[Buffer], shardings: programs.Shardings
    ) -> Callable[[], None]:
        """Compute what the recording left, give it to its buffers, and return how to check the conditions."""
        self.writes: list[tuple[int, int, str, Any]] = []
        if not wanted:
            self.complete = True
            return _nothing
        family = programs.family_of(wanted, shardings)
        self.order = family.order(wanted, shardings)
        state, results = self._state(family.graph, wanted)
        dying = programs.dying(family) - {leaf for leaf, _ in state.pairs} if self.donate else frozenset()
        program: Any = family.find(dying, state, results)
        self._use(program)
        self.lines = dict(trace.lines)
        self.constants = program.pack_numbers(trace.numbers, trace.offsets)
        whole, bundles = program.packing.pick(trace.arrays.__getitem__)
        residence = self._residence()

        def bind(results: Sequence[Any]) -> None:
            for place, n, _, _ in self.writes:
                if n < len(live):
                    live[n].compute(results[place])
            self.complete = True

        try:
            residence.begin(donation.own(whole), bundles)
            arrays = [trace.arrays[at] for at in program.slots]
            outputs = runner.run(
                program, arrays, bind, constants=self.constants, draws=trace.draws, residence=residence
            )
        except BaseException:
            if not self.complete:
                residence.give_back()
            raise
        return partial(program.report, outputs, self.lines)

    def _state(self, graph: Graph, wanted: tuple[Node, ...]) -> tuple[StateLayout, tuple[int, ...] | None]:
        """Return the state, which the program reads from buffers that live on and writes to them, and other results."""
        if not (self.replayable and self.donate and config.donate == "auto" and config.backend == "xla"):
            return STATELESS, None
        written = {id(target): n for n, (kind, target) in enumerate(self.targets) if kind == "buffer"}
        pairs, kept = [], set()
        for leaf in [n.call for n in graph.inputs if isinstance(n.call, Leaf) and n.call.kind == "array"]:
            kind, buffer = self.sources[leaf.index]
            n = written.get(id(buffer)) if kind == "buffer" else None
            if n is not None and wanted[n].type == leaf.type:
                pairs.append((leaf.index, self.order[n]))
                kept.add(n)
        plain = dict.fromkeys(place for n, place in enumerate(self.order) if n not in kept)
        return StateLayout(tuple(pairs)), tuple(plain)

    def _use(self, program: Any) -> None:
        """Find out where the program's inputs come from and its results go."""
        self.residences = runner.Residences(program)
        self.inputs = [self.sources[at] for at in program.slots]
        state = {id(self.sources[leaf][1]) for leaf in program.packing.inputs}
        places = program.places
        self.writes = [
            (places[self.order[n]], n, kind, self._computed(program, n) if kind == "new" else target)
            for n, (kind, target) in enumerate(self.targets)
            if kind != "buffer" or id(target) not in state
        ]

    def _computed(self, program: Any, n: int) -> Signature:
        """Return the signature of a new buffer; where XLA was to choose how it is split, it has."""
        signature: Signature = self.targets[n][1]
        if signature.sharding is not placement.OPEN:
            return signature
        sharding = program.result_shardings[program.results.index(self.order[n])]
        return Signature.intern(signature.shape, signature.dtype, sharding=sharding)

    def _residence(self) -> Residence:
        """Return where the state is; there is one set of buffers."""
        assert self.residences is not None
        return self.residences.find((), lambda leaf: self.sources[leaf][1])

    def holds(self, roots: Roots, flat: list[Any]) -> bool:
        """Return whether everything the recording depends on is as it was when it began."""
        if self._shared(flat) != self.shared or not self.guard.holds(roots):
            return False
        if not all([leaf.grad is grad for leaf, grad in self.added]):
            return False
        if not self.values:
            return True
        buffers = [buffer_of(t) if _is_ours(t) else None for t in flat]
        return all([value.holds(buffers) for value in self.values])

    def run(self, flat: list[Any]) -> Any:
        """Do what the recording did, on these arguments."""
        draws = self._draw()  # also where no program reads them: the generator moves on
        if self.residences is None:
            return self._given(self._write((), flat), flat)
        new: dict[int, Buffer] = {}
        residence = self._residence()
        program = self.residences.program
        outputs = runner.run(
            program,
            [_source(kind, source, flat) for kind, source in self.inputs],
            lambda results: new.update(self._write(results, flat)),
            constants=self.constants,
            draws=draws,
            residence=residence,
        )
        counters.count("replays")
        program.report(outputs, self.lines)
        return self._given(new, flat)

    def _given(self, new: dict[int, Buffer], flat: list[Any]) -> Any:
        """Return what a replay returns."""
        return tree_unflatten([_give(result, new, flat) for result in self.results], self.spec)

    def _draw(self) -> list[Any]:
        """Return the words for each draw of the recording, and move the generator on as the recording did."""
        if not self.generators:
            return []
        base = generator.advance(self.advance)
        pairs = zip(self.generators, self.steps, strict=True)
        return [generator.draw(g) if g is not None else generator.words(base, step) for g, step in pairs]

    def _write(self, found: Sequence[Any], flat: list[Any]) -> dict[int, Buffer]:
        """Give outputs to those they belong to, and return the new buffers by their places."""
        new: dict[int, Buffer] = {}
        touched = list(self.written)
        for at, n, kind, target in self.writes:
            value = found[at]
            if kind == "buffer":
                target.bind(value)
            elif kind == "argument":
                buffer_of(flat[target]).bind(value)
                touched += [] if flat[target].is_inference() else [flat[target]]
            else:
                new[n] = Buffer(value, target)
        if touched:
            torch.autograd.graph.increment_version(touched)
        for who in self.dropped:
            _owner(who, flat).grad = None
        for who, n, layout in self.grads:
            _owner(who, flat).grad = _tensor(new[n], layout)
        return new


def _nothing() -> None:
    """Do nothing about conditions: there are none."""


def _owner(who: Any, flat: list[Any]) -> Tensor:
    """Return the tensor whose gradient it is: a parameter, or an argument by its place."""
    return flat[who] if type(who) is int else who


def _resolved(leaf: Any) -> Any:
    return leaf.resolve_conj().resolve_neg() if _is_ours(leaf) else leaf


def _is_ours(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "jax"


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype


def _source(kind: str, source: Any, flat: list[Any]) -> Any:
    """Return the buffer or the array of one input."""
    if kind == "argument":
        return buffer_of(flat[source])
    if kind == "moved":
        place, tensor, again = source
        return again(tensor if place is None else flat[place])
    return source


def _tensor(buffer: Buffer, layout: Layout) -> Tensor:
    size, stride, offset, dtype = layout
    tensor = new_tensor(size, None if is_as_made(size, stride) else stride, dtype, buffer)
    return restride(tensor, size, stride, offset) if offset else tensor


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
        size, stride, offset, dtype = layout[0]
        return restride(attach_to(dtype, flat[value].untyped_storage()), size, stride, offset)
    return _tensor(new[value], layout[0])
