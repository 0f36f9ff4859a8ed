"""How the integers of alike graphs follow from a few sizes: templates (``size_templates.py``) made of samples.

Two or more graphs of one skeleton are the samples. An integer that differs between them is, in this order,

- what its op computes: the places of a convolution's or a pooling's window, from its strides and padding (``Rule``),
- equal to a dim of the node's inputs, or to another integer that is known already,
- a multiple of a size, of a product of two or of a quotient, and a constant,
- a difference of two known integers (the border that makes one image as large as another),
- a rounded quotient that fits the samples, such as ``h // 2`` or ``32 * ((h + 31) // 32)`` in a user's Python.

Only the first is known; the others are guesses, and the first guess that fits all samples is taken. A graph that breaks
it is compiled exactly, and is a further sample.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from isthmus._graph.arguments import Value
from isthmus._graph.graph import Graph
from isthmus._graph.names import aten
from isthmus._graph.nodes import Call, Input, Item, Leaf, Node
from isthmus._graph.size_templates import Expression, Ints, Quotient, Template, with_integers

Column = tuple[int, ...]
"""The values of one integer in the samples."""
# Divisors of quotients in a user's Python: halves, thirds, ..., multiples of 32.
_DIVISORS = (2, 4, 8, 16, 32, 64, *(d for d in range(3, 33) if d & (d - 1)))
# The constant of a simple expression: what a cache gains with a token, what a convolution without padding takes away.
_SMALL = 8


@dataclass(frozen=True)
class Rule:
    """What an op says of an integer: it is ``(factor * source + more) // divisor + constant`` of another one."""

    source: int
    factor: int
    more: int
    divisor: int
    constant: int


@dataclass(frozen=True)
class Hints:
    """What a graph says of its integers, by their numbers.

    ``near`` are those of its node's inputs and arguments, of which an integer is likely to be one; ``rules`` are known.
    ``axes`` says where in its list or size an integer stands, counted from the end.
    """

    near: dict[int, Ints] = field(default_factory=dict)
    axes: dict[int, int] = field(default_factory=dict)
    rules: dict[int, Rule] = field(default_factory=dict)


NO_HINTS = Hints()


def hints(graph: Graph) -> Hints:
    """Return hints that the ops of a graph give about its integers, numbered as ``skeleton`` does."""
    hinted = Hints()
    counter = itertools.count()
    number = lambda _: next(counter)  # noqa: E731
    dims: dict[Node, list[Value]] = {}
    for n in [*graph.inputs, *graph.nodes]:
        call = n.call
        if isinstance(call, Leaf):
            dims[n] = [with_integers(call.type.size, number)]
        elif isinstance(call, Item):
            dims[n] = [dims[n.inputs[0]][call.index]]
        else:
            arguments = [with_integers(value, number) for _, value in call.arguments]
            dims[n] = [None if t is None else with_integers(t.size, number) for t in call.types]
            inputs = [dims[i][0] or () for i in n.inputs]
            known = tuple(i for size in inputs for i in size)
            given = tuple(_flat(arguments))
            hinted.near.update(dict.fromkeys(given, known))
            for size in dims[n]:
                # A dim is most likely the dim of an input at the same place, counted from the end.
                for place, i in enumerate(reversed(size or ())):
                    same = tuple(other[-1 - place] for other in inputs if len(other) > place)
                    hinted.near[i] = (*same, *given, *known)
            hinted.rules.update(_window_rules(n, call, inputs, dims[n]))
            hinted.axes.update(_axes(arguments))
        hinted.axes.update(_axes(dims[n]))
    return hinted


def _axes(value: Value) -> Iterator[tuple[int, int]]:
    """Yield the integers in nested lists, each with its place in the innermost, counted from the end."""
    if isinstance(value, (tuple, list)):
        for place, item in enumerate(reversed(value)):
            if type(item) is int:
                yield item, place
            else:
                yield from _axes(item)


def _flat(value: Value) -> Iterator[int]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    elif type(value) is int:
        yield value


# By op: the names of the arguments before and after the window moves over it, None for the op's result, and whether the
# second is larger.
_POOLS = [getattr(aten, f"{kind}_pool{n}d{tail}") for kind, n, tail in (
    ("avg", 2, ""), ("avg", 3, ""), ("max", 2, "_with_indices"), ("max", 3, "_with_indices"),
)]  # fmt: skip
_POOL_GRADIENTS = [getattr(aten, f"{kind}_pool{n}d{tail}_backward") for kind, n, tail in (
    ("avg", 2, ""), ("avg", 3, ""), ("max", 2, "_with_indices"), ("max", 3, "_with_indices"),
)]  # fmt: skip
_MOVES: dict[Value, tuple[str, str | None]] = {
    aten.convolution.default: ("input", None),
    aten.convolution_backward.default: ("input", "grad_output"),
    **{op.default: ("self", None) for op in _POOLS},
    **{op.default: ("self", "grad_output") for op in _POOL_GRADIENTS},
}


