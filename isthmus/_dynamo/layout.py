"""What torch's fake tensors say about a node: the storage it shows, its strides, sizes that are symbols.

AOTAutograd leaves in ``node.meta["val"]`` a fake tensor with the sizes, strides and storage that eager would give.
Three questions are answered from it: which node's storage a view shows (``root_of``), in which layout a result is
stored (``Symbols.spec``, ``root_spec``), and what the symbols in sizes are for one call (``Symbols``: read off its
arguments).

FX says views by values, ``_graph`` by storages, so conversion (``convert.py``) and results (``returns.py``) both ask
for the root of a node: ``x.t()[1:]`` shows the storage of ``x`` or, in a graph, of the op that made ``x``.

What can go wrong: a symbol that no argument tells (a size that comes from data) raises ``TypeError`` where it is made a
number; the callers then go on without it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from isthmus._graph.layout import Spec, contiguous_strides, is_dense
from isthmus._graph.nodes import Node as GraphNode
from isthmus._graph.private import storage_id
from isthmus._ops.tensors.views import VIEWS

_VIEWING = {*VIEWS, torch.ops.aten.as_strided.default, operator.getitem}


def root_of(node: Node, of_dtype: bool = False) -> Node:
    """Return the node whose new storage this node shows, or the argument of the graph it is a view of.

    With ``of_dtype`` the root is the last one that has the node's dtype: of ``x.view(torch.int16)[0]`` it is the view.
    """
    while node.op == "call_function" and node.target in _VIEWING and isinstance(node.args[0], Node):
        base = node.args[0]
        if node.target is operator.getitem:
            # A piece of a view such as ``unbind`` shows what was cut; a result of another op is its own.
            # ``unbind`` and ``split`` return views; the second argument of ``getitem`` says which.
            if base.target not in VIEWS:
                return node
            base = base.args[0]  # type: ignore[assignment]
        # Another storage: a copy was made in between, as ``reshape`` may.
        if not _share(node, base) or (of_dtype and node.meta["val"].dtype != base.meta["val"].dtype):
            return node
        node = base
    return node


def _share(node: Node, base: Node) -> bool:
    mine, its = node.meta.get("val"), base.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(its, torch.Tensor):
        # Lazily conjugated, a tensor shows the same memory with other values.
        return False
    bits = (mine.is_conj(), mine.is_neg())  # what a view of a storage shows otherwise than it is kept
    return storage_id(mine) == storage_id(its) and bits == (its.is_conj(), its.is_neg())


def tensor_nodes(node: Node) -> list[Node]:
    """Return the arguments of a node that are tensors, in order, one that is given twice twice."""
    nodes: list[Node] = []
    map_arg((node.args, node.kwargs), nodes.append)
    return [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def is_symbol(size: Any) -> bool:
    """Return whether a size is a symbol by itself, which an argument may tell."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_Symbol)


class Symbols:
    """The values of the symbols in a graph's sizes, read off the arguments of one call."""

    def __init__(self, placeholders: Sequence[Node], arguments: Sequence[Any]) -> None:
        self.values: dict[Any, int] = {}
        for node, argument in zip(placeholders, arguments, strict=True):
            value = node.meta.get("val")
            if argument is None:
                continue  # a token, which orders effects and has no value
            if isinstance(value, torch.Tensor):
                pairs = [*zip(value.shape, argument.shape, strict=True)]
                # Strides tell symbols too, of an argument that was expanded or cut.
                pairs += [*zip(value.stride(), argument.stride(), strict=True)]
                for symbolic, actual in pairs:
                    self._bind(symbolic, actual)
            else:
                self._bind(value, argument)

    def inside(self, placeholders: Sequence[Node], arguments: Sequence[Any]) -> Symbols:
        """Return these sizes and those that the arguments of a sub-graph tell: nodes of ``_graph``, or sizes."""
        inner = copy.copy(self)
        inner.values = dict(self.values)
        for node, argument in zip(placeholders, arguments, strict=True):
            value: Any = node.meta.get("val")
            is_tensor = isinstance(value, torch.Tensor) and isinstance(argument, GraphNode)
            pairs = zip(value.shape, argument.type.size, strict=True) if is_tensor else [(value, argument)]
            for symbolic, actual in pairs:
                # A number that a loop computes is a node, and stands for no size.
                if is_symbol(symbolic) and not isinstance(actual, GraphNode):
                    inner.values[symbolic.node.expr] = actual
        return inner

    def having(self, values: dict[Any, int]) -> Symbols:
        """Return the same symbols with other values."""
        changed = copy.copy(self)
        changed.values = values
        return changed

    def _bind(self, symbolic: Any, actual: Any) -> None:
        if is_symbol(symbolic):
            self.values[symbolic.node.expr] = int(actual)

    def __call__(self, size: Any) -> int:
        """Return a size as a number."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        # sympy replaces the symbols; arithmetic on them, ``s0 + 1``, comes out as a number.
        return int(size.node.expr.xreplace(self.values))

    def spec(self, node: Node, shape: tuple[int, ...]) -> Spec:
        """Return the layout torch gives a node whose value has this shape."""
        value = node.meta["val"]
        try:
            stride = tuple(self(n) for n in value.stride())
        except TypeError:  # a symbol no argument tells: the size came from data
            stride = contiguous_strides(shape)
        return Spec(shape, stride, value.dtype)

    def root_spec(self, node: Node, shape: tuple[int, ...]) -> Spec:
        """Return the layout in which a node's new storage is kept, which has no gaps."""
        spec = self.spec(node, shape)
        return (
            # Gaps are not kept: a new storage holds what it shows and nothing more.
            spec if is_dense(spec.size, spec.stride) else Spec(shape, contiguous_strides(shape), spec.dtype)
        )
