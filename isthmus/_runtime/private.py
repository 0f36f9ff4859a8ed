"""Every private API of JAX that Isthmus uses; checked on JAX 0.10 and 0.11 by tests/test_private.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


def fast_call(compiled: jax.stages.Compiled) -> Callable[..., Any]:
    """Return the cheapest way to call ``compiled``: JAX's C++ path where it has one."""
    executable, params = getattr(compiled, "_executable", None), getattr(compiled, "_params", None)
    create = getattr(executable, "create_cpp_call", None)
    call = create(params) if create is not None and params is not None else None
    return call if call is not None else compiled


def is_traced(values: Sequence[Any]) -> bool:
    """Return whether any of ``values`` is a JAX tracer."""
    return any(isinstance(value, jax.core.Tracer) for value in values)
