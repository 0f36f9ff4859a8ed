"""Gradients of all pieces of a tensor, put together at once.

Each piece that ``x[0]`` or ``x[..., :n]`` takes has a gradient as large as all of ``x``, zero elsewhere, and autograd
adds these up. Where the pieces make up the whole, the sum is their gradients one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from isthmus._ops.common import wrap_dim

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Piece:
    """The gradient of ``length`` elements of one dim from ``start`` on, of a tensor of this size."""

    grad: Node
    size: tuple[int, ...]
    dim: int
    start: int
    length: int
    selected: bool


def join(graph: Graph) -> None:
    """Replace sums of gradients of pieces that make up a tensor by one concatenation."""
    for node in [*graph.nodes]:
        # From the last sum on: what is part of a longer one is not looked at by itself.
        if _is_sum(node) and not (len(node.users) == 1 and _is_sum(next(iter(node.users)))):
            leaves = _leaves(node)
            pieces = [piece for leaf in leaves if (piece := _piece(leaf)) is not None]
            if len(pieces) == len(leaves):
                _replace(graph, node, sorted(pieces, key=lambda piece: piece.start))
    graph.eliminate_dead_code()


def _is_sum(node: Node) -> bool:
    return node.target is _aten.add.Tensor and not node.kwargs and all(isinstance(a, Node) for a in node.args)


def _leaves(node: Node) -> list[Node]:
    """Return what a tree of sums adds up; whatever others use as well is a leaf."""
    found: list[Node] = []
    for each in node.args:
        assert isinstance(each, Node)
        found += _leaves(each) if _is_sum(each) and len(each.users) == 1 else [each]
    return found


def _piece(node: Node) -> _Piece | None:
    args: Any = node.args
    if node.target is _aten.select_backward.default:
        grad, size, dim, index = args
        end, step = None, 1
    elif node.target is _aten.slice_backward.default:
        grad, size, dim, index, end, step = args
    else:
        return None
    if step != 1 or not all(type(n) is int for n in (*size, dim, index, end or 0)):
        return None
    dim = wrap_dim(dim, len(size))
    start = index + size[dim] if index < 0 else index
    selected = end is None
    length = 1 if selected else grad.meta["val"].shape[dim]
    return _Piece(grad, tuple(size), dim, start, length, selected)


def _replace(graph: Graph, node: Node, pieces: list[_Piece]) -> None:
    first = pieces[0]
    if len({(piece.size, piece.dim) for piece in pieces}) != 1:
        return
    ends = [0, *[piece.start + piece.length for piece in pieces]]
    if ends[:-1] != [piece.start for piece in pieces] or ends[-1] != first.size[first.dim]:
        return  # they overlap, or leave something out
    with graph.inserting_before(node):
        parts = [_part(graph, piece) for piece in pieces]
        joined = graph.call_function(_aten.cat.default, (parts, first.dim))
    joined.meta = dict(node.meta)
    node.replace_all_uses_with(joined)


def _part(graph: Graph, piece: _Piece) -> Node:
    if not piece.selected:
        return piece.grad
    part = graph.call_function(_aten.unsqueeze.default, (piece.grad, piece.dim))
    part.meta = {**piece.grad.meta, "val": piece.grad.meta["val"].unsqueeze(piece.dim)}
    return part
