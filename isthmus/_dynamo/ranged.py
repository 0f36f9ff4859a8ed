"""Compiled graphs whose sizes change: runs of programs for ranges of sizes (``_program/ranges.py``).

``Program._find`` asks ``find`` for arguments of new sizes, before it compiles for them. The graph of a specialization
has numbers for sizes, so graphs of one FX graph, and those of the static graph that Dynamo made of the first size, are
alike but for their sizes. What varies are sizes that are symbols for Dynamo, so ``dynamic=False`` compiles exactly::

    model = torch.compile(model, options={"shapes": "auto"})
    for tokens in sentences:                # lengths 9, 17, 23, 12, ...
        loss = model(tokens)                # exact for 9; then one program up to 32, one up to 16, ...

Storage offsets are numbers of the graph here, though inputs of an exact program: the offset of a view such as
``x[:, -1]`` depends on sizes, and a range of offsets would be no slice. So a run finds its program by its offsets too.

Results stay padded in their buffers (``Slack``) and so reach backward as they are. Arguments belong to the caller:
donated are those that are written and that nothing else holds, and copies made to pad others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from isthmus._device.checks import value_checks
from isthmus._device.core.buffer import Buffer, Signature, buffer_of, new_tensor
from isthmus._device.core.slots import TensorSlot
from isthmus._device.torch_glue.private import restride
from isthmus._dynamo import compile_log, marks
from isthmus._dynamo.layout import Symbols
from isthmus._dynamo.running import Run
from isthmus._dynamo.saved_tensors import Contents
from isthmus._dynamo.specialization import Specialization
from isthmus._graph.graph import Graph
from isthmus._graph.layout import storage_shape
from isthmus._graph.nodes import Leaf
from isthmus._program import padded_sources, ranges
from isthmus._program.ranges import Match
from isthmus._runtime import placement
from isthmus._runtime.padding.sizes import Refused

_MOST_OFFSETS = 64
Specialized = Callable[[list[Any]], Specialization]


class RangedRun:
    """A specialization that programs for ranges of sizes serve, as a callable like ``running.Run``."""

    def __init__(self, specialization: Specialization, offsets: tuple[int, ...], match: Match) -> None:
        self.specialization = one = specialization
        self.matches: dict[tuple[int, ...], Match | None] = {offsets: match}
        self.targets = one.targets
        self.written = {one.index(at) for at in one.targets} if one.donates else set()
        self.auto = value_checks.auto()
        self.wrap = one.returns.wrapper(None)
        self.exact: Run | None = None
        self.quick: Callable[..., Any] | None = None

    def __call__(self, args: list[Any], sources: list[Any]) -> Any:
        """Run one call; ``args`` is emptied."""
        match = self._match(args, sources)
        if match is None:
            self.exact = self.exact or Run(self.specialization)
            return self.exact(args, sources)
        program, compiled = match.program, match.program.compiled
        new: list[Any] = []
        outputs: list[Any] = []

        def keep(values: list[Any], results: Sequence[Any]) -> None:
            new[:], outputs[:] = values, results
            self._write(args, values)

        inputs = [sources[at] for at in program.slots]
        written = {n for n, at in enumerate(program.slots) if at in self.written}
        padded_sources.run(program, match.sizes, inputs, written, compiled.arguments([], (), ()), keep)
        result = self.wrap(args, new[len(self.targets) :])
        args.clear()
        program.report(outputs, auto=self.auto, sizes=match.sizes)
        return result

    def _match(self, args: list[Any], sources: list[Any]) -> Match | None:
        """Return the program for the offsets of these arguments; None where they are run exactly."""
        offsets = _offsets(self.specialization, args)
        if offsets not in self.matches:
            if len(self.matches) == _MOST_OFFSETS:
                self.matches.clear()
            self.matches[offsets] = _find(self.specialization, offsets, sources)
        return self.matches[offsets]

    def _write(self, args: list[Any], values: Sequence[Any]) -> None:
        """Give written arguments their new contents."""
        targets = [args[at] for at in self.targets]
        for target, value in zip(targets, values, strict=False):
            buffer_of(target).bind(value)
        if targets and not targets[0].is_inference():
            torch.autograd.graph.increment_version(targets)


def find(
    one: Specialization, args: list[Any], sources: Sequence[Any], specialized: Specialized
) -> RangedRun | None:
    """Return a run by a program for a range of sizes, None where the specialization is compiled exactly.

    ``specialized`` returns the specialization for other arguments, whose arrays it does not read.
    """
    if not _is_plain(one, sources):
        return None
    offsets = _offsets(one, args)
    # ``isthmus.explain`` shows exact programs, and says whether others would serve other sizes.
    explained = compile_log.is_recording()
    at_once = one.program.options.at_once or explained or any(map(marks.is_another, _symbols(one)))
    others = partial(_others, one, args, specialized) if at_once else None
    match = _find(one, offsets, sources, others)
    return None if match is None or explained else RangedRun(one, offsets, match)


def _find(
    one: Specialization,
    offsets: tuple[int, ...],
    sources: Sequence[Any],
    others: Callable[[], list[Graph]] | None = None,
) -> Match | None:
    given = lambda slots: padded_sources.given([sources[at] for at in slots])  # noqa: E731
    options = one.program.options.xla
    try:
        graph = _lifted(one, offsets)
        if any(isinstance(n.call, Leaf) for n in graph.outputs):
            return None
        if not _symbols(one):
            # Dynamo has fixed all sizes: because they are the first, or because that was asked for.
            ranges.remember(graph, options)
            return None
        fixed = {*one.arrays} - _varying(one)
        return ranges.find(graph, given, options, limits=_limits(one), others=others, fixed=fixed)
    except Refused as error:
        ranges.note(error)
        compile_log.refused(one.program.name, str(error))
        return None


def _symbols(one: Specialization) -> list[torch.SymInt]:
    """Return the sizes and numbers among the arguments of a graph that are symbols."""
    values = [fx.meta.get("val") for fx in one.program.placeholders]
    sizes = [n for value in values for n in (value.shape if isinstance(value, torch.Tensor) else (value,))]
    return [n for n in sizes if isinstance(n, torch.SymInt)]


def _varying(one: Specialization) -> set[int]:
    """Return the leaves whose sizes are symbols of the graph: those of parameters are not."""
    pairs = zip(one.program.placeholders, one.slots, strict=True)
    arrays = [(fx, slot) for fx, slot in pairs if isinstance(slot, TensorSlot)]
    return {
        slot.index for fx, slot in arrays if any(isinstance(n, torch.SymInt) for n in fx.meta["val"].shape)
    }


def _limits(one: Specialization) -> dict[tuple[int, int], int]:
    """Return the largest size of each dim of a leaf of which a mark says it."""
    found = {}
    for fx, slot in zip(one.program.placeholders, one.slots, strict=True):
        if isinstance(slot, TensorSlot) and one.arrays[slot.index].size == slot.spec.size:
            for dim, size in enumerate(fx.meta["val"].shape):
                most = marks.largest(size)
                if most is not None:
                    found[slot.index, dim] = most
    return found


def _others(one: Specialization, args: list[Any], specialized: Specialized) -> list[Graph]:
    """Return the graph for other values of its symbols: each of them changed alone, then all."""
    symbols = Symbols(one.program.placeholders, args)
    names = [symbol for symbol, value in symbols.values.items() if value > 1]
    changes = [{name: factor} for name in names for factor in (2, 3)]
    if len(names) > 1:
        changes.append(dict.fromkeys(names, 2))
    graphs = []
    for change in changes:
        values = {name: value * change.get(name, 1) for name, value in symbols.values.items()}
        try:
            resized = _resized(one, args, symbols.having(values))
            other = specialized(resized)
            graphs.append(_lifted(other, _offsets(other, resized)))
        except Exception:
            # Arguments that cannot be: the first size is compiled exactly.
            return []
    return graphs


def _resized(one: Specialization, args: list[Any], symbols: Symbols) -> list[Any]:
    """Return arguments of other sizes, without contents."""
    resized: list[Any] = []
    # What each size of an argument that is a symbol becomes.
    shapes = [
        (fx.meta["val"].shape, arg.shape)
        for fx, arg in zip(one.program.placeholders, args, strict=True)
        if isinstance(arg, torch.Tensor)
    ]
    lengths = {
        now: symbols(n)
        for shape, sizes in shapes
        for n, now in zip(shape, sizes, strict=True)
        if isinstance(n, torch.SymInt)
    }
    for fx, slot, arg in zip(one.program.placeholders, one.slots, args, strict=True):
        value = fx.meta.get("val")
        if not isinstance(slot, TensorSlot):
            resized.append(symbols(value) if isinstance(value, torch.SymInt) else arg)
            continue
        size = tuple(symbols(n) for n in value.shape)
        stride = tuple(symbols(n) for n in value.stride())
        storage = storage_shape(size, stride)
        if one.arrays[slot.index].size != storage_shape(tuple(arg.shape), tuple(arg.stride())):
            storage = _resized_storage(one.arrays[slot.index].size, arg, stride, lengths)
        signature = Signature.intern(storage, buffer_of(arg).signature.dtype)
        tensor = new_tensor(size, stride, arg.dtype, Buffer(None, signature))
        offset = symbols(value.storage_offset())
        resized.append(restride(tensor, size, stride, offset) if offset else tensor)
    return resized


def _resized_storage(
    storage: tuple[int, ...], view: torch.Tensor, stride: tuple[int, ...], lengths: Mapping[int, int]
) -> tuple[int, ...]:
    """Return the storage that a view of another size shows a part of: as the strides of the view tell.

    Where they do not, ``lengths`` has what other sizes of that length became. A guess that is wrong costs a compilation
    and no more: the graph of a storage that cannot be is no sample of the graphs that come.
    """
    steps = dict(zip(view.stride(), stride, strict=True))
    found: list[int] = []
    inside = outside = 1  # elements inside of an axis, before and after
    for n in reversed(storage):
        inside *= n
        found.append(steps[inside] // outside if inside in steps else lengths.get(n, n))
        outside *= found[-1]
    return tuple(reversed(found))


def _lifted(one: Specialization, offsets: tuple[int, ...]) -> Graph:
    """Return the graph of a specialization without strides, for views that start there."""
    values = dict(zip(_moved(one).values(), offsets, strict=True))
    return ranges.lifted_strides(lambda: one.graph, lambda leaf: values.get(leaf.index))


def _moved(one: Specialization) -> dict[int, int]:
    """Return the arguments that start inside of their storage, each with the source that is its offset."""
    return {
        at: slot.offset_index
        for at, slot in enumerate(one.slots)
        if isinstance(slot, TensorSlot) and slot.offset_index is not None
    }


def _offsets(one: Specialization, args: list[Any]) -> tuple[int, ...]:
    return tuple([args[at].storage_offset() for at in _moved(one)])


def _is_plain(one: Specialization, sources: Sequence[Any]) -> bool:
    """Return whether all arguments and results are arrays of one device."""
    if placement.home is not None or one.devices != {"jax"}:
        return False
    if any(isinstance(places, tuple) for places in one.inputs):
        return False
    if any(isinstance(spec, Contents) for spec in one.returns.specs):
        return False
    if any(fx.meta["val"].device.type != "jax" for fx in one.returns.roots):
        return False
    return not any(isinstance(source, Buffer) and source.signature.traced for source in sources)
