"""A graph as programs: one executable for each set of sizes its arguments come in, run on the tensors' own buffers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from isthmus._device.core import mode
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.entry import alias_pattern, static_part
from isthmus._device.core.views import holds_booleans, store_bytes
from isthmus._device.torch_glue.private import likeness
from isthmus._dynamo import dlpack
from isthmus._dynamo.options import Options
from isthmus._dynamo.random import NO_WORDS, Draw
from isthmus._dynamo.running import Run
from isthmus._dynamo.specialization import Specialization
from isthmus._runtime import forks
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
        self.draw = next((node.target for node in nodes if isinstance(node.target, Draw)), None)
        targets = [node.args[0] for node in nodes if node.target is _aten.copy_.default]
        self.targets = [self.placeholders.index(node) for node in dict.fromkeys(targets)]
        if parameters & {*self.targets}:
            raise ConfigError(
                "options={'freeze': True} takes parameters and buffers for constants, but this graph writes to one"
            )
        self.runs: OrderedDict[Any, Run] = OrderedDict()
        self.last: Like | None = None

    def __call__(self, args: list[Any]) -> Any:
        """Run one call; ``args`` is emptied."""
        if forks.forked:
            forks.check()
        if mode.current.lazy:
            with mode.reason("a compiled function"):
                mode.current.materialise()
        last = self.last
        sources = last.sources(args) if last is not None else None
        if last is None or sources is None:
            for target in [args[at] for at in self.targets]:
                if target.device.type == "jax" and holds_booleans(target):
                    store_bytes(target)  # so that what is written is what is read
            key, sources = _gather(args)
            run = self._find(key, args, sources)
        else:
            run = last.run
        if self.draw is not None:
            sources.append(self.draw.words())
        return run(args, sources)

    def _find(self, key: list[Any], args: list[Any], sources: list[Any]) -> Run:
        targets = [args[at] for at in self.targets]
        found = (*key, alias_pattern(tuple(targets)))
        run = self.runs.get(found)
        if run is None:
            words = [NO_WORDS] if self.draw is not None else []
            run = self.runs[found] = Run(Specialization(self, args, [*sources, *words]))
            if len(self.runs) > self.options.programs:
                self.runs.popitem(last=False)
        self.runs.move_to_end(found)
        local = all([isinstance(arg, Tensor) and arg.device.type == "jax" for arg in args])
        self.last = Like(args, self.targets, run) if local and not found[-1] else None
        return run


class Like:
    """The last call of a program, to tell whether the next is like it, in loops that Python does not run."""

    def __init__(self, args: list[Any], targets: list[int], run: Run) -> None:
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
    """Return what a program is compiled for, and where its inputs come from.

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