def _window_rules(
    n: Node, call: Call, inputs: Sequence[Ints], results: Sequence[Ints | None]
) -> Iterator[tuple[int, Rule]]:
    """Yield what an op whose window moves over an image says of the size of its result."""
    if call.op not in _MOVES:
        return
    arguments = dict(call.arguments)
    before, after = _MOVES[call.op]

    def tensor(name: str) -> int:
        given = arguments[name]
        assert isinstance(given, Input)
        return given.index

    source = inputs[tensor(before)]
    targets = [t for t in results if t] if after is None else [inputs[tensor(after)]]
    if "weight" in arguments:
        window = n.inputs[tensor("weight")].type.size[2:]
    else:
        size = arguments["kernel_size"]
        rank = 3 if len(size) == 3 or "3d" in str(call.op) else 2
        window = _each(size, rank)
    rank = len(window)
    options = {"stride": (), "padding": (0,), "dilation": (1,), "output_padding": (0,)}
    stride, padding, dilation, extra = (_each(arguments.get(k, v), rank) for k, v in options.items())
    stride = stride or window
    ceil_mode = bool(arguments.get("ceil_mode", False))
    for target in targets:
        rows = zip(source[-rank:], target[-rank:], window, stride, padding, dilation, extra, strict=True)
        for at, to, k, s, p, d, more in rows:
            if arguments.get("transposed", False):
                yield to, Rule(at, s, d * (k - 1) + 1 + more - s - 2 * p, 1, 0)
            else:
                yield to, Rule(at, 1, p + room_above(k, s, p, d, ceil_mode) - d * (k - 1) - 1, s, 1)


def _each(value: Value, rank: int) -> Ints:
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return sizes * rank if len(sizes) == 1 else sizes


