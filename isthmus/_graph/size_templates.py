"""Graphs that are alike but for their sizes: the skeleton of a graph, and how its integers follow from a few sizes.

Lazy mode records numbers, not symbols: the graph of a sentence of 37 tokens and that of one of 41 are two graphs. Their
*skeletons*, everything but their integers, are equal. From two or more graphs of one skeleton a ``Template`` is made:
each integer that differs is written as ``factor * size + constant``, or with a product of two sizes, where the sizes
are dims of arrays that the graph is given::

    view(x, (4, 37, 8))    sizes 37, 41         view(x, (4, s, 8))
    arange(0, 38)          38, 42               arange(0, s + 1)

The guess needs no proof: a template serves a graph only if *every* integer of that graph is what its expressions say
(``Template.match``). A graph that breaks the guess is a further sample for the next template.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Item, Leaf, Node, Type, exact

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Skeleton:
    """What a graph is without its integers, the integers, and which of them are dims of arrays it is given."""

    key: tuple[Any, ...]
    ints: Ints
    dims: tuple[int, ...]


def skeleton(graph: Graph) -> Skeleton | None:
    """Return the skeleton of a graph, None where calls carry layouts, which the device's kernels read."""
    ints: list[int] = []
    dims: list[int] = []
    parts: list[Any] = []
    place = {n: i for i, n in enumerate([*graph.inputs, *graph.nodes])}

    def take(value: int) -> str:
        ints.append(value)
        return "#"

    for n in place:
        call = n.call
        if isinstance(call, Leaf):
            start = len(ints)
            size = _with(call.type.size, take)
            dims += range(start, len(ints)) if call.kind == "array" else ()
            parts.append((call.kind, call.index, call.number, call.type.dtype, size))
        elif isinstance(call, Item):
            parts.append((call.index, place[n.inputs[0]]))
        elif call.layouts is not None:
            return None
        else:
            arguments = tuple((name, exact(_with(value, take))) for name, value in call.arguments)
            types = tuple(None if t is None else (t.dtype, _with(t.size, take)) for t in call.types)
            inputs = tuple(place[i] for i in n.inputs)
            parts.append((call.op, arguments, types, call.context, call.random, call.draw, inputs))
    outputs = tuple(place[o] for o in graph.outputs)
    return Skeleton((tuple(parts), outputs), tuple(ints), tuple(dims))


def _with(value: Any, take: Callable[[int], Any]) -> Any:
    """Return a value with ``take(n)`` in place of each integer in it, in order."""
    if type(value) is int:
        return take(value)
    return tuple(_with(item, take) for item in value) if type(value) is tuple else value


@dataclass(frozen=True)
class Expression:
    """An integer of a graph: ``factor`` times the product of sizes, by their numbers, plus ``constant``."""

    factor: int
    sizes: tuple[int, ...]
    constant: int

    def value(self, sizes: Sequence[Any]) -> Any:
        """Return the integer for these sizes, which may be symbolic."""
        return self.factor * math.prod(sizes[i] for i in self.sizes) + self.constant


@dataclass(frozen=True)
class Template:
    """The integers of graphs of one skeleton: ``fixed`` ones, and expressions of the sizes at ``places``."""

    fixed: Ints
    places: tuple[int, ...]
    expressions: Mapping[int, Expression]
    least: tuple[int, ...]

    def match(self, ints: Ints) -> Ints | None:
        """Return the sizes for which these are the integers, None if there are none."""
        sizes = tuple(ints[place] for place in self.places)
        if any(size < low for size, low in zip(sizes, self.least, strict=True)):
            return None
        for i, (value, fixed) in enumerate(zip(ints, self.fixed, strict=True)):
            expression = self.expressions.get(i)
            if value != (fixed if expression is None else expression.value(sizes)):
                return None
        return sizes

    def lift(self, graph: Graph, sizes: Sequence[Any]) -> Graph:
        """Return a graph of this skeleton with expressions of symbolic sizes for its integers."""
        values = iter(
            self.expressions[i].value(sizes) if i in self.expressions else n for i, n in enumerate(self.fixed)
        )
        take = lambda _: next(values)  # noqa: E731
        new: dict[Node, Node] = {}
        for n in [*graph.inputs, *graph.nodes]:
            new[n] = _lifted(n, new, take)
        # Without origins: the nodes of each graph that the template serves are found by their places in it.
        return Graph(
            tuple(new[n] for n in graph.inputs),
            tuple(new[n] for n in graph.nodes),
            tuple(new[n] for n in graph.outputs),
        )


def _lifted(n: Node, new: Mapping[Node, Node], take: Callable[[int], Any]) -> Node:
    """Return a node with other integers; it is not interned, since symbols belong to one program."""
    call = n.call
    inputs = tuple(new[i] for i in n.inputs)
    if isinstance(call, Item):
        found = inputs[0].results[call.index]
        assert found is not None
        return found
    if isinstance(call, Leaf):
        return Node(replace(call, type=Type(_with(call.type.size, take), call.type.dtype)), ())
    arguments = tuple((name, _with(value, take)) for name, value in call.arguments)
    types = tuple(None if t is None else Type(_with(t.size, take), t.dtype) for t in call.types)
    return Node(Call(call.op, arguments, types, call.context, call.random, call.draw), inputs)


def generalise(samples: Sequence[Ints], dims: Sequence[int]) -> Template | None:
    """Return a template that fits all samples, None where an integer differs that no size of an array explains.

    The first dim that differs is a size; another one is a new size only if no expression of the earlier ones fits.
    """
    columns = list(zip(*samples, strict=True))
    differing = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    places: list[int] = []
    expressions: dict[int, Expression] = {}
    known = set(dims)
    for i in sorted(differing, key=lambda i: (i not in known, i)):
        fit = _fit(columns[i], [columns[p] for p in places])
        if fit is None and i in known:
            places.append(i)
            fit = Expression(1, (len(places) - 1,), 0)
        if fit is None:
            return None
        expressions[i] = fit
    if not places:
        return None
    least = [2] * len(places)  # sizes 0 and 1 mean other things: nothing, and what is broadcast
    for i, expression in expressions.items():
        if len(expression.sizes) == 1 and expression.factor > 0:
            (size,) = expression.sizes
            floor = min(1, *columns[i])  # a dim that was never empty is not empty
            least[size] = max(least[size], -(-(floor - expression.constant) // expression.factor))
    return Template(tuple(samples[-1]), tuple(places), expressions, tuple(least))


def _fit(values: Sequence[int], sizes: Sequence[Sequence[int]]) -> Expression | None:
    """Return the expression of these sizes that has these values in the samples."""
    for numbers in _products(len(sizes)):
        products = [math.prod(sizes[i][k] for i in numbers) for k in range(len(values))]
        pairs = [(p, v) for p, v in zip(products, values, strict=True)]
        other = next((pair for pair in pairs if pair[0] != pairs[0][0]), None)
        if other is None:
            continue
        factor, rest = divmod(other[1] - pairs[0][1], other[0] - pairs[0][0])
        constant = pairs[0][1] - factor * pairs[0][0]
        if rest == 0 and factor != 0 and all(v == factor * p + constant for p, v in pairs):
            return Expression(factor, numbers, constant)
    return None


def _products(count: int) -> Iterator[tuple[int, ...]]:
    """Yield the products of one or two of so many sizes, those of one first."""
    for n in (1, 2):
        yield from itertools.combinations_with_replacement(range(count), n)
