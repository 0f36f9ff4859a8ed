"""Functions that JAX traces and that return more than arrays: error messages, layouts, names.

JAX lets a traced function return arrays only, and calls it at a moment of its own choosing. What else tracing finds out
is therefore returned as the second item of a pair, which the functions here take off and hand back beside the program,
so that nothing becomes valid by side effect::

    def program(x):
        return (x + 1,), Facts(errors=["..."])

    executable, facts = compile_with_extra(program, [example])
    (y,) = executable.call(x)

``_device/core/plan.py``, ``_lazy/node_builder.py`` and ``_program/program.py`` trace with it. A function is traced once
per compilation, also where the executable comes from the disk, so there is always an extra result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from isthmus._runtime import compiler

Extra = TypeVar("Extra")
Function = Callable[..., Any]


def compile_with_extra(
    function: Callable[..., tuple[Any, Extra]],
    inputs: Sequence[Any],
    donate: tuple[int, ...] = (),
    name: str = "",
) -> tuple[compiler.Executable, Extra]:
    """Compile a function that returns (arrays, extra); return the executable, which returns arrays, and the extra."""
    arrays, extras = separated(function)
    executable = compiler.build_op(arrays, inputs, donate, name=name)
    return executable, extras[-1]


def shapes_with_extra(function: Callable[..., tuple[Any, Extra]], inputs: Sequence[Any]) -> tuple[Any, Extra]:
    """Trace a function that returns (arrays, extra); return shapes and dtypes of the arrays, and the extra."""
    arrays, extras = separated(function)
    shapes = jax.eval_shape(arrays, *inputs)
    return shapes, extras[-1]


def separated(function: Callable[..., tuple[Any, Extra]]) -> tuple[Function, list[Extra]]:
    """Return the function without its extra result, and the list that each trace of it adds that result to."""
    extras: list[Extra] = []

    def arrays(*inputs: Any) -> Any:
        # JAX calls it once per trace; ``extras`` then has what the last trace found.
        results, extra = function(*inputs)
        extras.append(extra)
        return results

    return arrays, extras
