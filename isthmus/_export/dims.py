"""Dynamic dims: torch's symbols as dimensions of JAX's shape polymorphism, under the names the user gave them.

``torch.export`` writes a dynamic size as an expression of symbols (``2*s0 + 1``). ``jax.export`` has dimensions of its
own, made from text (``export.symbolic_shape("batch")``). ``trace.py`` calls ``find`` to pair them and asks the ``Dims``
it returns for the size of every value it evaluates.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import torch
from jax import export
from torch.fx import Node

from isthmus._device.torch_glue.pytree import tree_map
from isthmus._dynamo.layout import Symbols
from isthmus.errors import ExportError

Dimension = Any
_FUNCTIONS: dict[str, Any] = {
    "Add": lambda *parts: functools.reduce(operator.add, parts),
    "Mul": lambda *parts: functools.reduce(operator.mul, parts),
    "Pow": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": lambda *parts: functools.reduce(jax.core.max_dim, parts),
    "Min": lambda *parts: functools.reduce(jax.core.min_dim, parts),
}


class Dims(Symbols):
    """The sizes of a graph's symbols: dimensions of JAX."""

    def __init__(self, names: Mapping[Any, str], ranges: Mapping[Any, Any]) -> None:
        self.constraints = [
            line for symbol, name in names.items() for line in _bounds(name, ranges.get(symbol))
        ]
        # One scope: JAX does not compare dimensions of different scopes.
        scope = export.SymbolicScope(self.constraints)
        self.values: dict[Any, Dimension] = {
            symbol: export.symbolic_shape(name, scope=scope)[0] for symbol, name in names.items()
        }

    def __call__(self, size: Any) -> Any:
        """Return a size as a number or a dimension."""
        return self.evaluate(size.node.expr) if isinstance(size, torch.SymInt) else int(size)

    def evaluate(self, expression: Any) -> Any:
        """Return the number or dimension that an expression of torch's symbols stands for."""
        if expression in self.values:
            return self.values[expression]
        if expression.is_Integer:
            return int(expression)
        # By the names of sympy's classes, and of torch's own in ``torch.utils._sympy``, which is private.
        function = _FUNCTIONS.get(type(expression).__name__)
        if function is None:
            raise ExportError(f"the size {expression} is not known before the program runs")
        return function(*[self.evaluate(part) for part in expression.args])

    def names_in(self, node: Node) -> list[str]:
        """Return the dynamic dims in the sizes of a node and of its arguments."""
        values = [each.meta.get("val") for each in (*node.all_input_nodes, node)]
        names = [str(self.values.get(symbol, symbol)) for value in values for symbol in _symbols(value)]
        return list(dict.fromkeys(names))


def _bounds(name: str, bounds: Any) -> Iterator[str]:
    """Yield JAX's constraints on a size; JAX assumes at least 1 everywhere, so lower bounds up to 1 are left out."""
    if bounds is None:
        return
    if bounds.lower > 1:
        yield f"{name} >= {int(bounds.lower)}"
    # torch's "no bound" is an infinity, which is no integer.
    if bounds.upper.is_Integer:
        yield f"{name} <= {int(bounds.upper)}"


def _symbols(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        value = list(value.shape)
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _symbols(part)
    elif isinstance(value, torch.SymInt):
        yield from sorted(value.node.expr.free_symbols, key=str)


def as_dims(dynamic_shapes: Any) -> Any:
    """Return torch's ``dynamic_shapes`` with a ``Dim`` for each name in it."""
    dims: dict[str, Any] = {}  # one Dim per name, so that sizes of one name are equal

    def dim(value: Any) -> Any:
        return dims.setdefault(value, torch.export.Dim(value)) if isinstance(value, str) else value

    return tree_map(dim, dynamic_shapes)


def find(inputs: Mapping[str, Any], dynamic_shapes: Any, ranges: Mapping[Any, Any]) -> Dims:
    """Return the dynamic dims of the inputs, given as containers of placeholders by name."""
    chosen: dict[Any, str] = {}
    if isinstance(dynamic_shapes, Mapping):
        pairs = [(tree, dynamic_shapes.get(name)) for name, tree in inputs.items()]
    else:
        pairs = list(zip(inputs.values(), dynamic_shapes or (), strict=False))
    for tree, shapes in pairs:
        _choose(tree, shapes, chosen)
    names: dict[Any, str] = {}
    for label, node in _leaves(inputs, ""):
        for dim, size in enumerate(node.meta["val"].shape):
            for symbol in _symbols(size):
                # A symbol that the user has not named is called by the first dim that has it, as ``ids_1``.
                names.setdefault(symbol, chosen.get(symbol) or re.sub(r"\W+", "_", f"{label}_{dim}"))
    return Dims(names, ranges)


def _choose(tree: Any, shapes: Any, chosen: dict[Any, str]) -> None:
    """Add the names that the user gave to the symbols of a tree's sizes to ``chosen``."""
    for key, part in _items(shapes):
        if not isinstance(tree, Node):
            _choose(tree[key], part, chosen)
            continue
        size = tree.meta["val"].shape[key]
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and hasattr(part, "__name__"):
            chosen[size.node.expr] = part.__name__


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    return value.items() if isinstance(value, Mapping) else ()


def _leaves(tree: Any, label: str) -> Iterator[tuple[str, Node]]:
    """Yield the placeholders of tensors, each with a name to call it by."""
    if isinstance(tree, Node):
        yield label, tree
    for key, part in _items(tree):
        yield from _leaves(part, f"{label}_{key}" if label else str(key))