def room_above(kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Return the padding of an image at its end, whatever its size, with which torch's number of windows fits.

    With ``ceil_mode`` the last window may hang over, but starts inside of the image or of the padding before it.
    """
    return min(padding + stride - 1, dilation * (kernel - 1)) if ceil_mode else padding


def generalise(
    samples: Sequence[Ints],
    dims: Sequence[int],
    smallest: int | None = 2,
    known: Hints = NO_HINTS,
    bold: bool = False,
    in_units: bool = False,
) -> Template | None:
    """Return a template that fits all samples, None where an integer differs that no size of an array explains.

    The first dim that differs is a size; another one is a new size only if no expression of the earlier ones fits:
    a simple one, such as ``s + 1``, unless guesses are to be ``bold``. The height and the width of two images always
    have some line through them.
    Sizes below ``smallest``, None for those below the smallest sample, are graphs of their own: 0 means nothing, and 1
    may mean what is broadcast. ``in_units`` takes for granted that sizes are multiples of what all samples are
    multiples of: images that are cut into patches.
    """
    guesses = _Guesses(samples, known, bold)
    for i in guesses.in_order(set(dims)):
        guess = guesses.expression(i, is_dim=i in dims)
        if guess is None:
            return None
        guesses.keep(i, guess)
    if not guesses.places:
        return None
    units = tuple(math.gcd(*guesses.columns[place]) if in_units else 1 for place in guesses.places)
    least = tuple(-(-low // unit) for low, unit in zip(guesses.least(smallest), units, strict=True))
    places, quotients = tuple(guesses.places), tuple(guesses.quotients)
    return Template(tuple(samples[-1]), places, guesses.expressions, least, units, quotients)


class _Guesses:
    """The expressions found so far, and how further ones are found."""

    def __init__(self, samples: Sequence[Ints], known: Hints, bold: bool) -> None:
        self.columns: list[Column] = list(zip(*samples, strict=True))
        self.count, self.known, self.bold = len(samples), known, bold
        self.places: list[int] = []
        self.quotients: list[Quotient] = []
        self.expressions: dict[int, Expression] = {}
        # Numbers of quantities are given out once all sizes are known: the sizes come first.
        self.quantities: list[Column] = []
        # By values, then by axis: that of a height first, where a height and a width are equal by chance.
        self.by_column: dict[Column, dict[int | None, Expression]] = {}

    def in_order(self, dims: set[int]) -> Iterator[int]:
        """Yield the integers that differ: dims of arrays first, of those the ones that no rule derives from others."""
        differing = [i for i, column in enumerate(self.columns) if len(set(column)) > 1]
        derived = lambda i: i in self.known.rules and self.known.rules[i].source in dims  # noqa: E731
        yield from sorted(differing, key=lambda i: (i not in dims, i in dims and derived(i), i))

    def keep(self, i: int, guess: Expression) -> None:
        """Take an expression for an integer."""
        self.expressions[i] = guess
        self.by_column.setdefault(self.columns[i], {}).setdefault(self.known.axes.get(i), guess)

    def expression(self, i: int, is_dim: bool) -> Expression | None:
        """Return the first expression that fits an integer; a dim of an array that none fits is a size."""
        column = self.columns[i]
        rule = self.known.rules.get(i)
        if rule is not None and rule.source in self.expressions:
            computed = self._by_rule(rule, self.expressions[rule.source])
            if self._column(computed) == column:
                return computed
        for j in self.known.near.get(i, ()):
            if j in self.expressions and self.columns[j] == column:
                return self.expressions[j]
        axis = self.known.axes.get(i)
        alike = self.by_column.get(column, {})
        guess = alike.get(axis) or self._by_any_rule(column, axis, like=True)
        guess = guess or next(iter(alike.values()), None)
        guess = guess or self._linear(column, 0) or self._by_any_rule(column, axis)
        guess = guess or self._linear(column, _SMALL if is_dim and not self.bold else None)
        if guess is None and is_dim:
            return self._size(i)
        return guess or self._difference(column) or self._quotient(column)

    def _size(self, i: int) -> Expression:
        """Return an integer as a new size, whose number comes before those of all quotients."""
        number = len(self.places)
        shifted = lambda k: k + 1 if k >= number else k  # noqa: E731

        def moved(old: Expression) -> Expression:
            terms = tuple((factor, tuple(map(shifted, numbers))) for factor, numbers in old.terms)
            return Expression(terms, old.constant)

        self.expressions = {k: moved(old) for k, old in self.expressions.items()}
        self.by_column = {
            k: {axis: moved(old) for axis, old in known.items()} for k, known in self.by_column.items()
        }
        self.quotients = [Quotient(moved(q.numerator), q.divisor) for q in self.quotients]
        self.places.append(i)
        self.quantities.insert(number, self.columns[i])
        return _one(number)

    def _column(self, expression: Expression) -> Column:
        samples = range(self.count)
        return tuple([expression.value([q[k] for q in self.quantities]) for k in samples])

    def _by_rule(self, rule: Rule, source: Expression) -> Expression:
        numerator = source.times(Expression((), rule.factor)).plus(rule.more)
        return self._divided(numerator, rule.divisor).plus(rule.constant)

    def _by_any_rule(self, column: Column, axis: int | None, like: bool = False) -> Expression | None:
        """Return the integer a rule of the graph makes of a known one: forward's images that are arguments of backward.

        ``like`` takes integers of this axis only.
        """
        rules = {
            (r.factor, r.more, r.divisor, r.constant): r for r in self.known.rules.values() if r.divisor > 1
        }
        for rule in rules.values():
            for source, expressions in reversed(self.by_column.items()):
                values = [(rule.factor * n + rule.more) // rule.divisor + rule.constant for n in source]
                if tuple(values) == column and (axis in expressions or not like):
                    return self._by_rule(rule, expressions.get(axis) or next(iter(expressions.values())))
        return None

    def _divided(self, numerator: Expression, divisor: int) -> Expression:
        """Return an expression divided and rounded down, as a quantity of its own."""
        if divisor == 1:
            return numerator
        quotient = Quotient(numerator, divisor)
        if quotient not in self.quotients:
            column = tuple([n // divisor for n in self._column(numerator)])
            self.quotients.append(quotient)
            self.quantities.append(column)
        return _one(len(self.places) + self.quotients.index(quotient))

    def _linear(self, column: Column, most: int | None) -> Expression | None:
        """Return the simplest multiple of a product of one or two quantities, and a constant, with these values.

        ``most`` is the largest constant, None for any.
        """
        candidates = []
        known = [(values, next(iter(expressions.values()))) for values, expressions in self.by_column.items()]
        for n in (1, 2):
            for factors in itertools.combinations_with_replacement(known, n):
                line = _line(
                    tuple(map(math.prod, zip(*[values for values, _ in factors], strict=True))), column
                )
                if line is not None and (most is None or abs(line[1]) <= most):
                    product = functools.reduce(Expression.times, [expression for _, expression in factors])
                    candidates.append(
                        (abs(line[1]), n, abs(line[0]), product.times(Expression((), line[0])).plus(line[1]))
                    )
        return min(candidates, key=lambda each: each[:3])[-1] if candidates else None

    def _difference(self, column: Column) -> Expression | None:
        """Return the difference of two known integers that has these values."""
        for other, known in self.by_column.items():
            minuend = next(iter(known.values()))
            rest = self.by_column.get(tuple([a - n for a, n in zip(other, column, strict=True)]))
            if rest is not None:
                subtrahend = next(iter(rest.values()))
                negative = subtrahend.times(Expression((), -1))
                return Expression((*minuend.terms, *negative.terms), minuend.constant + negative.constant)
        return None

    def _quotient(self, column: Column) -> Expression | None:
        """Return a rounded quotient with these values: of small numbers, rather rounded down or up than in between."""
        for divisor in _DIVISORS:
            roundings = (0, divisor - 1, *range(1, divisor - 1))
            for number, quantity in enumerate(self.quantities):
                for factor, multiple, less in itertools.product((1, 3, 5), (1, divisor), (0, 1)):
                    if factor > divisor and less:
                        continue
                    # 32 * ((h + 31) // 32) stands alone, or less h: the border of an image up to a multiple.
                    wanted = [n + less * q for n, q in zip(column, quantity, strict=True)]
                    for rounding in roundings:
                        rest = {
                            n - multiple * ((factor * q + rounding) // divisor)
                            for n, q in zip(wanted, quantity, strict=True)
                        }
                        if len(rest) == 1 and ((multiple == 1 and not less) or rest == {0}):
                            numerator = Expression(((factor, (number,)),), rounding)
                            ((_, numbers),) = self._divided(numerator, divisor).terms
                            terms = ((multiple, numbers), *(((-1, (number,)),) if less else ()))
                            return Expression(terms, rest.pop())
        return None

    def least(self, smallest: int | None) -> Ints:
        """Return the least value of each size: dims that were never empty in the samples are not empty."""
        if smallest is None:
            return tuple(map(min, self.quantities[: len(self.places)]))
        least = [smallest] * len(self.places)
        units = (1,) * len(self.places)
        template = Template((), tuple(self.places), {}, (), units, tuple(self.quotients))
        for expression, column in {e: self.columns[i] for i, e in self.expressions.items()}.items():
            size = self._grows_with(expression)
            if size is None:
                continue
            start = list(map(min, self.quantities[: len(self.places)]))
            value = functools.partial(_value_at, template, expression, start, size)
            least[size] = max(least[size], _first(value, min(1, *column), smallest, start[size]))
        return tuple(least)

    def _grows_with(self, expression: Expression) -> int | None:
        """Return the one size that an expression never falls with; None where there are several, or it may."""
        sizes = set()
        todo = [expression]
        while todo:
            for factor, numbers in todo.pop().terms:
                if factor < 0:
                    return None
                for number in numbers:
                    if number < len(self.places):
                        sizes.add(number)
                    else:
                        todo.append(self.quotients[number - len(self.places)].numerator)
        return sizes.pop() if len(sizes) == 1 else None


def _value_at(template: Template, expression: Expression, sizes: Sequence[int], changed: int, n: int) -> int:
    """Return the value of an expression at these sizes, with ``n`` in place of one of them."""
    value: int = expression.value(template.quantities([*sizes[:changed], n, *sizes[changed + 1 :]]))
    return value


def _one(number: int) -> Expression:
    """Return a quantity as an expression."""
    return Expression(((1, (number,)),))


def _line(values: Column, column: Column) -> tuple[int, int] | None:
    """Return the factor and the constant that make one column of another, None if there are none."""
    pairs = list(zip(values, column, strict=True))
    other = next((pair for pair in pairs if pair[0] != pairs[0][0]), None)
    if other is None:
        return None
    factor, rest = divmod(other[1] - pairs[0][1], other[0] - pairs[0][0])
    constant = pairs[0][1] - factor * pairs[0][0]
    fits = rest == 0 and factor != 0 and all(v == factor * p + constant for p, v in pairs)
    return (factor, constant) if fits else None


def _first(value: Callable[[int], int], floor: int, low: int, high: int) -> int:
    """Return the smallest size from ``low`` on whose value is at least ``floor``; at ``high`` it is."""
    while low < high:
        middle = (low + high) // 2
        if value(middle) >= floor:
            high = middle
        else:
            low = middle + 1
    return low
