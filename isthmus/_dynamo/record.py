"""Compiles specializations, and remembers what was compiled for those who ask: explain, metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from isthmus._runtime import compiler

if TYPE_CHECKING:
    from isthmus._dynamo.program import Specialization


def compile(specialization: Specialization, donated: tuple[int, ...]) -> Callable[..., Any]:
    """Return the executable of a specialization."""
    return compiler.compile(specialization.compute, specialization.examples, donated)
