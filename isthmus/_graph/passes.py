"""Passes: functions from graphs to graphs that compute the same, each in time linear in the graph.

What nothing needs is not in a graph, and what is computed twice is one node, so neither needs a pass. A rule looks at
one call whose inputs are rewritten already, and says what it is instead; one round is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from isthmus._graph import view_calls
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Input, Item, Leaf, Node, Type, call_of, node

Rule = Callable[[Call, tuple[Node, ...]], Node | None]
_aten = torch.ops.aten
_VIEW, _PERMUTE, _EXPAND = _aten.view.default, _aten.permute.default, _aten.expand.default
_RETYPE, _READ, _WRITE = _aten.view.dtype, _aten.as_strided.default, _aten.as_strided_scatter.default
_CAST, _FULL = _aten._to_copy.default, _aten.full.default


def optimise(graph: Graph) -> Graph:
    """Return a graph that computes the same with fewer calls; inputs that nothing needs any more are gone."""
    for apply in PASSES:
        graph = apply(graph)
    return graph


def drop_dead(graph: Graph) -> Graph:
    """Return the graph without what its outputs do not need."""
    return replace(Graph.of(graph.outputs), origins=graph.origins)


def fold_views(graph: Graph) -> Graph:
    """Return the graph with views of views made one, and reads of what was just written made what was written."""
    return rewrite(graph, _folded_view)


def fold_constants(graph: Graph) -> Graph:
    """Return the graph with tensors of one known number, cast or seen otherwise, made such tensors at once.

    A constant is ``aten.full`` with a number that is no input and exact in its dtype; there are no others.
    """
    return rewrite(graph, _folded_constant)


PASSES: tuple[Callable[[Graph], Graph], ...] = (drop_dead, fold_views, fold_constants)


def rewrite(graph: Graph, rule: Rule, leaves: dict[Node, Node] | None = None) -> Graph:
    """Return the graph with each call replaced by what the rule makes of it, or made again if that is nothing."""
    new = remade(graph.nodes, leaves or {}, rule)
    origins = {new[old]: graph.origins.get(old, old) for old in reversed(graph.nodes)}
    return replace(Graph.of(tuple(new.get(output, output) for output in graph.outputs)), origins=origins)


def remade(
    nodes: Iterable[Node], known: Mapping[Node, Node], rule: Rule = lambda call, inputs: None
) -> dict[Node, Node]:
    """Return nodes made anew, those ``known`` among their inputs replaced; inputs in neither stay as they are."""
    new = dict(known)
    for old in nodes:
        inputs = tuple(new.get(given, given) for given in old.inputs)
        if isinstance(old.call, Item):
            found = inputs[0].results[old.call.index]
            assert found is not None
            new[old] = found
        else:
            assert isinstance(old.call, Call)
            new[old] = rule(old.call, inputs) or node(old.call, *inputs)
    return new


def share_offsets(graph: Graph, values: dict[int, int]) -> Graph:
    """Return the graph with one leaf for all offsets that have the same value, by their index, in ``values``."""
    first: dict[int, Node] = {}
    leaves: dict[Node, Node] = {}
    for n in graph.inputs:
        if isinstance(n.call, Leaf) and n.call.kind == "offset" and n.call.index in values:
            leaves[n] = first.setdefault(values[n.call.index], n)
    return rewrite(graph, lambda call, inputs: None, leaves) if len(first) < len(leaves) else graph


def _folded_view(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    if call.op in _SAME and len(call.types) == 1 and inputs and call.types[0] == inputs[0].type:
        return inputs[0]
    fold = _FOLDS.get(call.op)
    return None if fold is None else fold(call, inputs)


def _view(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    (given,), type = inputs, _type(call)
    if not _is(given, _VIEW):
        return None
    base = given.inputs[0]
    return base if base.type == type else node(view_calls.view(base.type, type.size), base)


def _permute(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    (given,), order = inputs, _dims(call)
    if _is(given, _PERMUTE):
        assert isinstance(given.call, Call)
        inner = _dims(given.call)
        given, order = given.inputs[0], tuple(inner[d] for d in order)
    if order == tuple(range(len(order))):
        return given
    return None if given is inputs[0] else node(view_calls.permute(given.type, order), given)


def _expand(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    (given,) = inputs
    if not _is(given, _EXPAND):
        return None
    base = given.inputs[0]
    (again,) = view_calls.expand(base.type, _type(call).size)
    return node(again, base)


def _retype(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    (given,), type = inputs, _type(call)
    if not _is(given, _RETYPE):
        return None
    base = given.inputs[0]
    # A byte that is neither 0 nor 1 does not come back from a bool.
    return base if base.type == type and given.type.dtype != torch.bool else None


def _read(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    given, *offset = inputs
    if not _is(given, _WRITE):
        return None
    assert isinstance(given.call, Call)
    _, written, *place = given.inputs
    same = _layout(call) == _layout(given.call) and offset == place and written.type == _type(call)
    return written if same and _is_injective(*_layout(call)[:2]) else None


def _write(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    given, new, *offset = inputs
    if not _is(given, _WRITE):
        return None
    assert isinstance(given.call, Call)
    base, _, *place = given.inputs
    return (
        node(call, base, new, *offset) if _layout(call) == _layout(given.call) and offset == place else None
    )


_SAME = frozenset({_VIEW, _EXPAND, _RETYPE, _CAST, _aten.clone.default})
_FOLDS: dict[Any, Rule] = {
    _VIEW: _view,
    _PERMUTE: _permute,
    _EXPAND: _expand,
    _RETYPE: _retype,
    _READ: _read,
    _WRITE: _write,
}


def _is(given: Node, op: Any) -> bool:
    return isinstance(given.call, Call) and given.call.op is op


def _type(call: Call) -> Type:
    (found,) = call.types
    assert found is not None
    return found


def _dims(call: Call) -> tuple[int, ...]:
    dims: tuple[int, ...] = dict(call.arguments)["dims"]
    return tuple(d % len(dims) for d in dims)


def _layout(call: Call) -> tuple[Any, ...]:
    """Return what a read or a write says of its view, but for an offset that is an input."""
    found = dict(call.arguments)
    offset = found.get("storage_offset")
    return found["size"], found["stride"], None if isinstance(offset, Input) else offset


def _is_injective(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether a layout shows no element twice, as far as its strides tell."""
    reach = 0
    for step, n in sorted((s, n) for n, s in zip(size, stride, strict=True) if n > 1):
        if step <= reach:
            return False
        reach += step * (n - 1)
    return True


