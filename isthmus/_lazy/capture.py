"""One recording of a function, to be replayed: what it reads, what it writes, what it returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from isthmus._device import checks, generator, mode
from isthmus._device.buffer import Buffer
from isthmus._device.hosts import copied
from isthmus._device.private import empty_tensor, restride
from isthmus._graph.nodes import Node
from isthmus._graph.schema import schema_of
from isthmus._lazy import programs
from isthmus._lazy.guards import Guard
from isthmus._lazy.lines import user_line
from isthmus._lazy.roots import Roots
from isthmus._lazy.trace import trace
from isthmus._runtime import counters
from isthmus.errors import JitError

_UNLIMITED = 2**62
# A value only its buffer holds is counted there, in the list of inputs and as an argument of getrefcount.
_OWNED = 3


class OnTheCpu(TorchDispatchMode):
    """Refuses what a replay would not do again: reading, changing and drawing tensors of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.born: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        result = None
        if any(t.device.type != "jax" for t in given) and not any(t.device.type == "jax" for t in given):
            self._check(func, given, args, kwargs)
        result = func(*args, **kwargs)
        made = [t for t in _tensors(result) if t.device.type != "jax"]
        if made and torch.Tag.nondeterministic_seeded in func.tags:
            raise JitError(
                f"isthmus.jit: {func} draws random numbers on the CPU ({user_line()}), which a replay would "
                f'not draw again; draw them on the device, with device="jax"'
            )
        self.born |= {id(t): t for t in made}
        return result

    def _check(self, func: Any, given: list[Tensor], args: Any, kwargs: Any) -> None:
        if func is torch.ops.aten.lift_fresh.default:
            return  # torch.tensor(...) passes what it has just made through here
        moves = any(isinstance(v, torch.device) and v.type == "jax" for v in (*args, *kwargs.values()))
        old = [t for t in given if id(t) not in self.born]
        if moves or not old:
            return
        schema = schema_of(func)
        written = [v for n, v in schema.bind(args, kwargs).items() if n in schema.mutated]
        if any(id(t) not in self.born for t in _tensors(written)):
            raise JitError(
                f"isthmus.jit: {func} changes a tensor on the CPU ({user_line()}), which a replay would not do "
                f"again. An optimizer's step counter stays on the device with capturable=True; move other "
                f'tensors to "jax" before the call'
            )
        raise JitError(
            f"isthmus.jit: {func} computes with a tensor on the CPU ({user_line()}), which a replay would not do "
            f'again; move the tensor to "jax" first'
        )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


