"""Views of views become one view, and a read of elements that were just written becomes these elements.

Every op of lazy mode and ``torch.compile`` reads its arguments from storages and stores its results by views
(``_graph/view_calls.py``). Most of these undo each other: a transposed result is stored by ``permute`` and read back by
``permute``. In-place ops add a write and a read of the whole view for each op, which must not become a copy.
"""

from __future__ import annotations

from typing import Any

import torch

from isthmus._graph import view_calls
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Input, Node, node
from isthmus._graph.passes.rewrite import Rule, is_call, type_of

_aten = torch.ops.aten
_VIEW, _PERMUTE, _EXPAND = _aten.view.default, _aten.permute.default, _aten.expand.default
_RETYPE, _READ, _WRITE = _aten.view.dtype, _aten.as_strided.default, _aten.as_strided_scatter.default
_CAST = _aten._to_copy.default


def fold_views(graph: Graph) -> Rule:
    """Return the rule: views of views are one, and reads of what was just written are what was written."""
    return _folded_view


def _folded_view(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    if call.op in _SAME and len(call.types) == 1 and inputs and call.types[0] == inputs[0].type:
        return inputs[0]
    fold = _FOLDS.get(call.op)
    return None if fold is None else fold(call, inputs)


def _view(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    (given,), type = inputs, type_of(call)
    if not is_call(given, _VIEW):
        return None
    base = given.inputs[0]
    return base if base.type == type else node(view_calls.view(base.type, type.size), base)


def _permute(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    (given,), order = inputs, _dims(call)
    if is_call(given, _PERMUTE):
        assert isinstance(given.call, Call)
        inner = _dims(given.call)
        given, order = given.inputs[0], tuple(inner[d] for d in order)
    if order == tuple(range(len(order))):
        return given
    return None if given is inputs[0] else node(view_calls.permute(given.type, order), given)


def _expand(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    (given,) = inputs
    if not is_call(given, _EXPAND):
        return None
    base = given.inputs[0]
    (again,) = view_calls.expand(base.type, type_of(call).size)
    return node(again, base)


def _retype(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    (given,), type = inputs, type_of(call)
    if not is_call(given, _RETYPE):
        return None
    base = given.inputs[0]
    # A byte that is neither 0 nor 1 does not come back from a bool.
    return base if base.type == type and given.type.dtype != torch.bool else None


def _read(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    given, *offset = inputs
    if not is_call(given, _WRITE):
        return None
    assert isinstance(given.call, Call)
    _, written, *place = given.inputs
    same = _layout(call) == _layout(given.call) and offset == place and written.type == type_of(call)
    return written if same and _is_injective(*_layout(call)[:2]) else None


def _write(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    given, new, *offset = inputs
    if not is_call(given, _WRITE):
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
    if not all(isinstance(n, int) for n in (*size, *stride)):
        return False  # symbols of an exported graph have no order
    reach = 0
    for step, n in sorted((s, n) for n, s in zip(size, stride, strict=True) if n > 1):
        if step <= reach:
            return False
        reach += step * (n - 1)
    return True
