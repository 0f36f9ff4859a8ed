"""XLA's options for the program of one eager op on the CPU: a small one takes longer to compile than it ever runs.

XLA has two code generators for CPU loops. The newer one ("fusion emitters") makes faster code for large arrays and
compiles more slowly; on small arrays both run equally fast. So small programs are compiled with the older one, unless
they contain a primitive that would then round differently or that may loop many times (``_EXCLUDED``).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxprs_in_params

# Up to so many elements in the largest array both generators run equally fast; results may differ in their last bits,
# as they do from one size to the next.
_SMALL = 4096
_OLDER: dict[str, str | bool] = {"xla_cpu_use_fusion_emitters": False}
# Primitives, by how their names begin, that keep the newer generator: sums, which the older one adds up in another
# order than a larger program does, and loops, whose number of rounds is not known here.
_EXCLUDED = ("reduce", "cum", "scatter", "dot", "conv_", "while", "scan")


def options_for(traced: jax.stages.Traced) -> dict[str, Any]:
    """Return XLA's options for a traced program; none for a large one."""
    return dict(_OLDER) if _largest(traced.jaxpr.jaxpr) <= _SMALL and _is_known() else {}


def _largest(jaxpr: Jaxpr) -> float:
    """Return how many elements the largest array in a program has; infinity where it has one of ``_EXCLUDED``."""
    if any(equation.primitive.name.startswith(_EXCLUDED) for equation in jaxpr.eqns):
        # One such primitive anywhere rules the program out.
        return math.inf
    variables = [*jaxpr.invars, *jaxpr.constvars, *(v for e in jaxpr.eqns for v in e.outvars)]
    sizes = [math.prod(getattr(variable.aval, "shape", ())) for variable in variables]
    inner = [_largest(each) for equation in jaxpr.eqns for each in jaxprs_in_params(equation.params)]
    return max([*sizes, *inner], default=0)


@functools.cache
def _is_known() -> bool:
    """Return whether this XLA has the option: XLA may rename or drop its flags in any release."""
    try:
        # Compiling nothing is the only way to ask.
        jax.jit(lambda: 0).lower().compile(compiler_options=_OLDER)
    except jax.errors.JaxRuntimeError:
        return False
    return True