class Capture:
    """A function recorded once with given arguments; ``run`` does what the recording did, on other tensors."""

    def __init__(self, roots: Roots, donate: bool) -> None:
        self.roots, self.donate = roots, donate
        self.hosts: dict[int, tuple[Any, Tensor, Callable[[Tensor], Any]]] = {}

    def note_host(self, array: Any, tensor: Tensor, again: Callable[[Tensor], Any]) -> None:
        """Remember that an array was moved in from a tensor of another device, and how to do it again."""
        self.hosts[id(array)] = (array, tensor, again)

    def refuse_fallback(self, op: Any, reason: str) -> Exception:
        """Return the error for an op that would run on the CPU."""
        return JitError(
            f"isthmus.jit: {op} would run on the CPU ({reason}; {user_line()}); move it out of the function, or give "
            f"it a lowering (docs/add-a-lowering.md)"
        )

    def _refusal(self) -> Exception:
        return JitError(
            f"isthmus.jit: a value is read while the function is recorded ({user_line()}), by .item(), .cpu(), "
            f"bool(), print or an op whose result's size depends on values. Return the tensor and read it outside"
        )

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the function, keep what a replay needs, and return its result."""
        with trace.lock:
            programs.materialise()
            flat, _ = tree_flatten((args, kwargs))
            known = len(self.roots)
            self.guard = Guard(self.roots)
            arguments = [t for t in flat if _is_ours(t) and t.is_leaf and t.requires_grad]
            self.leaves = [(t, t.grad) for t in [*self.guard.parameters, *arguments]]
            result = self._watched(function, args, kwargs)
            try:
                return self._keep(result, flat, known)
            finally:
                trace.refusal = None
                trace.reset()

    def _watched(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        lazy = mode.current.lazy
        watch = OnTheCpu()
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self.roots.watching())
            mode.current.lazy, mode.current.capture = True, self
            trace.refusal, trace.limit = self._refusal, _UNLIMITED
            try:
                with watch:
                    found = function(*args, **kwargs)
            except BaseException:
                # As in eager, what was done before the error is done.
                trace.refusal = None
                programs.materialise()
                raise
            finally:
                mode.current.lazy, mode.current.capture = lazy, None
        self.moved = [(t, array, again) for array, t, again in self.hosts.values() if id(t) not in watch.born]
        return found

    def _keep(self, result: Any, flat: list[Any], known: int) -> Any:
        leaves, self.spec = tree_flatten(result)
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        live = trace.live()
        at = {id(_buffer(t)): n for n, t in enumerate(flat) if _is_ours(t)}
        lasting = {id(buffer): tensor for tensor, buffer in self.guard.buffers}
        self.lasting = frozenset(lasting)
        lasting |= {id(_buffer(g)): g for _, g in self.leaves if _is_ours(g)}
        self.shared = [id(_buffer(t)) in self.lasting for t in flat if _is_ours(t)]
        self._find_inputs(flat, at)
        self._find_outputs(leaves, live, at, lasting)
        self._find_grads(flat)
        self.reason = self._why_not(known)
        self.leaves, self.moved, self.hosts = (
            [],
            [],
            {},
        )  # nothing of this call but what a replay needs is kept
        outputs = self._first_run(live)
        for buffer, value in zip(live, outputs, strict=True):
            buffer.held = value
        return tree_unflatten(leaves, self.spec)

    def _why_not(self, known: int) -> str:
        """Return why the recording cannot be replayed, or "" if it can."""
        if len(self.roots) != known:
            return "it uses modules or optimizers that were not known before"
        changed = self.guard.unchanged()
        if changed:
            return f"it changes {changed}"
        wanted = {n for kind, n, *_ in self.results if kind == "new"} | {n for _, n, _ in self.grads}
        if set(self.born.values()) - wanted:
            return "it makes tensors that outlive it and that it does not return"
        return "it puts other tensors into .grad" if self.strange_grads else ""

    def _find_inputs(self, flat: list[Any], at: dict[int, int]) -> None:
        """Say where each leaf's array comes from: an argument, a buffer that lives on, the host, or this recording."""
        self.sources: list[tuple[str, Any]] = []
        moved = {id(array): (tensor, again) for tensor, array, again in self.moved}
        places = {id(value): n for n, value in enumerate(flat) if isinstance(value, Tensor)}
        for array, origin in zip(trace.arrays, trace.origins, strict=True):
            buffer = origin()
            if id(array) in moved:
                tensor, again = moved[id(array)]
                place = places.get(id(tensor))
                self.sources.append(("moved", (place, None if place is not None else tensor, again)))
            elif buffer is not None and id(buffer) in at:
                self.sources.append(("argument", at[id(buffer)]))
            elif buffer is not None:
                self.sources.append(("buffer", buffer))
            else:
                self.sources.append(("constant", array))

    def _find_outputs(
        self, leaves: list[Any], live: list[Buffer], at: dict[int, int], lasting: dict[int, Tensor]
    ) -> None:
        """Say where each result goes: an argument, a buffer that lives on, or a new tensor."""
        old = {id(origin()) for origin in trace.origins} | set(lasting)
        self.targets: list[tuple[str, Any]] = []
        self.born: dict[int, int] = {}
        for buffer in live:
            if id(buffer) in at:
                self.targets.append(("argument", at[id(buffer)]))
            elif id(buffer) in old:
                self.targets.append(("buffer", buffer))
            else:
                self.born[id(buffer)] = len(self.targets)
                self.targets.append(("new", buffer.signature))
        buffers = [target for kind, target in self.targets if kind == "buffer"]
        self.written = [lasting[id(b)] for b in buffers if id(b) in lasting]
        self.results = [self._result(leaf, at, old) for leaf in leaves]

    def _result(self, leaf: Any, at: dict[int, int], old: set[int]) -> tuple[Any, ...]:
        if not isinstance(leaf, Tensor) or not _is_ours(leaf):
            return ("same", leaf)
        buffer = _buffer(leaf)
        if id(buffer) in self.born:
            return ("new", self.born[id(buffer)], _layout(leaf))
        if id(buffer) in at:
            return ("argument", at[id(buffer)], _layout(leaf))
        if id(buffer) in old:
            return ("same", leaf)
        return ("constant", (buffer.held, buffer.signature), _layout(leaf))

    def _find_grads(self, flat: list[Any]) -> None:
        """Say which gradients a replay makes and which it drops; those it adds to are buffers that live on."""
        self.grads: list[tuple[Any, int, Any]] = []
        self.dropped: list[Any] = []
        self.strange_grads = False
        places = {id(t): n for n, t in enumerate(flat)}
        used = {id(b) for kind, b in (*self.sources, *self.targets) if kind == "buffer"}
        self.kept: list[tuple[Any, Any]] = []
        for leaf, before in self.leaves:
            owner = places.get(id(leaf), leaf)
            if leaf.grad is None:
                self.dropped += [owner] if before is not None else []
            elif _is_ours(leaf.grad) and id(_buffer(leaf.grad)) in self.born:
                self.grads.append((owner, self.born[id(_buffer(leaf.grad))], _layout(leaf.grad)))
            elif leaf.grad is not before:
                self.strange_grads = True
            if before is not None and _is_ours(before) and id(_buffer(before)) in used:
                self.kept.append((owner, before))
        # What is added to must be the very tensor it was; an argument's gradient is another's at every call.
        self.strange_grads |= any(type(owner) is int for owner, _ in self.kept)

    def _first_run(self, live: list[Buffer]) -> list[Any]:
        wanted: tuple[Node, ...] = tuple([b.held for b in live])
        if not wanted:
            self.program: Any = None
            return []
        self.family, self.program = programs.find(wanted, self.donate)
        self.wanted = wanted
        self.inputs = [self.sources[leaf.index] for leaf in self.program.arrays]
        self.constants, self.lines = self.program.constants(trace), dict(trace.lines)
        self.generators = list(trace.generators[: self.program.draws])
        arrays = [trace.arrays[leaf.index] for leaf in self.program.arrays]
        trace.arrays.clear()
        found = self.program(arrays, self.constants, trace.draws[: self.program.draws])
        checks.settle(self.program.flags(found, trace.lines))
        return self.family.spread(wanted, found)

    @property
    def replayable(self) -> bool:
        """Whether ``run`` does what the function would."""
        return self.reason == ""

    def holds(self, flat: list[Any]) -> bool:
        """Return whether everything the recording depends on is as it was when it began."""
        if not self.guard.holds():
            return False
        if [id(_buffer(t)) in self.lasting for t in flat if _is_ours(t)] != self.shared:
            return False
        return all([leaf.grad is grad for leaf, grad in self.kept])

    def run(self, flat: list[Any]) -> Any:
        """Do what the recording did, on these arguments."""
        found: list[Any] = []
        if self.program is not None:
            inputs = [_take(kind, source, flat) for kind, source in self.inputs]
            for index in self.program.donated:
                if getrefcount(inputs[index]) != _OWNED:
                    inputs[index] = copied(inputs[index])
            draws = [generator.draw(g) for g in self.generators]
            outputs = self.program(inputs, self.constants, draws)
            counters.count("replays")
            del inputs
            found = self.family.spread(self.wanted, outputs)
            flags = self.program.flags(outputs, self.lines)
            if flags:
                checks.settle(flags)
        new = self._write(found, flat)
        return tree_unflatten([_give(result, new, flat) for result in self.results], self.spec)

    def _write(self, found: list[Any], flat: list[Any]) -> dict[int, Buffer]:
        new: dict[int, Buffer] = {}
        touched = list(self.written)
        for n, ((kind, target), value) in enumerate(zip(self.targets, found, strict=True)):
            if kind == "buffer":
                target.held = value
            elif kind == "argument":
                _buffer(flat[target]).held = value
                touched.append(flat[target])
            else:
                new[n] = Buffer(value, target)
        if touched:
            torch.autograd.graph.increment_version([t for t in touched if not t.is_inference()])
        for owner in self.dropped:
            _owner(owner, flat).grad = None
        for owner, n, layout in self.grads:
            _owner(owner, flat).grad = _tensor(new[n], layout)
        return new


