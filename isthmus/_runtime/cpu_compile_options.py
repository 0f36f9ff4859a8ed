"""How hard XLA tries for the program of one op on the CPU: a small one takes longer to compile than it ever runs."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

# Up to so many elements in its largest array, loops of XLA's older kind run as fast as the newer; results may differ in
# last bits, as they do from one size to the next.
_SMALL = 4096
_OLDER: dict[str, str | bool] = {"xla_cpu_use_fusion_emitters": False}
# What adds, which it would do in another order than in a larger program, and what goes round who knows how often.
_OTHERS = ("reduce", "cum", "scatter", "dot", "conv_", "while", "scan")


def options_for(traced: Any) -> dict[str, Any]:
    """Return XLA's options for a traced program, none for a large one."""
    return dict(_OLDER) if _largest(traced.jaxpr.jaxpr) <= _SMALL and _is_known() else {}


def _largest(jaxpr: Any) -> float:
    """Return how many elements the largest array in a program has, infinitely many where ``_OTHERS`` are in it."""
    if any(equation.primitive.name.startswith(_OTHERS) for equation in jaxpr.eqns):
        return math.inf
    variables = [*jaxpr.invars, *jaxpr.constvars, *(v for e in jaxpr.eqns for v in e.outvars)]
    sizes = [math.prod(getattr(variable.aval, "shape", ())) for variable in variables]
    inner = [_largest(found) for equation in jaxpr.eqns for found in jaxprs_in_params(equation.params)]
    return max([*sizes, *inner], default=0)


@functools.cache
def _is_known() -> bool:
    """Return whether this XLA has the option: its name is no promise."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=_OLDER)
    except jax.errors.JaxRuntimeError:
        return False
    return True
