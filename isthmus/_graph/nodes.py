"""Nodes: calls of functional ATen ops on other nodes, immutable, and made once.

A node is found again by what it is: the same call on the same inputs is the same object, in this step and in
the next, because leaves are numbered in the order in which a trace meets them. So the outputs of a trace, as a
tuple of objects, name its program exactly, and nothing is hashed twice.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from isthmus._graph.layout import Spec
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import schema_of


class Type(NamedTuple):
    """What a value is: a tensor of this size and dtype, its elements in row-major order."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}"

    @property
    def nbytes(self) -> int:
        """Return the bytes of such a tensor."""
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class Leaf:
    """Something a program is given: the ``index``-th array, number, offset or draw of its trace.

    An ``array`` is a tensor. A ``number`` is of the Python type ``number``. An ``offset`` is an int that says where
    a view starts. A ``draw`` is four 32-bit words from which an op makes its random numbers. ``sharding`` is how an
    array is split over a mesh, None where it is not (``_runtime/placement.py``).
    """

    kind: str
    index: int
    type: Type
    number: Any = float
    sharding: Any = None


@dataclass(frozen=True)
class Input:
    """Stands in a call's arguments for the node's ``index``-th input."""

    index: int


@dataclass(frozen=True, eq=False)
class Call:
    """An op and its arguments, with an ``Input`` for each that varies; interned, so compared by identity.

    ``op`` is an ATen overload; in graphs of ``torch.compile`` and ``isthmus.export`` it may also be a Python function
    of values, such as ``_program/control_flow.cond``, whose arguments are named "0", "1", ... One of these may be a
    ``Graph``, a branch or a body: its leaves are its own and no inputs of the node.

    Arguments at their defaults and those that say where a result lives are left out. ``context`` is what else the op
    depends on: torch's default dtype, and its float32 matmul precision where that matters. A ``random`` call has one
    more input, the (seed, offset) words of a draw, and uses the offset ``draw`` places after it. ``layouts`` are those
    of the tensor arguments, for the few ops whose kernels look at strides.
    """

    op: Any
    arguments: tuple[tuple[str, Any], ...]
    types: tuple[Type | None, ...]
    context: tuple[torch.dtype, str | None] = (torch.float32, None)
    random: bool = False
    draw: int = 0
    layouts: tuple[Spec, ...] | None = None

    def __repr__(self) -> str:
        return f"Call({self.op}, {', '.join(f'{name}={value!r}' for name, value in self.arguments)})"


@dataclass(frozen=True)
class Item:
    """One of the results of a call that has several."""

    index: int


class Node:
    """A value: a leaf, a call on other nodes, or one result of a call."""

    __slots__ = ("call", "inputs", "results", "types")

    def __init__(self, call: Call | Leaf | Item, inputs: tuple[Node, ...]) -> None:
        self.call, self.inputs = call, inputs
        self.results: tuple[Node | None, ...] = ()
        if isinstance(call, Item):
            self.types: tuple[Type | None, ...] = (inputs[0].types[call.index],)
        else:
            self.types = (call.type,) if isinstance(call, Leaf) else call.types
        # Items are made with their call, not interned: the call is, so each of its results is one object as well.
        if len(self.types) != 1:
            self.results = tuple(
                None if t is None else Node(Item(n), (self,)) for n, t in enumerate(self.types)
            )

    @property
    def type(self) -> Type:
        """Return the type of a node with one result."""
        (found,) = self.types
        assert found is not None
        return found

    def __repr__(self) -> str:
        return f"Node({self.call!r})"


# Bounded by ``forget_all_but``, which lazy mode calls when the tables have grown; clearing one of them alone would give
# two objects for one value.
_calls: dict[tuple[Any, ...], Call] = {}
_table: dict[tuple[Any, ...], Node] = {}
_leaves: dict[Leaf, Node] = {}
TABLE = _table
"""Every node by its call and inputs; recording looks a node up here before it makes one."""


