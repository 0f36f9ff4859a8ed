"""Graphs that are alike but for their sizes: the skeleton of a graph, and how its integers follow from a few sizes.

Lazy mode records numbers, not symbols: the graph of a sentence of 37 tokens and that of one of 41 are two graphs. Their
*skeletons*, everything but their integers, are equal. From two or more graphs of one skeleton a ``Template`` is made
(``size_guesses.py``): each integer that differs is written as ``factor * size + constant``, with a product of two
sizes, or with a rounded quotient of one, where the sizes are dims of arrays that the graph is given::

    view(x, (4, 37, 8))         sizes 37, 41    view(x, (4, s, 8))
    arange(0, 38)                     38, 42    arange(0, s + 1)
    max_pool(x, 2): (4, 18, 8)        18, 20    (4, (s - 2) // 2 + 1, 8)

The guess needs no proof: a template serves a graph only if *every* integer of that graph is what its expressions say
(``Template.match``). A graph that breaks the guess is a further sample for the next template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from isthmus._graph.arguments import Value
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Item, Leaf, Node, Type, exact

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Skeleton:
    """What a graph is without its integers, the integers, and which of them are dims of arrays.

    ``dims`` are those of the arrays the graph is given, ``computed`` those of its nodes.
    """

    key: Hashable
    ints: Ints
    dims: tuple[int, ...]
    computed: tuple[int, ...]


def skeleton(graph: Graph) -> Skeleton | None:
    """Return the skeleton of a graph, None where calls carry layouts, which the device's kernels read."""
    ints: list[int] = []
    dims: list[int] = []
    computed: list[int] = []
    parts: list[Hashable] = []
    place = {n: i for i, n in enumerate([*graph.inputs, *graph.nodes])}

    # Stands for an integer in the key; the integers themselves are compared by templates.
    def take(value: int) -> str:
        ints.append(value)
        return "#"

    for n in place:
        call = n.call
        if isinstance(call, Leaf):
            start = len(ints)
            size = with_integers(call.type.size, take)
            dims += range(start, len(ints)) if call.kind == "array" else ()
            # Nodes are named by their place, never by themselves: a node of other sizes is another object.
            parts.append((call.kind, call.index, call.number, call.type.dtype, size))
        elif isinstance(call, Item):
            parts.append((call.index, place[n.inputs[0]]))
        elif call.layouts is not None:
            return None
        else:
            # ``exact`` tells 1.0 from True and 0.0 from -0.0, which are equal as keys.
            arguments = tuple((name, exact(with_integers(value, take))) for name, value in call.arguments)
            start = len(ints)
            types = tuple(None if t is None else (t.dtype, with_integers(t.size, take)) for t in call.types)
            computed += range(start, len(ints))
            inputs = tuple(place[i] for i in n.inputs)
            parts.append((call.op, arguments, types, call.context, call.random, call.draw, inputs))
    outputs = tuple(place[o] for o in graph.outputs)
    return Skeleton((tuple(parts), outputs), tuple(ints), tuple(dims), tuple(computed))


def with_integers(value: Value, take: Callable[[int], Value]) -> Value:
    """Return a value with ``take(n)`` in place of each integer in it, in order: as integers are numbered."""
    # Not ``isinstance``: True is an int to Python, and no size.
    if type(value) is int:
        return take(value)
    return tuple(with_integers(item, take) for item in value) if type(value) is tuple else value


@dataclass(frozen=True)
class Expression:
    """An integer of a graph: a sum of multiples of products of quantities, by their numbers, plus ``constant``."""

    terms: tuple[tuple[int, tuple[int, ...]], ...]
    constant: int = 0

    def value(self, quantities: Sequence[Value]) -> Value:
        """Return the integer for these quantities, which may be symbolic."""
        total: Value = self.constant
        for factor, numbers in self.terms:
            total = total + factor * math.prod(quantities[i] for i in numbers)
        return total

    def plus(self, more: int) -> Expression:
        """Return the expression that is larger by a number."""
        return replace(self, constant=self.constant + more)

    def times(self, other: Expression) -> Expression:
        """Return the product of two expressions, multiplied out."""
        factors: dict[tuple[int, ...], int] = {}
        for factor, numbers in (*self.terms, (self.constant, ())):
            for more, others in (*other.terms, (other.constant, ())):
                product = tuple(sorted((*numbers, *others)))
                factors[product] = factors.get(product, 0) + factor * more
        constant = factors.pop((), 0)
        return Expression(tuple((n, numbers) for numbers, n in factors.items() if n), constant)


