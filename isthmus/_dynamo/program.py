"""A graph as programs: one executable for each set of sizes its arguments come in, run on the tensors' own buffers."""

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from isthmus._device import mode
from isthmus._device.entry import alias_pattern, static_part
from isthmus._dynamo import crossing
from isthmus._dynamo.options import Options
from isthmus._dynamo.random import NO_WORDS, Draw
from isthmus._dynamo.running import Run
from isthmus._dynamo.specialization import Specialization
from isthmus._runtime.hosts import device_number

_aten = torch.ops.aten
_BUFFER, _IDENTITY = attrgetter("_buffer"), attrgetter("_cdata")
_SIGNATURE, _DTYPE = attrgetter("signature"), attrgetter("dtype")


class Program:
    """A graph whose every node is lowered, as a callable of torch tensors."""

    def __init__(self, module: GraphModule, options: Options, name: str) -> None:
        self.module, self.options, self.name = module, options, name
        nodes = list(module.graph.nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.draw = next((node.target for node in nodes if isinstance(node.target, Draw)), None)
        targets = [node.args[0] for node in nodes if node.target is _aten.copy_.default]
        self.targets = [self.placeholders.index(node) for node in dict.fromkeys(targets)]
        self.runs: OrderedDict[Any, Run] = OrderedDict()
        # Most calls are like the last one: to compare them costs less than to look for it.
        self.last: tuple[list[Any], Run] | None = None

    def __call__(self, args: list[Any]) -> Any:
        """Run one call; ``args`` is emptied."""
        key, sources = _gather(args)
        if len(self.targets) > 1:
            key.append(_aliases([args[at] for at in self.targets]))
        last = self.last
        run = last[1] if last is not None and last[0] == key else self._find(key, args, sources)
        if self.draw is not None:
            sources.append(self.draw.words())
        return run(args, sources)

    def _find(self, key: list[Any], args: list[Any], sources: list[Any]) -> Run:
        found = tuple(key)
        run = self.runs.get(found)
        if run is None:
            words = [NO_WORDS] if self.draw is not None else []
            run = self.runs[found] = Run(Specialization(self, args, [*sources, *words]))
            if len(self.runs) > self.options.programs:
                self.runs.popitem(last=False)
        self.runs.move_to_end(found)
        self.last = key, run
        return run


def _aliases(targets: list[Tensor]) -> tuple[int, ...]:
    """Return which of the tensors written to share a storage; () where none do."""
    storages = {*map(_IDENTITY, map(Tensor.untyped_storage, targets))}
    return () if len(storages) == len(targets) else alias_pattern(tuple(targets))


def _gather(args: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return what a program is compiled for, and where its inputs come from.

    That is a buffer for each tensor of ours and an array for each other one, followed by an offset where it has one.
    """
    if mode.current.lazy:
        mode.current.materialise()
    try:
        sources = [*map(_BUFFER, map(Tensor.untyped_storage, args))]
    except (AttributeError, TypeError):
        return _gather_each(args)
    offsets = [*map(Tensor.storage_offset, args)]
    key = [*map(_SIGNATURE, sources), *map(_DTYPE, args), *map(Tensor.size, args)]
    # Of a contiguous tensor the size says everything.
    if not all(map(Tensor.is_contiguous, args)):
        key += map(Tensor.stride, args)
    if any(offsets):
        key += map(bool, offsets)
        pairs = zip(sources, offsets, strict=True)
        sources = [part for s, at in pairs for part in ((s, device_number(at)) if at else (s,))]
    return key, sources


def _gather_each(args: list[Any]) -> tuple[list[Any], list[Any]]:
    """Do the same where some arguments are numbers, or tensors of another device."""
    key: list[Any] = []
    sources: list[Any] = []
    for arg in args:
        if not isinstance(arg, Tensor):
            key.append(static_part(arg))
            continue
        try:
            buffer = arg.untyped_storage()._buffer  # type: ignore[attr-defined]
        except AttributeError:
            sources.append(crossing.arrive(arg))
            key.append((arg.device, arg.dtype, arg.shape, arg.stride()))
            continue
        offset = arg.storage_offset()
        key.append((buffer.signature, arg.dtype, arg.shape, arg.stride(), offset != 0))
        sources.append(buffer)
        if offset:
            sources.append(device_number(offset))
    return key, sources