def call_of(
    op: Any,
    arguments: dict[str, Any],
    types: Iterable[Type | None],
    *,
    context: tuple[torch.dtype, str | None] = (torch.float32, None),
    random: bool = False,
    draw: int = 0,
    layouts: tuple[Spec, ...] | None = None,
) -> Call:
    """Return the one call with these parts."""
    named = canonical(op, arguments)
    parts = (tuple(types), context, random, draw, layouts)
    key = (op, exact(named), *parts)
    # ``setdefault`` is atomic: of two threads that make a call at once, both get the first one's.
    return _calls.get(key) or _calls.setdefault(key, Call(op, named, *parts))


def numbered(args: Iterable[Any]) -> dict[str, Any]:
    """Return the arguments of a Python function by the names they have in a call."""
    return {str(n): value for n, value in enumerate(args)}


def canonical(op: Any, arguments: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the arguments that are not at their defaults, in the schema's order, lists as tuples."""
    overload = isinstance(op, OpOverload)
    defaults = {a.name: a.default for a in schema_of(op).arguments if a.has_default} if overload else {}
    frozen = {name: _frozen(value) for name, value in arguments.items()}
    return tuple(
        (name, value)
        for name, value in frozen.items()
        if name not in defaults or exact(value) != exact(_frozen(defaults[name]))
    )


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def exact(value: Any) -> Any:
    """Return what tells a value from those Python calls equal: 1, 1.0 and True, 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple([exact(item) for item in value])
    return (type(value), repr(value)) if isinstance(value, (bool, float, complex)) else value


def leaf(kind: str, index: int, type: Type, number: Any = float, sharding: Any = None) -> Node:
    """Return the one node of a leaf."""
    key = Leaf(kind, index, type, number, sharding)
    return _leaves.get(key) or _leaves.setdefault(key, Node(key, ()))


def node(call: Call, *inputs: Node) -> Node:
    """Return the one node of a call on these inputs."""
    key = (call, *inputs)
    interned = _table.get(key)
    if interned is None:
        interned = _table[key] = Node(call, inputs)
    return interned


@contextlib.contextmanager
def temporary() -> Iterator[None]:
    """Let calls and nodes made inside leave the tables afterwards; graphs that use them keep them alive.

    A graph of ``torch.compile`` is converted once, and its nodes may hold constants and sub-graphs: the tables must
    not. A node that another thread records meanwhile may go too, and is then made anew when it is recorded again.
    """
    sizes = [(table, len(table)) for table in (_calls, _table)]
    try:
        yield
    finally:
        for table, size in sizes:
            for key in list(itertools.islice(table, size, None)):  # in the order in which they were made
                table.pop(key, None)  # type: ignore[call-overload]


def forget_all_but(roots: Iterable[Node]) -> None:
    """Drop every node that none of ``roots`` needs; an equal one recorded later is a new object."""
    alive = list(reachable(roots))
    calls = {n.call for n in alive}
    table = {(n.call, *n.inputs): n for n in alive if isinstance(n.call, Call)}
    # Rewritten in place: recording holds on to the dict (``TABLE``).
    _table.clear()
    _table.update(table)
    for key in [key for key, call in _calls.items() if call not in calls]:
        del _calls[key]
    # Numbers, offsets and draws have few types, so their leaves are few; arrays come in every shape.
    for leaf in [leaf for leaf in _leaves if leaf.kind == "array" and leaf not in calls]:
        del _leaves[leaf]


def reachable(roots: Iterable[Node]) -> Iterator[Node]:
    """Yield every node that ``roots`` need, inputs before their users."""
    seen: set[Node] = set()
    # Written without recursion: a long loop makes a deep graph.
    stack: list[tuple[Node, bool]] = [(root, False) for root in reversed(list(roots))]
    while stack:
        found, ready = stack.pop()
        if ready:
            yield found
        elif found not in seen:
            seen.add(found)
            stack.append((found, True))
            stack += [(given, False) for given in reversed(found.inputs) if given not in seen]
