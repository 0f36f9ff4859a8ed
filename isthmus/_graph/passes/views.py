"""Views of views become one view, and a read of elements that were just written becomes these elements.

Every op of lazy mode and ``torch.compile`` reads its arguments from storages and stores its results by views
(``_graph/view_calls.py``). Most of these undo each other: a transposed result is stored by ``permute`` and read back by
``permute``. In-place ops add a write and a read of the whole view for each op, which must not become a copy.
"""

from __future__ import annotations

import torch

from isthmus._graph import view_calls
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Callee, Input, Node, node
from isthmus._graph.passes.rewrite import Rule, is_call, type_of

_aten = torch.ops.aten
_VIEW, _PERMUTE, _EXPAND = _aten.view.default, _aten.permute.default, _aten.expand.default
_RETYPE, _READ, _WRITE = _aten.view.dtype, _aten.as_strided.default, _aten.as_strided_scatter.default
_CAST = _aten._to_copy.default


def fold_views(graph: Graph) -> Rule:
    """Return the rule: views of views are one, and reads of what was just written are what was written."""
    return _folded_view


def _folded_view(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    # A view, cast or clone that changes nothing is its input.
    if call.op in _SAME and len(call.types) == 1 and inputs and call.types[0] == inputs[0].type:
        return inputs[0]
    fold = _FOLDS.get(call.op)
    return None if fold is None else fold(call, inputs)


def _view(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    (source,), type = inputs, type_of(call)
    if not is_call(source, _VIEW):
        return None
    base = source.inputs[0]
    return base if base.type == type else node(view_calls.view(base.type, type.size), base)


def _permute(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    (source,), order = inputs, _dims(call)
    if is_call(source, _PERMUTE):
        # Two permutations in a row are one; if that is the identity, none.
        assert isinstance(source.call, Call)
        inner = _dims(source.call)
        source, order = source.inputs[0], tuple(inner[d] for d in order)
    if order == tuple(range(len(order))):
        return source
    return None if source is inputs[0] else node(view_calls.permute(source.type, order), source)


def _expand(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    (source,) = inputs
    if not is_call(source, _EXPAND):
        return None
    base = source.inputs[0]
    (again,) = view_calls.expand(base.type, type_of(call).size)
    return node(again, base)


def _retype(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    (source,), type = inputs, type_of(call)
    if not is_call(source, _RETYPE):
        return None
    base = source.inputs[0]
    # A byte that is neither 0 nor 1 does not come back from a bool.
    return base if base.type == type and source.type.dtype != torch.bool else None


def _read(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    source, *offset = inputs
    if not is_call(source, _WRITE):
        return None
    assert isinstance(source.call, Call)
    _, written, *place = source.inputs
    # The same layout and the same offset, and a write of just these elements: nothing else was there.
    same = _layout(call) == _layout(source.call) and offset == place and written.type == type_of(call)
    return written if same and _is_injective(*_layout(call)[:2]) else None


def _write(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    source, new, *offset = inputs
    if not is_call(source, _WRITE):
        return None
    assert isinstance(source.call, Call)
    base, _, *place = source.inputs
    # The later write covers the earlier one.
    return (
        node(call, base, new, *offset) if _layout(call) == _layout(source.call) and offset == place else None
    )


_SAME = frozenset({_VIEW, _EXPAND, _RETYPE, _CAST, _aten.clone.default})
_FOLDS: dict[Callee, Rule] = {
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


def _layout(call: Call) -> tuple[tuple[int, ...], tuple[int, ...], int | None]:
    """Return the size, stride and offset of a read or a write; no offset where that is an input."""
    arguments = dict(call.arguments)
    offset = arguments.get("storage_offset")
    return arguments["size"], arguments["stride"], None if isinstance(offset, Input) else offset


def _is_injective(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether a layout shows no element twice, as far as its strides tell."""
    if not all(isinstance(n, int) for n in (*size, *stride)):
        return False  # symbols of an exported graph have no order
    reach = 0
    # Sorted by stride: each step has to leave everything that smaller steps reach.
    for step, n in sorted((s, n) for n, s in zip(size, stride, strict=True) if n > 1):
        if step <= reach:
            return False
        reach += step * (n - 1)
    return True
