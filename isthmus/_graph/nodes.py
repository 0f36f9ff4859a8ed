"""Nodes: calls of functional ATen ops on other nodes, immutable, and made once.

A node is found again by what it is: the same call on the same inputs is the same object, in this step and in
the next, because leaves are numbered in the order in which a trace meets them. So the outputs of a trace, as a
tuple of objects, name its program exactly, and nothing is hashed twice::

    x = leaf("array", 0, Type((3,), torch.float32))
    node(call_of(aten.neg.default, {"self": Input(0)}, [x.type]), x) is node(the same)       # True

A ``Call`` holds what is compiled in (the op, static arguments, types of results), a ``Node`` a call and its inputs; an
``Item`` is one of several results. Equal calls being one node, common subexpressions need no pass.

The tables would grow for ever: ``forget_all_but`` drops what no program uses, and graphs of ``torch.compile``, which
are converted once, keep theirs out of them (``temporary``). Two objects for one value are no error, only a program
that is compiled twice.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from isthmus._graph.arguments import AnyFunction, Arguments, Value
from isthmus._graph.layout import Spec
from isthmus._graph.private import Op, OpOverload
from isthmus._graph.schema import schema_of

# Of int, float, bool or complex: inside a class with a field ``type`` it has no other name.
NumberType = type[complex]
Callee = Op | AnyFunction
"""What a call calls: an overload, or a Python function."""


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
    number: NumberType = float
    sharding: Hashable | None = None


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

    op: Callee
    arguments: tuple[tuple[str, Value], ...]
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
        # A node refers to its inputs, never to its users: a node that is not read is garbage-collected.
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
        (only,) = self.types
        assert only is not None
        return only

    def __repr__(self) -> str:
        return f"Node({self.call!r})"


# Bounded by ``forget_all_but``, which lazy mode calls when the tables have grown; clearing one of them alone would give
# two objects for one value.
_calls: dict[tuple[Hashable, ...], Call] = {}
_table: dict[tuple[Hashable, ...], Node] = {}
_leaves: dict[Leaf, Node] = {}
TABLE = _table
"""Every node by its call and inputs; recording looks a node up here before it makes one."""


class _Own(threading.local):
    """What this thread has made inside ``temporary``, None outside."""

    calls: dict[tuple[Hashable, ...], Call] | None = None
    table: dict[tuple[Hashable, ...], Node] | None = None


_own = _Own()


def call_of(
    op: Callee,
    arguments: Arguments,
    types: Iterable[Type | None],
    *,
    context: tuple[torch.dtype, str | None] = (torch.float32, None),
    random: bool = False,
    draw: int = 0,
    layouts: tuple[Spec, ...] | None = None,
) -> Call:
    """Return the one call with these parts."""
    # Defaults are left out, so that two spellings of one call are one object.
    named = canonical(op, arguments)
    parts = (tuple(types), context, random, draw, layouts)
    # ``exact``: 1, 1.0 and True are equal in Python and different in torch.
    key = (op, exact(named), *parts)
    calls = _calls if _own.calls is None else _own.calls
    # ``setdefault`` is atomic: of two threads that make a call at once, both get the first one's.
    return calls.get(key) or _calls.get(key) or calls.setdefault(key, Call(op, named, *parts))


def numbered(args: Iterable[Value]) -> Arguments:
    """Return the arguments of a Python function by the names they have in a call."""
    return {str(n): value for n, value in enumerate(args)}


def canonical(op: Callee, arguments: Arguments) -> tuple[tuple[str, Value], ...]:
    """Return the arguments that are not at their defaults, in the schema's order, lists as tuples."""
    overload = isinstance(op, OpOverload)
    defaults = {a.name: a.default for a in schema_of(op).arguments if a.has_default} if overload else {}
    frozen = {name: _frozen(value) for name, value in arguments.items()}
    return tuple(
        (name, value)
        for name, value in frozen.items()
        if name not in defaults or exact(value) != exact(_frozen(defaults[name]))
    )


def _frozen(value: Value) -> Value:
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def exact(value: Value) -> Hashable:
    """Return a key that tells a value from those Python calls equal: 1, 1.0 and True, 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple([exact(item) for item in value])
    return (type(value), repr(value)) if isinstance(value, (bool, float, complex)) else value


def leaf(
    kind: str, index: int, type: Type, number: NumberType = float, sharding: Hashable | None = None
) -> Node:
    """Return the one node of a leaf."""
    # ``setdefault`` here too: two threads may meet the same leaf at once.
    key = Leaf(kind, index, type, number, sharding)
    return _leaves.get(key) or _leaves.setdefault(key, Node(key, ()))


def node(call: Call, *inputs: Node) -> Node:
    """Return the one node of a call on these inputs."""
    key = (call, *inputs)
    table = _table if _own.table is None else _own.table
    # This thread's own first: an equal node that another thread records meanwhile would be a second object here.
    return table.get(key) or _table.get(key) or table.setdefault(key, Node(call, inputs))


@contextlib.contextmanager
def temporary() -> Iterator[None]:
    """Keep calls and nodes that this thread makes inside out of the tables; graphs that use them keep them alive.

    A graph of ``torch.compile`` is converted once, and its nodes may hold constants and sub-graphs: the tables must
    not. What the tables have already is used, and other threads go on recording into them.
    """
    if _own.table is not None:  # inside another: the outer one's are as temporary
        yield
        # The tables of this thread alone; other threads record into the shared ones meanwhile.
        return
    _own.calls, _own.table = {}, {}
    try:
        yield
    finally:
        _own.calls = _own.table = None


def forget_all_but(roots: Iterable[Node]) -> None:
    """Drop every node that none of ``roots`` needs; an equal one recorded later is a new object."""
    # From the programs that exist: everything they could be found by stays.
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
        current, ready = stack.pop()
        # Its inputs have all been yielded: it is the second time that it is on the stack.
        if ready:
            yield current
        elif current not in seen:
            seen.add(current)
            stack.append((current, True))
            stack += [(source, False) for source in reversed(current.inputs) if source not in seen]
