"""Runs a jaxpr that was traced for symbolic sizes on padded arrays, by a table of rules per primitive.

A rule is a function of the interpreter, the equation and the padded operands, filed by primitive name::

    @rule("transpose")
    def transpose(run: Interpreter, eqn: JaxprEqn, x: PaddedArray) -> PaddedArray: ...

It returns one padded array, or a list of them. ``run`` is also the ``Padding`` with masks and layouts. A primitive that
touches no symbolic size is bound as it is; one that does and has no rule is ``Refused``, and the caller compiles the
exact size (``_program/ranges.py``).

Called by ``program.PaddedProgram`` while JAX traces the program for one range of sizes: it evaluates the jaxpr on
tracers of padded shapes, so what it costs is paid when a range is compiled, never when it runs. The rules are in
``rules/``, a file per kind of primitive.

What can go wrong: a rule that forgets a mask gives wrong values without an error. So rules are compared with exact
programs over many sizes (tests/runtime/padding_sweep.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from isthmus._runtime.padding.layout import UNIFORM, PaddedArray, Padding, exact
from isthmus._runtime.padding.sizes import Refused, is_symbolic
from isthmus._runtime.padding.wanted_zeros import MOVES, NOTHING, wanted_zeros

Array = jax.Array
Rule = Callable[..., PaddedArray | list[PaddedArray]]

RULES: dict[str, Rule] = {}
CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
    "checkpoint",
}
"""Primitives that only call a jaxpr; newer releases of JAX say jit where older ones said pjit."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """File a rule for the primitives of these names."""

    def file(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return file


def mentions_sizes(value: Any) -> bool:
    """Return whether the parameters of an equation, or equations inside of them, contain symbolic sizes."""
    if isinstance(value, (tuple, list)):
        return any(mentions_sizes(each) for each in value)
    if isinstance(value, dict):
        return any(mentions_sizes(each) for each in value.values())
    if isinstance(value, ClosedJaxpr):
        return mentions_sizes(value.jaxpr)
    if isinstance(value, Jaxpr):
        return any(is_symbolic_equation(eqn) for eqn in value.eqns)
    return is_symbolic(value)


def is_symbolic_equation(eqn: JaxprEqn) -> bool:
    """Return whether an equation reads, computes or is configured by a symbolic size."""
    shapes = [getattr(v.aval, "shape", ()) for v in [*eqn.invars, *eqn.outvars]]
    return any(is_symbolic(n) for shape in shapes for n in shape) or mentions_sizes(eqn.params)


def out_shape(eqn: JaxprEqn, n: int = 0) -> tuple[Any, ...]:
    """Return the shape of a result of an equation."""
    shape: tuple[Any, ...] = eqn.outvars[n].aval.shape  # type: ignore[attr-defined]
    return shape


def out_dtype(eqn: JaxprEqn, n: int = 0) -> Any:
    """Return the dtype of a result of an equation."""
    return eqn.outvars[n].aval.dtype  # type: ignore[attr-defined]


class Interpreter(Padding):
    """Evaluates jaxprs on padded arrays for given sizes."""

    def evaluate(
        self, closed: ClosedJaxpr, operands: Sequence[PaddedArray], zeros: Sequence[frozenset[int]] = ()
    ) -> list[PaddedArray]:
        """Return the results of a jaxpr for these operands; ``zeros`` says where they had better have some."""
        jaxpr = closed.jaxpr
        wanted = wanted_zeros(jaxpr, zeros)
        values: dict[Any, PaddedArray] = {}
        values.update(
            zip(jaxpr.constvars, [exact(jnp.asarray(const)) for const in closed.consts], strict=True)
        )
        values.update(zip(jaxpr.invars, operands, strict=True))

        def read(atom: Any) -> PaddedArray:
            if isinstance(atom, Literal):
                return exact(jnp.asarray(atom.val, atom.aval.dtype))  # type: ignore[attr-defined]
            return values[atom]

        for eqn in jaxpr.eqns:
            here = [wanted.get(result, NOTHING) for result in eqn.outvars]
            results = self._equation(eqn, [read(atom) for atom in eqn.invars], here)
            if any(here) and eqn.primitive.name not in MOVES | CALLS:
                results = [self._zeroed(x, each) for x, each in zip(results, here, strict=True)]
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _zeroed(self, x: PaddedArray, axes: frozenset[int]) -> PaddedArray:
        """Return ``x`` with zeros in the padding along axes; uniform ones stay so."""
        return self.fill(x, [i for i in sorted(axes) if x.axes[i] is not UNIFORM], 0)

    def _equation(
        self, eqn: JaxprEqn, operands: list[PaddedArray], zeros: Sequence[frozenset[int]]
    ) -> list[PaddedArray]:
        name = eqn.primitive.name
        # Derivative rules of a ``custom_jvp_call`` are not needed: what is traced here is not differentiated again.
        if name in CALLS:
            inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
            closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
            return self.evaluate(closed, operands, zeros)
        # No operand has padding then, since padding comes from symbolic sizes alone.
        if not is_symbolic_equation(eqn):
            results = eqn.primitive.bind(*[x.array for x in operands], **eqn.params)
            return [exact(y) for y in (results if eqn.primitive.multiple_results else [results])]
        if name not in RULES:
            raise Refused(name, "no rule for symbolic sizes")
        outcome = RULES[name](self, eqn, *operands)
        return outcome if isinstance(outcome, list) else [outcome]
