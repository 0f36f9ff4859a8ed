"""Recompilation storms: a line that needs a new program every time is warned about once, with what changed and advice.

``sync_reasons.note`` reports every run of a recorded graph with the user's line. After ``_IN_A_ROW`` new programs at
one line the last two graphs are compared (``change``), and the warning names the first difference in the order of
computation, and the primitive that kept other sizes from sharing a program, if one did::

    5 new programs in a row were compiled for this line.
      what changed  array 0, read by aten.mm.default as self, was float32[7, 4], is float32[8, 4], between the last two
      not padded    fft: an axis that is padded
      to fix it     pad it, or let it come in a few sizes only (buckets): ...

Of a line that was warned about the last graph is kept (``last``): ``programs.py`` compares the next one with it, to
compute what changes apart from what does not. Warnings are given by ``warn`` once all locks are free, since a filter
may turn them into exceptions.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from isthmus._caches import LruCache
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Input, Leaf, Node, exact

# Fewer new programs in a row are a loop that warms up.
_IN_A_ROW = 5
_LINES = 64

_SHAPE = "pad it, or let it come in a few sizes only (buckets): each set of sizes is a program of its own"
_DTYPE = "give it the same dtype every time: x.to(dtype) where it is made"
_NUMBER = "give it the same Python type every time, as in float(n)"
_CONSTANT = "it is compiled in: keep it the same, or compute what depends on it from a tensor on the device"
_BRANCH = "a Python branch or loop took another way: use torch.where, or as many rounds every time"
_CONTEXT = "set it once, before the loop"
_KEPT = "keep the same tensors every time: what nobody can read any more is not computed"
_HELD = 'hold on to the same tensors every time, or set isthmus.config.donate = "off"'


class RecompilationWarning(UserWarning):
    """A line of the program has a new program compiled every time it runs."""


# How many programs in a row were new at a line, and the graph of the last.
_rows: LruCache[str, tuple[int, Graph]] = LruCache("lines with new programs", _LINES)
# Lines that were warned about, each once; as many as the program has.
_warned: set[str] = set()
# The last graphs of those.
_last: LruCache[str, Graph] = LruCache("graphs of lines with new programs", _LINES)
_due: list[tuple[str, str]] = []


def reset(line: str) -> None:
    """Note that a line found its program: the row of new ones ends."""
    _rows.pop(line)


def last(line: str) -> Graph | None:
    """Return the last graph of a line that was warned about, None of any other."""
    return _last.get(line)


def note(line: str, graph: Graph, refusal: str = "") -> None:
    """Note that a line needed a new program; ``warn`` says so if that was one too many.

    ``refusal`` is the primitive that could not be padded, and why, where one kept the line from having one program for
    a range of sizes.
    """
    if not line:
        return
    if line in _warned:
        # Its graphs are still kept: ``_stages`` compares the next one with them.
        _last[line] = graph
        return
    count, before = _rows.pop(line) or (0, None)
    count += 1
    if before is None or count < _IN_A_ROW:
        _rows[line] = count, graph
        return
    _warned.add(line)
    _last[line] = graph
    what, advice = change(before, graph)
    _due.append((
        line,
        f"{count} new programs in a row were compiled for this line.\n"
        f"  what changed  {what}, between the last two\n"
        + (f"  not padded    {refusal}\n" if refusal else "")
        + f"  to fix it     {advice}",
    ))  # fmt: skip


def forget() -> None:
    """Forget all lines, those that were warned about among them."""
    for each in (_rows, _warned, _last, _due):
        each.clear()


def warn() -> None:
    """Give the warnings that are due, at the lines they are about."""
    while _due:
        line, message = _due.pop()
        filename, number = line.rsplit(":", 1)
        warnings.warn_explicit(message, RecompilationWarning, filename, int(number))


def change(old: Graph, new: Graph) -> tuple[str, str]:
    """Return what tells two graphs apart, the first thing in the order of computation, and what to do about it."""
    pairs = list(zip(old.nodes, new.nodes, strict=False))
    # Graphs with the same ops in the same order differ in sizes, numbers or arguments; say which.
    if len(old.nodes) == len(new.nodes) and all([_name(a) == _name(b) for a, b in pairs]):
        # The size of a tensor often decides arguments of ops that come before those that read it.
        for before, after in pairs:
            difference = _between_inputs(before, after)
            if difference is not None:
                return difference
    places = [{n: at for at, n in enumerate(graph.nodes)} for graph in (old, new)]
    for before, after in pairs:
        difference = None if before is after else _between(before, after, *places)
        if difference is not None:
            return difference
    if len(old.nodes) != len(new.nodes):
        longer, at = max(old, new, key=lambda g: len(g.nodes)), len(pairs)
        extra = f"the first that only one of the two has is {_name(longer.nodes[at])}"
        return f"the number of ops was {len(old.nodes)}, is {len(new.nodes)}; {extra}", _BRANCH
    if _places(old.outputs, places[0]) != _places(new.outputs, places[1]):
        return f"other results are kept: {len(old.outputs)} before, {len(new.outputs)} now", _KEPT
    return "nothing in the graph, but which of its tensors somebody holds, or where a view starts", _HELD


def _between(
    before: Node, after: Node, old_places: dict[Node, int], new_places: dict[Node, int]
) -> tuple[str, str] | None:
    """Return what tells two nodes apart, all nodes before them being alike."""
    difference = _between_inputs(before, after)
    if difference is not None:
        return difference
    if _name(before) != _name(after):
        return f"the op was {_name(before)}, is {_name(after)}", _BRANCH
    if isinstance(before.call, Call) and isinstance(after.call, Call):
        difference = _between_calls(before.call, after.call)
    if difference is None and _places(before.inputs, old_places) != _places(after.inputs, new_places):
        return f"{_name(after)} reads other values", _BRANCH
    return difference


def _between_inputs(before: Node, after: Node) -> tuple[str, str] | None:
    """Return what tells the leaves that two nodes read apart."""
    for at, (old, new) in enumerate(zip(before.inputs, after.inputs, strict=False)):
        if old is not new and isinstance(old.call, Leaf) and isinstance(new.call, Leaf):
            difference = _between_leaves(old.call, new.call, _reader(after, at))
            if difference is not None:
                return difference
    return None


def _between_leaves(old: Leaf, new: Leaf, reader: str) -> tuple[str, str] | None:
    """Return what tells two leaves apart, if they are the same input of their programs."""
    if old.kind == new.kind == "number" and old.number is not new.number:
        return f"a number, {reader}, was of type {old.number.__name__}, is {new.number.__name__}", _NUMBER
    # Not the same input of the two programs: the difference is elsewhere.
    if (old.kind, old.index) != (new.kind, new.index) or old.type == new.type:
        return None
    advice = _SHAPE if old.type.size != new.type.size else _DTYPE
    return f"array {old.index}, {reader}, was {old.type}, is {new.type}", advice


def _between_calls(old: Call, new: Call) -> tuple[str, str] | None:
    """Return what tells two calls of one op apart; other types of results alone follow from their inputs."""
    was, now = dict(old.arguments), dict(new.arguments)
    for name in [*now, *(was.keys() - now.keys())]:
        # ``exact`` tells 1 from 1.0 and True, which are equal in Python.
        if exact(was.get(name)) != exact(now.get(name)):
            text = f"{_said(was, name)}, is {_said(now, name)}"
            return f"argument {name} of {new.op} was {text}", _advice(was.get(name), now.get(name))
    if old.context[0] != new.context[0]:
        return f"torch's default dtype was {old.context[0]}, is {new.context[0]}", _CONTEXT
    if old.context[1] != new.context[1]:
        return f"the float32 matmul precision was {old.context[1]}, is {new.context[1]}", _CONTEXT
    return None


def _advice(old: Any, new: Any) -> str:
    if isinstance(old, torch.dtype) or isinstance(new, torch.dtype):
        return _DTYPE
    # An argument that is a list of integers is a size.
    sizes = [isinstance(value, tuple) and all(type(n) is int for n in value) for value in (old, new)]
    return _SHAPE if all(sizes) else _CONSTANT


def _said(arguments: dict[str, Any], name: str) -> str:
    if name not in arguments:
        return "its default"
    value = arguments[name]
    return "an input" if isinstance(value, Input) else repr(list(value) if type(value) is tuple else value)


def _name(node: Node) -> str:
    """Return the op of a node, or which of its results it is."""
    call = node.call
    return str(call.op) if isinstance(call, Call) else str(call)


def _reader(node: Node, at: int) -> str:
    """Return which argument of which op a node's input is."""
    call = node.call
    assert isinstance(call, Call)
    names = [name for name, value in call.arguments if at in _indices(value)]
    return f"read by {call.op}" + (f" as {names[0]}" if names else "")


def _indices(value: Any) -> list[int]:
    if isinstance(value, Input):
        return [value.index]
    return [at for item in value for at in _indices(item)] if isinstance(value, tuple) else []


def _places(nodes: tuple[Node, ...], places: dict[Node, int]) -> list[Any]:
    """Return for each node where it is in its graph: an input or the place of a call."""
    return [(n.call.kind, n.call.index) if isinstance(n.call, Leaf) else places[n] for n in nodes]