def _owner(owner: Any, flat: list[Any]) -> Tensor:
    """Return the tensor whose gradient it is: a parameter, or an argument by its place."""
    return flat[owner] if type(owner) is int else owner


def _is_ours(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "jax"


def _buffer(tensor: Tensor) -> Buffer:
    return tensor.untyped_storage()._buffer  # type: ignore[attr-defined]


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype


def _take(kind: str, source: Any, flat: list[Any]) -> Any:
    if kind == "buffer":
        return source.held
    if kind == "argument":
        return _buffer(flat[source]).held
    if kind == "moved":
        place, tensor, again = source
        return again(tensor if place is None else flat[place])
    return source


def _tensor(buffer: Buffer, layout: tuple[Any, ...]) -> Tensor:
    size, stride, offset, dtype = layout
    tensor = empty_tensor(size, dtype)
    tensor.untyped_storage()._buffer = buffer  # type: ignore[attr-defined]
    return tensor if tensor.stride() == stride and not offset else restride(tensor, size, stride, offset)


def _give(result: tuple[Any, ...], new: dict[int, Buffer], flat: list[Any]) -> Any:
    kind, value, *layout = result
    if kind == "same":
        return value
    if kind == "argument":
        size, stride, offset, _ = layout[0]
        return restride(flat[value].detach(), size, stride, offset)
    if kind == "constant":
        return _tensor(Buffer(*value), layout[0])
    return _tensor(new[value], layout[0])
