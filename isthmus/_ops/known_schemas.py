"""The schemas our lowerings were written for, so that one which no longer fits is noticed before it computes.

torch renames, adds, removes and retypes arguments of ATen ops from release to release. A lowering is called with
arguments by name, and the shared wrappers (``elementwise``, ``foreach``) read names off the schema, so a
changed schema could raise in the middle of a program or, worse, put a number where another one belongs.

``schemas.txt`` lists every op that has a lowering with the arguments that torch gave it when the lowering was
checked, in one line per form that any supported torch has::

    aten._cdist_backward.default(grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor)
    aten._cdist_backward.default(grad_output: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor)

``registry.lowering`` asks ``match`` about each op. An op whose schema is in the list, or is one in the list with
further arguments that have defaults, is accepted; arguments that were only renamed are handed to the lowering
under the name it knows. Everything else is refused: the op takes its decomposition or runs on the CPU, and
``isthmus doctor`` lists it. ``python tests/update_schemas.py`` adds the forms of the installed torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from isthmus._graph.private import Op
from isthmus._graph.schema import Argument, Schema, schema_of

FILE = Path(__file__).with_name("schemas.txt")
NEEDED = frozenset(
    {
        "aten.as_strided.default",
        "aten.clone.default",
        "aten._copy_from.default",
        "aten._copy_from_and_resize.default",
        "aten.copy.default",
        "aten.copy_.default",
        "aten.empty.memory_format",
        "aten.empty_strided.default",
        "aten.equal.default",
        "aten._local_scalar_dense.default",
        "aten.resize_.default",
        "aten._to_copy.default",
        "aten.set_.source_Storage_storage_offset",
        "aten.view.default",
    }
)
"""Ops by which every lower tier moves tensors to the CPU and back. They have none, so they are tried in any case."""
Form = tuple[tuple[str, str], ...]
"""The arguments of an op as pairs of name and type. torch shows ``SymInt`` as ``int``, so the two are one here."""


@dataclass(frozen=True)
class Match:
    """How a schema of the running torch relates to the forms in the list."""

    arguments: tuple[Argument, ...]
    """The arguments that a known form has; others are new and have defaults."""
    forms: tuple[Form, ...]
    """Forms with the same types in the same places: each gives other names to ``arguments``."""

    def renamed(self, parameters: set[str]) -> dict[str, str]:
        """Return the lowering's name for each argument that torch calls otherwise, given the lowering's parameters."""
        now = [argument.name for argument in self.arguments]
        for form in self.forms:
            names = [name for name, _ in form]
            if parameters <= set(names):
                return {new: old for new, old in zip(now, names, strict=True) if new != old}
        return {}


def form_of(schema: Schema) -> Form:
    """Return the arguments of a schema as the list writes them."""
    return tuple((argument.name, argument.type) for argument in schema.arguments)


@functools.cache
def known_forms() -> dict[str, list[Form]]:
    """Return the forms of every op in the list, by the op's name."""
    forms: dict[str, list[Form]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        op, _, rest = line.removesuffix(")").partition("(")
        # Types have no ", " in them, so this finds the arguments.
        pairs = [pair.split(": ") for pair in rest.split(", ") if pair]
        forms.setdefault(op, []).append(tuple((name, kind) for name, kind in pairs))
    return forms


def match(schema: Schema) -> Match | None:
    """Return how ``schema`` fits the forms its lowering was checked with, or None where it fits none of them.

    An op that is not in the list (a user's, or another library's) has nothing to be compared with and fits.
    """
    forms = known_forms().get(str(schema.op))
    if forms is None or str(schema.op) in NEEDED:
        return Match(schema.arguments, (form_of(schema),))
    for form in forms:
        names = {name for name, _ in form}
        # An argument that is new and has a default may be left out; one without must be in the form.
        arguments = tuple(a for a in schema.arguments if a.name in names or not a.has_default)
        if tuple((a.name, a.type) for a in arguments) == form:
            # Forms that differ in names alone: the lowering's parameters say which of them it was written for.
            kinds = [kind for _, kind in form]
            return Match(arguments, tuple(f for f in forms if [kind for _, kind in f] == kinds))
    return None


def arguments_of(op: Op) -> tuple[Argument, ...]:
    """Return the arguments of ``op`` that its lowering was written for; all of them where the op drifted or is unknown.

    Wrappers that read names off the schema use this: an argument that is new in this torch must not become an operand.
    """
    schema = schema_of(op)
    matched = match(schema)
    return schema.arguments if matched is None else matched.arguments


def describe(form: Form) -> str:
    """Return a form as text."""
    return "(" + ", ".join(f"{name}: {kind}" for name, kind in form) + ")"
