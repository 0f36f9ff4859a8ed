"""Gradients of slices that make up a tensor are concatenated instead of padded and added.

Each slice that ``x[0]`` or ``x[..., :n]`` takes has a gradient as large as all of ``x``, zero elsewhere
(``slice_backward``, ``select_backward``), and autograd adds these up. Where the slices make up the whole of one dim,
the sum is their gradients one after another: one ``cat`` instead of n tensors of the full size. Rotary embeddings and
joined query-key-value projections are full of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Input, Node, Type, call_of, node
from isthmus._graph.passes.rewrite import Rule, is_call, type_of

_aten = torch.ops.aten
BACKWARDS = (_aten.select_backward.default, _aten.slice_backward.default)
"""Gradients of slices; lazy mode records where a slice starts and ends as offsets, compiled in until they change."""


@dataclass(frozen=True)
class _Slice:
    """The gradient of ``length`` elements of one dim from ``start`` on, of a tensor of this size."""

    grad: Node
    size: tuple[int, ...]
    dim: int
    start: int
    length: int
    selected: bool


def slice_gradients(graph: Graph) -> Rule | None:
    """Return the rule: a sum of gradients of slices that make up a tensor is one concatenation."""
    if not any(is_call(n, op) for n in graph.nodes for op in BACKWARDS):
        return None
    # The slices that a sum adds up, for sums of nothing else.
    terms: dict[Node, tuple[_Slice, ...]] = {}

    def rule(call: Call, inputs: tuple[Node, ...]) -> Node | None:
        if call.op in BACKWARDS:
            piece = _slice(call, inputs[0])
            if piece is not None:
                # Nodes are interned, so this is the node that ``rewrite`` makes of the call when the rule returns None.
                terms[node(call, *inputs)] = (piece,)
        elif _is_sum(call) and all(value in terms for value in inputs):
            slices = terms[inputs[0]] + terms[inputs[1]]
            joined = _joined(call, sorted(slices, key=lambda piece: piece.start))
            if joined is not None:
                return joined
            terms[node(call, *inputs)] = slices
        return None

    return rule


def _is_sum(call: Call) -> bool:
    """Return whether a call adds two tensors, and nothing scales one of them."""
    names = [name for name, _ in call.arguments]
    # Two inputs and no ``alpha``, which would be a third argument.
    return call.op is _aten.add.Tensor and names == ["self", "other"] and call.arguments[1][1] == Input(1)


def _slice(call: Call, grad: Node) -> _Slice | None:
    arguments = dict(call.arguments)
    size, dim = arguments["input_sizes"], arguments["dim"]
    selected = call.op is _aten.select_backward.default
    start = arguments["index" if selected else "start"]
    # A step takes every other element: such gradients interleave.
    if arguments.get("step", 1) != 1 or not all(type(n) is int for n in (*size, dim, start)):
        return None  # a size that is a symbol says nothing about where the slice ends
    # torch counts dims and starts from the end where they are negative.
    dim %= len(size)
    start = start + size[dim] if start < 0 else start
    length = 1 if selected else grad.type.size[dim]
    return _Slice(grad, tuple(size), dim, start, length, selected) if type(length) is int else None


def _joined(call: Call, slices: list[_Slice]) -> Node | None:
    """Return the concatenation of gradients, if their slices make up a tensor without gap or overlap."""
    first = slices[0]
    # Slices of different dims, or of different tensors, do not make up one.
    if len({(piece.size, piece.dim) for piece in slices}) != 1:
        return None
    # Sorted by start: each slice has to begin where the one before it ends, the last at the end of the dim.
    ends = [0, *[piece.start + piece.length for piece in slices]]
    if ends[:-1] != [piece.start for piece in slices] or ends[-1] != first.size[first.dim]:
        return None
    parts = [_part(piece) for piece in slices]
    arguments = {"tensors": [Input(n) for n in range(len(parts))], "dim": first.dim}
    return node(call_of(_aten.cat.default, arguments, [type_of(call)], context=call.context), *parts)


def _part(piece: _Slice) -> Node:
    if not piece.selected:
        return piece.grad
    size = list(piece.grad.type.size)
    # ``select`` dropped the dim that ``cat`` needs.
    size.insert(piece.dim, 1)
    type = Type(tuple(size), piece.grad.type.dtype)
    return node(call_of(_aten.unsqueeze.default, {"self": Input(0), "dim": piece.dim}, [type]), piece.grad)
