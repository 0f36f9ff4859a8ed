"""A graph as programs: one executable for each set of sizes its arguments come in, run on the tensors' own buffers.

``Program.__call__`` is what runs when a compiled function is called. It turns the arguments into a key (signatures of
buffers, layouts, static values, which targets share storage) and *sources* (buffers, arrays that share another
device's memory, offsets), and calls the ``Run`` (``running.py``) or ``RangedRun`` (``ranged.py``) of that key; a new
key makes a ``Specialization``::

    key      [(signature, float32, (8, 16), (16, 1), False), 3, ()]
    sources  [buffer of x]

Most calls are like the one before, so ``LastCall`` compares first, in a few C calls, and then no key is made. For
graphs that write nothing ``fast_path.py`` goes further still.

The programs are in an ``LruCache`` of ``options["programs"]`` entries. When one is dropped, ``LastCall`` and the fast
path are forgotten too, as either may lead to it.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.fx import GraphModule

from isthmus._caches import LruCache
from isthmus._device.core import mode
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.entry import alias_pattern, static_part
from isthmus._device.core.views import holds_booleans, store_bytes
from isthmus._device.torch_glue.private import likeness
from isthmus._dynamo import dlpack, ranged
from isthmus._dynamo.options import Options
from isthmus._dynamo.random import NO_WORDS, Draw
from isthmus._dynamo.ranged import RangedRun
from isthmus._dynamo.running import Run
from isthmus._dynamo.specialization import Specialization
from isthmus._runtime import forks, watching
from isthmus._runtime.host_arrays import device_number
from isthmus.errors import ConfigError

_aten = torch.ops.aten
_BUFFER, _SIGNATURE = attrgetter("_buffer"), attrgetter("signature")


class Program:
    """A graph whose every node is lowered, as a callable of torch tensors.

    ``parameters`` are the places of arguments that may be taken for constants (``_graph/passes/freeze.py``).
    """

    def __init__(
        self, module: GraphModule, options: Options, name: str, parameters: Set[int] = frozenset()
    ) -> None:
        self.module, self.options, self.name, self.parameters = module, options, name, parameters
        nodes = list(module.graph.nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        # At most one: ``key_random_nodes`` makes one draw per graph.
        self.draw = next((node.target for node in nodes if isinstance(node.target, Draw)), None)
        # Several trailing ``copy_``s may write to one argument; it is one target.
        targets = [node.args[0] for node in nodes if node.target is _aten.copy_.default]
        self.targets = [self.placeholders.index(node) for node in dict.fromkeys(targets)]
        if parameters & {*self.targets}:
            raise ConfigError(
                "options={'freeze': True} takes parameters and buffers for constants, but this graph writes to one"
            )
        program = ref(self)
        self.runs: LruCache[Any, Run | RangedRun] = LruCache(
            "programs of compiled graphs", options.programs, lambda run: _forget_last(program())
        )
        self.last: LastCall | None = None
        # Called when a program is dropped: the fast path may lead to it (``backend._unwrapped``).
        self.on_drop: Callable[[], None] = lambda: None

    def __call__(self, args: list[Any]) -> Any:
        """Run one call; ``args`` is emptied."""
        # A compiled call looks nothing up that would notice a fork.
        if forks.forked:
            forks.check()
        # Recorded ops come before this call.
        if mode.current.lazy:
            with mode.reason("a compiled function"):
                mode.current.materialise()
        last = self.last
        sources = last.sources(args) if last is not None else None
        if last is None or sources is None:
            # Only for calls of a new kind: a storage that holds booleans changes its signature here.
            for target in [args[at] for at in self.targets]:
                if target.device.type == "jax" and holds_booleans(target):
                    store_bytes(target)  # so that what is written is what is read
            key, sources = _gather(args)
            run = self._find(key, args, sources)
        else:
            run = last.run
        if self.draw is not None:
            sources.append(self.draw.words())
        if watching.watchers:
            return watching.run("torch.compile", self.name, lambda: run(args, sources))
        return run(args, sources)

    def _find(self, key: list[Any], args: list[Any], sources: list[Any]) -> Run | RangedRun:
        targets = [args[at] for at in self.targets]
        aliases = alias_pattern(tuple(targets))
        known = (*key, aliases)
        run = self.runs.get(known)
        if run is None:
            words = [NO_WORDS] if self.draw is not None else []
            run = self.runs[known] = self._specialize(args, [*sources, *words])
        # ``LastCall`` compares tensors of the device alone.
        local = all([isinstance(arg, Tensor) and arg.device.type == "jax" for arg in args])
        # The short comparison looks at no storage that is shared, and at no tensor of another device.
        self.last = LastCall(args, self.targets, run) if local and not aliases else None
        return run

    def _specialize(self, args: list[Any], sources: list[Any]) -> Run | RangedRun:
        """Return the run of the graph on arguments of new sizes."""
        one = Specialization(self, args, sources)
        ranged_run = ranged.find(one, args, sources, self._specialized) if self.options.ranged else None
        return ranged_run or Run(one)

    def _specialized(self, args: list[Any]) -> Specialization:
        words = [NO_WORDS] if self.draw is not None else []
        return Specialization(self, args, [*_gather(args)[1], *words])


def _forget_last(program: Program | None) -> None:
    """Let the next call look its program up again."""
    if program is not None:
        program.last = None
        program.on_drop()


class LastCall:
    """The last call of a program, to tell whether the next is like it, in loops that Python does not run."""

    def __init__(self, args: list[Any], targets: list[int], run: Run | RangedRun) -> None:
        self.alike, self.targets, self.run = likeness(args), targets, run
        self.signatures = [buffer_of(arg).signature for arg in args]
        self.moved = [arg.storage_offset() != 0 for arg in args]

    def sources(self, args: list[Any]) -> list[Any] | None:
        """Return where the inputs of a call come from, or None if it is not like the last one."""
        if not self.alike(*args):
            return None
        buffers = [*map(_BUFFER, map(Tensor.untyped_storage, args))]
        offsets = [*map(Tensor.storage_offset, args)]
        if [*map(_SIGNATURE, buffers)] != self.signatures or [*map(bool, offsets)] != self.moved:
            return None
        if len({*[id(buffers[at]) for at in self.targets]}) != len(self.targets):
            return None  # storages are written to twice
        if not any(offsets):
            return buffers
        pairs = zip(buffers, offsets, strict=True)
        return [part for buffer, at in pairs for part in ((buffer, device_number(at)) if at else (buffer,))]


def _gather(args: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the key that a program is compiled for, and where its inputs come from.

    That is a buffer for each tensor of ours and an array for each other one, followed by an offset where it has one.
    """
    key: list[Any] = []
    sources: list[Any] = []
    arrive = dlpack.Arrivals()
    for arg in args:
        if not isinstance(arg, Tensor):
            key.append(static_part(arg))
            continue
        try:
            buffer = arg.untyped_storage()._buffer  # type: ignore[attr-defined]
        except AttributeError:
            sources.append(arrive(arg))
            key.append((arg.device, arg.dtype, arg.shape, arg.stride()))
            continue
        offset = arg.storage_offset()
        key.append((buffer.signature, arg.dtype, arg.shape, arg.stride(), offset != 0))
        sources.append(buffer)
        if offset:
            sources.append(device_number(offset))
    return key, sources