def _folded_constant(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    """Return the constant that a call is, if it is one."""
    if call.random or len(call.types) != 1 or call.types[0] is None:
        return None
    type = _type(call)
    if call.op in _MAKERS:
        number = _made(call)
    elif call.op in _SHOWS:
        number = _number(inputs[0])
    else:
        return None
    number = None if number is None else _exact(number, type.dtype)
    return None if number is None else constant(type, number)


def constant(type: Type, number: Any) -> Node:
    """Return the node of a tensor all of whose elements are this number."""
    return node(call_of(_FULL, {"size": type.size, "fill_value": number, "dtype": type.dtype}, [type]))


_SHOWS = frozenset({_VIEW, _PERMUTE, _EXPAND, _READ, _CAST, _aten.clone.default})
_MAKERS: dict[Any, int | None] = {
    _aten.zeros.default: 0,
    _aten.ones.default: 1,
    _FULL: None,
    _aten.zeros_like.default: 0,
    _aten.ones_like.default: 1,
    _aten.full_like.default: None,
}


def _made(call: Call) -> Any:
    """Return the number that a call fills its result with; None if it is not known."""
    number = _MAKERS[call.op]
    number = dict(call.arguments).get("fill_value") if number is None else number
    return None if isinstance(number, Input) else number


def _number(given: Node) -> Any:
    """Return the number of a constant, None of anything else."""
    if not _is(given, _FULL):
        return None
    assert isinstance(given.call, Call)
    number = dict(given.call.arguments)["fill_value"]
    return None if isinstance(number, Input) else _exact(number, given.type.dtype)


def _exact(number: Any, dtype: torch.dtype) -> Any:
    """Return a number as an element of this dtype, or None if it is not one: devices may round it differently."""
    wide = _WIDEST[type(number)]
    if (wide.is_complex and not dtype.is_complex) or (wide == torch.int64 and abs(number) >= 2**63):
        return None
    found = torch.tensor(number, dtype=wide, device="cpu").to(dtype).item()
    return found if found == number else None


_WIDEST = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
