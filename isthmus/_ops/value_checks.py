"""Value checks: a lowering requires a condition, the program returns it, the host raises if it was false.

An index out of range cannot raise inside XLA, which clamps it. So ``require(index < size, IndexError, message)`` adds
a flag to the trace that runs inside ``collecting()``, the program returns ``first_failed``, one integer that is 0 where
every condition holds, and the host looks it up in ``errors`` (``_device/checks/value_checks.py``)::

    with collecting() as checks:
        outputs = lowering(arguments)          # calls require()
    code = checks.first_failed(previous_code)  # 0, or 1 + the place in checks.errors

``_device/core/plan.py`` and ``_program/evaluate.py`` collect. Outside of ``collecting()`` a condition is dropped: shape
inference has no program to return it from. A condition inside a loop or a branch is carried out of it by the code that
traces the loop (``_program/control_flow.py``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from isthmus._ops.common import Array

Error = tuple[type[Exception], str]
_local = threading.local()


@jax.tree_util.register_pytree_node_class
@dataclass
class Checks:
    """The conditions found while one program was traced, and what to raise for each.

    A pytree whose leaves are the flags; the errors are part of its structure, so JAX hands them through where it traces
    a function apart (``_device/core/derivatives.py``).
    """

    flags: list[Array] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)

    def tree_flatten(self) -> tuple[tuple[Array, ...], tuple[Error, ...]]:
        """Return the flags, and the structure around them."""
        return tuple(self.flags), tuple(self.errors)

    @classmethod
    def tree_unflatten(cls, errors: tuple[Error, ...], flags: Sequence[Array]) -> Checks:
        """Return the checks of this structure with these flags."""
        return cls(list(flags), list(errors))

    def first_failed(self, before: Array | None = None) -> Array:
        """Return the number of the first condition that fails, counted from 1, unless one has failed before."""
        before = jnp.zeros((), jnp.int32) if before is None else before
        held = jnp.stack(self.flags)
        return jnp.where(
            before != 0, before, jnp.where(held.all(), 0, 1 + held.argmin()).astype(before.dtype)
        )


@contextlib.contextmanager
def collecting() -> Iterator[Checks]:
    """Collect the conditions that lowerings require inside this block."""
    # Traces nest (a decomposition inside a plan), and each program raises for its own conditions.
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
