"""Converters of ops that FX graphs and ``Graph``s say differently: reads through strides, writes, asserts, sizes.

``convert.py`` turns an FX node into a call of the same op where that op has a lowering or a decomposition. The ops in
``CONVERTERS`` mean something that a graph on arrays says otherwise: a storage, a write, an effect. Each converter gets
the ``Conversion``, the FX node and its arguments with nodes of ``_graph`` in them, and returns the value::

    as_strided(x, (3,), (2,), 1)     x an argument: a read of its storage through strides (``view_calls.read_node``)
    copy_(x, new)                    nothing is written: ``conversion.written[x]`` is a result of the program
    _assert_async(ok)                a node that requires ``ok``, in ``conversion.effects``, so that it is computed

What can go wrong: strides of a node refer to the memory that eager would have given it, so its value is laid out like
that first (``store``). What a converter cannot say raises ``Unsupported``, and the node stays outside of programs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node as FxNode

from isthmus._dynamo import layout
from isthmus._dynamo.saved_tensors import KEEP, KEPT, lost
from isthmus._graph import view_calls
from isthmus._graph.layout import Spec, span
from isthmus._graph.nodes import Input, Node, Type, call_of, node
from isthmus._graph.private import OpOverload
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported

if TYPE_CHECKING:
    from isthmus._dynamo.convert import Conversion

_aten = torch.ops.aten
_NUMBER = Type((), torch.int64)


def _as_strided(
    conversion: Conversion, fx: FxNode, x: Any, size: Any, stride: Any, storage_offset: int | None = None
) -> Any:
    """Return the elements that strides find in the storage of the node that ``x`` is a view of."""
    base = fx.args[0]
    assert isinstance(base, FxNode)
    # Views of views are read from the storage of the first.
    root = layout.root_of(base)
    # An exported reshape: sizes may be symbols, and a grid of strides would need to divide them.
    if conversion.mode == "export" and _is_reshape(fx):
        whole = conversion.values[root]
        return node(view_calls.view(whole.type, tuple(size)), whole)
    start = conversion.symbols(
        base.meta["val"].storage_offset() if storage_offset is None else storage_offset
    )
    spec = Spec(tuple(size), tuple(stride), fx.meta["val"].dtype, start)
    if root in conversion.storages:
        return _of_argument(conversion, root, spec)
    if conversion.inside and root.op == "placeholder":
        raise Unsupported("strides of an argument of a graph inside a graph")
    whole = conversion.values[root]
    # A node's value is laid out as eager would have stored it, which strides refer to.
    storage = view_calls.chained(view_calls.store(conversion.symbols.root_spec(root, whole.type.size)), whole)
    _check_bounds(storage, spec)
    return view_calls.read_node(storage, spec)


def _of_argument(conversion: Conversion, root: FxNode, spec: Spec) -> Node:
    storage = conversion.storages[root]
    # torch's fake tensor may start elsewhere in its storage than the argument does.
    start = spec.offset - conversion.symbols(root.meta["val"].storage_offset())
    if storage.offset is None:
        spec = replace(spec, offset=start)
        _check_bounds(storage.node, spec)
        return view_calls.read_node(storage.node, spec)
    offset = storage.offset
    # The offset of an argument is an input of the program; what torch adds to it is a constant.
    if start:
        offset = node(call_of(operator.add, {"0": Input(0), "1": start}, [_NUMBER]), offset)
    return view_calls.read_node(storage.node, spec, offset)


def _as_strided_scatter(
    conversion: Conversion,
    fx: FxNode,
    x: Node,
    src: Node,
    size: Any,
    stride: Any,
    storage_offset: int | None = None,
) -> Any:
    """Return ``x`` with the elements that strides find in a storage of its layout replaced."""
    base = fx.args[0]
    assert isinstance(base, FxNode)
    spec = conversion.symbols.root_spec(base, x.type.size)
    storage = view_calls.chained(view_calls.store(spec), x)
    view = Spec(tuple(size), tuple(stride), x.type.dtype, storage_offset or 0)
    _check_bounds(storage, view)
    written = view_calls.write_node(storage, view, src)
    return view_calls.read_node(written, spec)


def _copy(conversion: Conversion, fx: FxNode, target: Node, source: Node, non_blocking: bool = False) -> Any:
    """Record the new value of an argument of the graph, which the program will write there."""
    place = fx.args[0]
    # Writes anywhere else were functionalized by torch; one that is left cannot be done.
    whole = not conversion.inside and conversion.mode != "export"
    if not whole or not isinstance(place, FxNode) or place.op != "placeholder":
        raise Unsupported("a write to anything but an argument of the whole graph")
    new = conversion.call(fx, _aten.copy.default, {"self": target, "src": source})
    conversion.written[place] = new
    return new


def _keep(conversion: Conversion, fx: FxNode, values: list[Any]) -> Any:
    return list(values)  # ``returns.py`` makes one result of them


def _kept(conversion: Conversion, fx: FxNode, values: Any, index: int, *layout: Any) -> Any:
    if not isinstance(values, list):
        raise lost()
    return values[index]


def _assert_async(
    conversion: Conversion, fx: FxNode, value: Node, message: str = "Expected Tensor to be true"
) -> None:
    _effect(conversion, value, True, RuntimeError, message)


def _assert_scalar(conversion: Conversion, fx: FxNode, value: Any, message: str) -> None:
    # Sizes are numbers here, so the condition is one as well.
    if not value:  # a condition on sizes, which are known
        raise RuntimeError(message)


def _check_errors(conversion: Conversion, fx: FxNode, info: Node, api_name: str, *, is_matrix: bool) -> None:
    reason = "the input matrix is singular, not positive-definite, or the algorithm failed to converge"
    _effect(conversion, info, False, torch.linalg.LinAlgError, f"{api_name}: {reason}.")  # type: ignore[attr-defined]


def _effect(conversion: Conversion, value: Node, fine: bool, error: type[Exception], message: str) -> None:
    """Add a call that requires that a value is zero, or not; it must run though nothing reads its result."""
    conversion.effects += conversion.function(_required, [value, fine, error, message], [value.type])


def _required(value: Any, fine: bool, error: type[Exception], message: str) -> Any:
    require((value != 0) == fine, error, message)
    return value


def _with_effects(conversion: Conversion, fx: FxNode, token: Any, op: Any, *rest: Any, **kwargs: Any) -> Any:
    """Convert an op torch keeps in its place by a token, which a program has no use for."""
    if op not in CONVERTERS:
        raise Unsupported(f"the effect of {op}")
    # The token orders effects among each other; a program computes all of them.
    return [token, CONVERTERS[op](conversion, fx, *rest, **kwargs)]


def _nothing(conversion: Conversion, fx: FxNode, *args: Any, **kwargs: Any) -> None:
    """Do nothing: what torch asserted of sizes and layouts while it traced holds for this graph."""


def _sym_size(conversion: Conversion, fx: FxNode, x: Node, dim: int) -> Any:
    return x.type.size[dim]


def _sym_numel(conversion: Conversion, fx: FxNode, x: Node) -> Any:
    return math.prod(x.type.size)


def attention(
    conversion: Conversion,
    fx: FxNode,
    op: OpOverload,
    query: Node,
    key: Node,
    value: Node,
    attn_mask: Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest: Any,
) -> Any:
    """Convert attention that torch left whole, in a sub-graph or to be exported, to the op that has a lowering."""
    if dropout_p:
        raise Unsupported("attention with dropout, where no draw is known")
    # The op that has a lowering takes equal batches, and as many heads or, with ``enable_gqa``, a multiple.
    q, k, v = query.type.size, key.type.size, value.type.size
    named = {"query": query, "key": key, "value": value, "is_causal": is_causal}
    heads = len(q) < 4 or q[1] == k[1] or rest.get("enable_gqa")
    masked = 0 if attn_mask is None else len(attn_mask.type.size)
    if len(q) not in (3, 4) or not len(q) == len(k) == len(v) >= masked or q[0] != k[0] or not heads:
        # The rarer forms are the device's: it broadcasts and masks by ops of its own.
        return conversion.on_device(fx, op, named | {"attn_mask": attn_mask, **rest})
    named |= {"attn_bias": attn_mask, "scale": rest.get("scale")}
    # The other eight results belong to dropout and to gradients, and nothing reads them.
    types: list[Type | None] = [Type((*q[:-1], v[-1]), query.type.dtype), *[None] * 8]
    fused = _aten._scaled_dot_product_fused_attention_overrideable.default
    return conversion.node_of(fused, named, types).results[0]


def _check_bounds(storage: Node, spec: Spec) -> None:
    """Raise where a view reaches outside of its storage: here, since a view that is returned is never computed."""
    # In elements of the view's dtype, which may be another than the storage's.
    elements = storage.type.nbytes // spec.dtype.itemsize
    if not 0 <= spec.offset <= elements - span(spec.size, spec.stride):
        raise Unsupported("elements before or after those of a storage")


def _is_reshape(fx: FxNode) -> bool:
    """Return whether strides find all elements of a new storage in their order, as torch's symbols tell."""
    root, mine = layout.root_of(fx).meta.get("val"), fx.meta["val"]
    if not isinstance(root, Tensor) or not (root.is_contiguous() and mine.is_contiguous()):
        return False
    return bool(mine.storage_offset() == root.storage_offset() and mine.numel() == root.numel())


CONVERTERS: dict[Any, Callable[..., Any]] = {
    _aten.as_strided.default: _as_strided,
    _aten.as_strided_scatter.default: _as_strided_scatter,
    _aten.copy_.default: _copy,
    _aten._assert_async.default: _assert_async,
    _aten._assert_async.msg: _assert_async,
    _aten._assert_scalar.default: _assert_scalar,
    _aten._assert_tensor_metadata.default: _nothing,
    _aten._linalg_check_errors.default: _check_errors,
    _aten.sym_constrain_range.default: _nothing,
    _aten.sym_constrain_range_for_size.default: _nothing,
    _aten.sym_size.int: _sym_size,
    _aten.sym_numel.default: _sym_numel,
    torch.ops.higher_order.with_effects: _with_effects,
    KEEP: _keep,
    KEPT: _kept,
}
