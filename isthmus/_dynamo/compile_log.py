"""Compiles specializations, and records what was compiled for its listeners: ``isthmus.explain``."""

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
    refusals: list[tuple[str, str]] = field(default_factory=list)
    """The programs that are compiled exactly for each of their sizes, and what refused to be padded."""


_listeners: list[Record] = []


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Record what is compiled inside this block."""
    record = Record()
    _listeners.append(record)
    try:
        yield record
    finally:
        _listeners.remove(record)


def is_recording() -> bool:
    """Return whether somebody listens."""
    return bool(_listeners)


def refused(name: str, why: str) -> None:
    """Tell those who listen what refused to be padded in a program whose sizes vary."""
    for record in _listeners:
        record.refusals.append((name, why))


def graph(clusters: Clusters) -> None:
    """Tell those who listen of a new graph."""
    for record in _listeners:
        record.graphs.append(clusters)


def compile(specialization: Specialization) -> staged.Program:
    """Return the program of a specialization, compiled, and add it to the records that are open."""
    made = specialization.compile()
    source = specialization.program
    for record in _listeners:
        for part in made.parts:
            record.compilations.append(Compilation(source.name, source.module, part))
    return made
