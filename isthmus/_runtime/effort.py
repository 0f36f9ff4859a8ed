"""How hard XLA tries for the program of one op on the CPU: a small one takes longer to compile than it ever runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax

# Elements of the largest array in a program: up to the first number code that is not optimised takes as long as the
# call around it, up to the second loops of the older kind are as fast.
_TINY, _SMALL = 64, 4096
_PLAIN = {"xla_cpu_use_fusion_emitters": False}
_PLAINEST = {**_PLAIN, "xla_backend_optimization_level": 0}
_LOOPS = frozenset({"while", "scan"})  # how often they go round is not to be seen


def options_for(traced: Any) -> dict[str, Any]:
    """Return XLA's options for a traced program, none for a large one."""
    largest = _largest(traced.jaxpr.jaxpr)
    if largest > _SMALL or not _are_known():
        return {}
    return dict(_PLAINEST if largest <= _TINY else _PLAIN)


def _largest(jaxpr: Any) -> float:
    """Return how many elements the largest array in a program has."""
    if any(equation.primitive.name in _LOOPS for equation in jaxpr.eqns):
        return math.inf
    variables = [*jaxpr.invars, *jaxpr.constvars, *(v for e in jaxpr.eqns for v in e.outvars)]
    sizes = [math.prod(getattr(variable.aval, "shape", ())) for variable in variables]
    return max([*sizes, *(_largest(inner) for e in jaxpr.eqns for inner in _inner(e.params.values()))], default=0)


def _inner(values: Any) -> Iterator[Any]:
    """Yield the programs among an equation's parameters."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _inner(value)
        elif hasattr(value, "eqns"):
            yield value
        elif hasattr(value, "jaxpr"):
            yield value.jaxpr


@functools.cache
def _are_known() -> bool:
    """Return whether this XLA has the options: their names are no promise."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=_PLAINEST)
    except jax.errors.JaxRuntimeError:
        return False
    return True
