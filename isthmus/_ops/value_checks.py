"""Conditions on values: a lowering requires one, the program returns it, the host raises if it was false."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax.numpy as jnp

from isthmus._ops.common import Array

_local = threading.local()


@dataclass
class Checks:
    """The conditions found while one program was traced, and what to raise for each."""

    flags: list[Array] = field(default_factory=list)
    errors: list[tuple[type[Exception], str]] = field(default_factory=list)

    def first_failed(self, before: Array) -> Array:
        """Return the number of the first condition that fails, counted from 1, unless one has failed before."""
        held = jnp.stack(self.flags)
        return jnp.where(
            before != 0, before, jnp.where(held.all(), 0, 1 + held.argmin()).astype(before.dtype)
        )


@contextlib.contextmanager
def collecting() -> Iterator[Checks]:
    """Collect the conditions that lowerings require inside this block."""
    outer = getattr(_local, "checks", None)
    _local.checks = checks = Checks()
    try:
        yield checks
    finally:
        _local.checks = outer


def require(ok: Array | bool, error: type[Exception], message: str) -> None:
    """Raise ``error`` on the host unless ``ok`` turns out true when the program runs."""
    checks = getattr(_local, "checks", None)
    if checks is not None:
        checks.flags.append(jnp.all(ok))
        checks.errors.append((error, message))
