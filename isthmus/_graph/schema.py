"""What a schema says of an op: the kind of each argument, what it mutates, its functional twin.

torch describes each overload by a schema, ``aten::add.out(Tensor self, Tensor other, *, Scalar alpha=1, Tensor(a!) out)
-> Tensor(a!)``. ``schema_of`` reads it once into a record with the questions asked here: which arguments are tensors,
which is written, which only say where a result lives (``PLACEMENT``). Entries, plans, lowerings, the converters and the
reference backend all go through it; torch's own object is private (``private.torch_schema``).

``functional_of`` and ``mutating_of`` connect ``add.out`` and ``add_.Tensor`` with ``add.Tensor``, by name and
arguments: a lowering is written for the functional form, and the others follow from it. Where torch's names break that
rule the twin is None, and the op needs a lowering or a kernel of its own.

Arguments of a call travel as a tuple in the schema's order, with ``ABSENT`` where the call leaves the default:
``split`` turns it back into positional and keyword arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isthmus._graph.arguments import Arguments, Value
from isthmus._graph.private import Op, torch_schema

# Arguments that say where a result lives, not what it is: the device layer answers them.
PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"})

# How an argument reaches a program, by the type that its schema gives it; anything else is compiled in.
_KINDS = {
    "Tensor": "tensor",
    "Optional[Tensor]": "tensor",
    "List[Tensor]": "tensors",
    "List[Optional[Tensor]]": "tensors",
    "Optional[List[Tensor]]": "tensors",
    "number": "scalar",
    "Optional[number]": "scalar",
    "List[number]": "scalars",
}


class _Absent:
    """The type of ``ABSENT``."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Value = _Absent()
"""Stands for an argument a call leaves at its default."""


@dataclass(frozen=True)
class Argument:
    """One argument of a schema; ``kind`` is tensor, tensors, scalar, scalars or static."""

    name: str
    kind: str
    type: str
    default: Value
    has_default: bool
    mutated: bool
    out: bool
    keyword_only: bool
    position: int


@dataclass(frozen=True)
class Return:
    """One result of a schema: whether it is a list of tensors, and whether it is or shows one of the arguments."""

    is_list: bool
    is_alias: bool


@dataclass(frozen=True)
class Schema:
    """The part of an op's schema that dispatch needs; ``name`` is ``aten::add``, ``overload`` is ``Tensor`` or ""."""

    op: Op
    name: str
    overload: str
    arguments: tuple[Argument, ...]
    returns: tuple[Return, ...]
    mutated: tuple[str, ...]
    returns_aliases: bool

    @property
    def has_out(self) -> bool:
        """Whether this is the ``out=`` form of an op."""
        return any([argument.out for argument in self.arguments])

    def bind(self, args: Sequence[Value], kwargs: Arguments) -> Arguments:
        """Return every argument by name, defaults filled in."""
        names = [argument.name for argument in self.arguments]
        # Defaults first, then what the call says by place, then by name.
        bound = {argument.name: argument.default for argument in self.arguments if argument.has_default}
        bound.update(zip(names, args, strict=False))
        bound.update(kwargs)
        return {name: bound[name] for name in names if name in bound}

    def ordered(self, args: Sequence[Value], kwargs: Arguments) -> tuple[Value, ...]:
        """Return every argument in order, ABSENT where the call leaves it at its default."""
        by_name = dict(zip([argument.name for argument in self.arguments], args, strict=False)) | kwargs
        return tuple(by_name.get(argument.name, ABSENT) for argument in self.arguments)

    def named(self, values: tuple[Value, ...]) -> Arguments:
        """Return every argument by name, given all of them in order with ABSENT for defaults."""
        pairs = zip(self.arguments, values, strict=True)
        return {a.name: a.default if value is ABSENT else value for a, value in pairs}

    def split(self, values: tuple[Value, ...]) -> tuple[list[Value], Arguments]:
        """Return the same values as positional and keyword arguments of a call, defaults left out."""
        args: list[Value] = []
        kwargs: Arguments = {}
        for argument, value in zip(self.arguments, values, strict=True):
            if value is ABSENT:
                continue
            # A skipped default makes all later arguments keyword ones.
            if argument.keyword_only or len(args) != argument.position:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return args, kwargs


@functools.cache
def schema_of(op: Op) -> Schema:
    """Return the schema of ``op`` in the terms used here."""
    # ``functools.cache`` without a bound: there are as many schemas as ops.
    schema = torch_schema(op)
    arguments = tuple(_argument(argument, n) for n, argument in enumerate(schema.arguments))
    returns = tuple(
        Return(isinstance(r.type, torch.ListType), r.alias_info is not None) for r in schema.returns
    )
    mutated = tuple(argument.name for argument in arguments if argument.mutated)
    # A result that is written is the argument itself, as in add_; one that is not is a view.
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return Schema(op, schema.name, schema.overload_name, arguments, returns, mutated, views)


def _argument(argument: torch.Argument, position: int) -> Argument:
    kind = str(argument.type)
    return Argument(
        name=argument.name,
        kind=_KINDS.get(kind, "static"),
        type=kind,
        default=argument.default_value if argument.has_default_value() else None,
        has_default=argument.has_default_value(),
        mutated=argument.alias_info is not None and argument.alias_info.is_write,
        out=argument.is_out,
        keyword_only=argument.kwarg_only,
        position=position,
    )


@functools.cache
def functional_of(op: Op) -> Op | None:
    """Return the op that computes what ``op`` writes: ``add.Tensor`` for ``add_.Tensor`` and ``add.out``."""
    schema = schema_of(op)
    if not schema.mutated:
        return None
    namespace, name = schema.name.split("::")
    inputs = [a for a in schema.arguments if not a.out]
    # An ``out=`` form: it has one more argument than the op that computes.
    if len(inputs) < len(schema.arguments):
        # With another argument written besides ``out``, results and targets come in different orders.
        if any(a.mutated for a in inputs):
            return None
        stem = name
    else:
        # ``__iand__`` and its like end in two underscores and are no in-place forms of that kind.
        stem = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    # Where the plain name is taken by other overloads, the twin is called ``normal_functional``.
    return _overload(namespace, stem, inputs) or _overload(namespace, f"{stem}_functional", inputs)


def _overload(namespace: str, name: str, inputs: list[Argument]) -> Op | None:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return None
    signature = [(argument.name, argument.type) for argument in inputs]
    for overload in packet.overloads():
        candidate = schema_of(getattr(packet, overload))
        if not candidate.mutated and [(a.name, a.type) for a in candidate.arguments] == signature:
            return candidate.op
    return None


@functools.cache
def mutating_of(op: Op) -> tuple[Op, ...]:
    """Return the in-place and ``out=`` overloads whose functional twin is ``op``."""
    namespace, name = schema_of(op).name.split("::")
    twins = []
    # In-place forms end in an underscore, ``out=`` forms share the name.
    stem = name.removesuffix("_functional")
    for candidate in dict.fromkeys((name, f"{name}_", stem, f"{stem}_")):
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        if packet is None:
            continue
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        # Asked the other way round, so that both directions agree by construction.
        twins += [o for o in overloads if functional_of(o) is op]
    return tuple(twins)
