"""Conditions on values: a lowering requires one, the program returns it, the host raises if it was false."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

_local = threading.local()


@dataclass
class Checks:
    """The conditions found while one program was traced, and what to raise for each."""

    flags: list[Any] = field(default_factory=list)
    errors: list[tuple[type[Exception], str]] = field(default_factory=list)

    def first_failed(self, before: Any) -> Any:
        """Return the number of the first condition that fails, counted from 1, unless one has failed before."""
        held = jnp.stack(self.flags)
        return jnp.where(
            before != 0, before, jnp.where(held.all(), 0, 1 + held.argmin()).astype(before.dtype)
        )


@contextlib.contextmanager
def collecting() -> Iterator[Checks]:
    """Collect the conditions that lowerings require inside this block."""
    outer = getattr(_local, "checks", None)
    _local.checks = found = Checks()
    try:
        yield found
    finally:
        _local.checks = outer


def require(ok: Any, error: type[Exception], message: str) -> None:
    """Raise ``error`` on the host unless ``ok`` turns out true when the program runs."""
    found = getattr(_local, "checks", None)
    if found is not None:
        found.flags.append(jnp.all(ok))
        found.errors.append((error, message))