@dataclass(frozen=True)
class Quotient:
    """A quantity that is an expression of earlier ones, divided and rounded down: the places of a window."""

    numerator: Expression
    divisor: int

    def value(self, quantities: Sequence[Value]) -> Value:
        """Return the quotient for these quantities, which may be symbolic."""
        return self.numerator.value(quantities) // self.divisor


@dataclass(frozen=True)
class Template:
    """The integers of graphs of one skeleton: ``fixed`` ones, and expressions of quantities.

    Quantities are numbered: the sizes at ``places`` first, then the ``quotients``, each of quantities before it. A
    size is counted in ``units``: 32 pixels of an image whose sides are multiples of 32, so that they can be divided.
    """

    fixed: Ints
    places: tuple[int, ...]
    expressions: Mapping[int, Expression]
    least: tuple[int, ...]
    units: Ints
    quotients: tuple[Quotient, ...] = ()

    def quantities(self, sizes: Sequence[Value]) -> list[Value]:
        """Return these sizes, which may be symbolic, and the quotients that follow from them."""
        values = [size * unit for size, unit in zip(sizes, self.units, strict=True)]
        for quotient in self.quotients:
            values.append(quotient.value(values))
        return values

    @cached_property
    def _uses(self) -> tuple[list[tuple[int, int]], list[tuple[Expression, list[int]]]]:
        """The integers that are fixed, with their places, and the distinct expressions, with theirs."""
        uses: dict[Expression, list[int]] = {}
        for i, expression in self.expressions.items():
            uses.setdefault(expression, []).append(i)
        return [(i, n) for i, n in enumerate(self.fixed) if i not in self.expressions], list(uses.items())

    def match(self, ints: Ints) -> Ints | None:
        """Return the sizes for which these are the integers, None if there are none."""
        # That a size is no multiple of its unit is found by its own expression.
        sizes = tuple([ints[place] // unit for place, unit in zip(self.places, self.units, strict=True)])
        # Below the least size a lowering may have chosen another way ("is it 1?") than the one that was traced.
        if any(size < low for size, low in zip(sizes, self.least, strict=True)):
            return None
        fixed, uses = self._uses
        if len(ints) != len(self.fixed) or any(ints[i] != n for i, n in fixed):
            return None
        # Each distinct expression once: a graph has thousands of integers and a few dozen expressions.
        quantities = self.quantities(sizes)
        for expression, places in uses:
            value = expression.value(quantities)
            if any(ints[i] != value for i in places):
                return None
        return sizes

    def lift(self, graph: Graph, sizes: Sequence[Value]) -> Graph:
        """Return a graph of this skeleton with expressions of symbolic sizes for its integers."""
        quantities = self.quantities(sizes)
        values = iter(
            self.expressions[i].value(quantities) if i in self.expressions else n
            for i, n in enumerate(self.fixed)
        )
        take = lambda _: next(values)  # noqa: E731
        # In the order in which ``skeleton`` numbered the integers, since ``take`` hands them out one by one.
        new: dict[Node, Node] = {}
        for n in [*graph.inputs, *graph.nodes]:
            new[n] = _lifted(n, new, take)
        # Without origins: the nodes of each graph that the template serves are found by their places in it.
        return Graph(
            tuple(new[n] for n in graph.inputs),
            tuple(new[n] for n in graph.nodes),
            tuple(new[n] for n in graph.outputs),
        )


def _lifted(n: Node, new: Mapping[Node, Node], take: Callable[[int], Value]) -> Node:
    """Return a node with other integers; it is not interned, since symbols belong to one program."""
    call = n.call
    inputs = tuple(new[i] for i in n.inputs)
    if isinstance(call, Item):
        result = inputs[0].results[call.index]
        assert result is not None
        return result
    if isinstance(call, Leaf):
        return Node(replace(call, type=Type(with_integers(call.type.size, take), call.type.dtype)), ())
    arguments = tuple((name, with_integers(value, take)) for name, value in call.arguments)
    types = tuple(None if t is None else Type(with_integers(t.size, take), t.dtype) for t in call.types)
    return Node(Call(call.op, arguments, types, call.context, call.random, call.draw), inputs)
