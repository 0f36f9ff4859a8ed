"""Compiles specializations, and remembers what was compiled while somebody listens: ``isthmus.explain``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus._dynamo.clusters import Clusters
    from isthmus._dynamo.specialization import Specialization
    from isthmus._program import staged
    from isthmus._program.program import CompiledProgram


@dataclass(frozen=True)
class Compilation:
    """One compiled program, its name, and the FX graph it was made from."""

    name: str
    module: Any
    made: CompiledProgram


@dataclass(eq=False)
class Record:
    """Every graph and every executable made while recording."""

    graphs: list[Clusters] = field(default_factory=list)
    compilations: list[Compilation] = field(default_factory=list)


_listeners: list[Record] = []


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Record what is compiled inside this block."""
    found = Record()
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners.remove(found)


def graph(clusters: Clusters) -> None:
    """Tell those who listen of a new graph."""
    for record in _listeners:
        record.graphs.append(clusters)


def compile(specialization: Specialization) -> staged.Program:
    """Return the program of a specialization, compiled, and add it to the records that are open."""
    made = specialization.compile()
    program = specialization.program
    for record in _listeners:
        for part in made.parts:
            record.compilations.append(Compilation(program.name, program.module, part))
    return made
