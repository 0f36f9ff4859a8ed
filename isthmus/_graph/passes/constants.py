"""Tensors of one known number, cast or viewed, become such tensors at once.

A constant is ``aten.full`` with a number that is no input and exact in its dtype; there are no others. Zeros that
backward starts from, and masks of ones, are cast and expanded before they are used: XLA would fold them as well, but
other backends may not, and other passes look for them.
"""

from __future__ import annotations

import torch

from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Callee, Input, Node, Type, call_of, node
from isthmus._graph.passes.rewrite import Rule, is_call, type_of

_aten = torch.ops.aten
_FULL = _aten.full.default


def fold_constants(graph: Graph) -> Rule:
    """Return the rule: a view or a cast of a constant is a constant."""
    return _folded_constant


def _folded_constant(call: Call, inputs: tuple[Node, ...]) -> Node | None:
    """Return the constant that a call is, if it is one."""
    # A random call is no constant, whatever it is made from.
    if call.random or len(call.types) != 1 or call.types[0] is None:
        return None
    type = type_of(call)
    if call.op in _MAKERS:
        number = _made(call)
    elif call.op in _SHOWS:
        number = _number(inputs[0])
    else:
        return None
    # Cast and viewed in between: the number has to survive the dtype of the result.
    number = None if number is None else _exact(number, type.dtype)
    return None if number is None else constant(type, number)


def constant(type: Type, number: complex) -> Node:
    """Return the node of a tensor all of whose elements are this number."""
    return node(call_of(_FULL, {"size": type.size, "fill_value": number, "dtype": type.dtype}, [type]))


# Ops whose result has the elements of their input, if those are all the same.
_SHOWS = frozenset(
    {
        _aten.view.default,
        _aten.permute.default,
        _aten.expand.default,
        _aten.as_strided.default,
        _aten._to_copy.default,
        _aten.clone.default,
    }
)
# What fills a tensor with one number: that number, or None where it is an argument.
_MAKERS: dict[Callee, int | None] = {
    _aten.zeros.default: 0,
    _aten.ones.default: 1,
    _FULL: None,
    _aten.zeros_like.default: 0,
    _aten.ones_like.default: 1,
    _aten.full_like.default: None,
}


def _made(call: Call) -> complex | None:
    """Return the number that a call fills its result with; None if it is not known."""
    number = _MAKERS[call.op]
    number = dict(call.arguments).get("fill_value") if number is None else number
    return None if isinstance(number, Input) else number


def _number(value: Node) -> complex | None:
    """Return the number of a constant, None of anything else."""
    if not is_call(value, _FULL):
        return None
    assert isinstance(value.call, Call)
    number = dict(value.call.arguments)["fill_value"]
    return None if isinstance(number, Input) else _exact(number, value.type.dtype)


def _exact(number: complex, dtype: torch.dtype) -> complex | None:
    """Return a number as an element of this dtype, or None if it is not one: devices may round it differently."""
    wide = _WIDEST[type(number)]
    # The real part of a complex number would be taken silently.
    if (wide.is_complex and not dtype.is_complex) or (wide == torch.int64 and abs(number) >= 2**63):
        return None
    # There and back: what comes back unchanged is exact.
    element = torch.tensor(number, dtype=wide, device="cpu").to(dtype).item()
    return element if element == number else None


_WIDEST = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
