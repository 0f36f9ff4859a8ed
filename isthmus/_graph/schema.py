"""What a schema says of an op: the kind of each argument, what it mutates, its functional twin."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isthmus._graph.private import OpOverload, torch_schema

# Arguments that say where a result lives, not what it is: the device layer answers them.
PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"})

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


ABSENT: Any = _Absent()
"""Stands for an argument a call leaves at its default."""


@dataclass(frozen=True)
class Argument:
    """One argument of a schema; ``kind`` is tensor, tensors, scalar, scalars or static."""

    name: str
    kind: str
    type: str
    default: Any
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

    op: OpOverload
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

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return every argument by name, defaults filled in."""
        names = [argument.name for argument in self.arguments]
        bound = {argument.name: argument.default for argument in self.arguments if argument.has_default}
        bound.update(zip(names, args, strict=False))
        bound.update(kwargs)
        return {name: bound[name] for name in names if name in bound}

    def ordered(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return every argument in order, ABSENT where the call leaves it at its default."""
        by_name = dict(zip([argument.name for argument in self.arguments], args, strict=False)) | kwargs
        return tuple(by_name.get(argument.name, ABSENT) for argument in self.arguments)

    def named(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """Return every argument by name, given all of them in order with ABSENT for defaults."""
        pairs = zip(self.arguments, values, strict=True)
        return {a.name: a.default if value is ABSENT else value for a, value in pairs}

    def split(self, values: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
        """Return the same values as positional and keyword arguments of a call, defaults left out."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument, value in zip(self.arguments, values, strict=True):
            if value is ABSENT:
                continue
            if argument.keyword_only or len(args) != argument.position:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return args, kwargs


@functools.cache
def schema_of(op: OpOverload) -> Schema:
    """Return the schema of ``op`` in the terms used here."""
    schema = torch_schema(op)
    arguments = tuple(_argument(argument, n) for n, argument in enumerate(schema.arguments))
    returns = tuple(
        Return(isinstance(r.type, torch.ListType), r.alias_info is not None) for r in schema.returns
    )
    mutated = tuple(argument.name for argument in arguments if argument.mutated)
    # A result that is written is the argument itself, as in add_; one that is not is a view.
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return Schema(op, schema.name, schema.overload_name, arguments, returns, mutated, views)


def _argument(argument: Any, position: int) -> Argument:
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
def functional_of(op: OpOverload) -> OpOverload | None:
    """Return the op that computes what ``op`` writes: ``add.Tensor`` for ``add_.Tensor`` and ``add.out``."""
    schema = schema_of(op)
    if not schema.mutated:
        return None
    namespace, name = schema.name.split("::")
    inputs = [a for a in schema.arguments if not a.out]
    if len(inputs) < len(schema.arguments):
        # With another argument written besides ``out``, results and targets come in different orders.
        if any(a.mutated for a in inputs):
            return None
        stem = name
    else:
        stem = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    # Where the plain name is taken by other overloads, the twin is called ``normal_functional``.
    return _overload(namespace, stem, inputs) or _overload(namespace, f"{stem}_functional", inputs)


def _overload(namespace: str, name: str, wanted: list[Argument]) -> OpOverload | None:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return None
    signature = [(argument.name, argument.type) for argument in wanted]
    for overload in packet.overloads():
        candidate = schema_of(getattr(packet, overload))
        if not candidate.mutated and [(a.name, a.type) for a in candidate.arguments] == signature:
            return candidate.op
    return None


@functools.cache
def mutating_of(op: OpOverload) -> tuple[OpOverload, ...]:
    """Return the in-place and ``out=`` overloads whose functional twin is ``op``."""
    namespace, name = schema_of(op).name.split("::")
    twins = []
    stem = name.removesuffix("_functional")
    for candidate in dict.fromkeys((name, f"{name}_", stem, f"{stem}_")):
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        if packet is None:
            continue
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        twins += [o for o in overloads if functional_of(o) is op]
    return tuple(twins)
