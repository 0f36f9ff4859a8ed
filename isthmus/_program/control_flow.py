"""Control flow: the ops of calls that have graphs among their arguments, on arrays.

``_dynamo/higher_order.py`` converts ``torch.cond`` and its relatives to calls of the functions here, each branch or
body as a ``Graph`` whose i-th array leaf is the i-th operand; the evaluator hands the graphs over as they are::

    %2: float32[3] = cond(%a0, {... return %0}, {... return %0}, [%a1])

A value check inside a body cannot leave it as it is, since its flag belongs to the trace of the body. So a body returns
the code of its checks beside its results (0 is fine, as for a program), and the graph around requires that it is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Leaf
from isthmus._ops.value_checks import Error, require
from isthmus._program import evaluate
from isthmus._runtime.host_arrays import NUMBER_DTYPES
from isthmus._runtime.traced_results import separated
from isthmus.errors import Unsupported

Array = jax.Array
Operand = Array | complex
"""What a branch or a body is given: an array, or a number that the graph around knows."""


class Body:
    """A graph as a function for JAX to trace, which returns the results and the code of the graph's value checks."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._call, self._errors = separated(self._run)

    def __call__(self, *operands: Operand) -> tuple[list[Array], Array]:
        """Return the results for these operands, and 0 or the number of the first check that failed."""
        results: tuple[list[Array], Array] = self._call(*operands)
        return results

    def _run(self, *operands: Operand) -> tuple[tuple[list[Array], Array], list[Error]]:
        values = [operands[n.call.index] for n in self.graph.inputs if isinstance(n.call, Leaf)]
        try:
            evaluated = evaluate.run(self.graph, values, differentiable=True)
        except evaluate.CallFailure as failure:
            # The node that fails, for the graph around, is the one that calls this body.
            raise Unsupported(str(failure)) from failure.cause
        code = jnp.zeros((), jnp.int32)
        code = evaluated.checks.first_failed(code) if evaluated.checks.errors else code
        return ([_strong(value) for value in evaluated.outputs], code), evaluated.checks.errors

    @property
    def errors(self) -> list[Error]:
        """What to raise for each code, once the body was traced."""
        return self._errors[-1]

    def check(self, codes: Array, applies: Array | bool = True) -> None:
        """Require, in the graph around, that the checks held in every run that ``applies``."""
        for number, (error, message) in enumerate(self.errors, 1):
            require(~(applies & (codes == number)), error, message)


def _strong(value: Array) -> Array:
    """Return an array of a dtype of its own: JAX would promote one made of a number differently."""
    return lax.convert_element_type(value, value.dtype)


def cond(chosen: Array, on_true: Graph, on_false: Graph, operands: list[Operand]) -> list[Array]:
    """Run one of two branches; only its value checks count."""
    # Both branches are traced; XLA runs one of them.
    first, second = Body(on_true), Body(on_false)
    chosen = chosen.reshape(()).astype(bool)
    results, code = lax.cond(chosen, lambda: first(*operands), lambda: second(*operands))
    # The code that came back belongs to the branch that ran, and is 0 for the other.
    first.check(code, chosen)
    second.check(code, ~chosen)
    return results


def while_loop(condition: Graph, body: Graph, carried: list[Operand], others: list[Operand]) -> list[Array]:
    """Repeat a body for as long as a condition holds; Python numbers are carried as arrays."""
    again, step = Body(condition), Body(body)
    initial = [_as_array(value) for value in carried]

    def holds(state: tuple[list[Array], Array]) -> Array:
        (result,), _ = again(*state[0], *others)
        # The condition's own checks are refused below: their code could not leave the loop.
        return result.reshape(()).astype(bool)

    def next_state(state: tuple[list[Array], Array]) -> tuple[list[Array], Array]:
        results, code = step(*state[0], *others)
        # The first failure counts: later rounds run on values that may follow from it.
        return _like(results, initial), jnp.where(state[1] != 0, state[1], code)

    results, code = lax.while_loop(holds, next_state, (initial, jnp.zeros((), jnp.int32)))
    if again.errors:
        # Known once the loop was traced.
        raise Unsupported("an index that must be checked to decide whether a loop goes on")
    step.check(code)
    return results


def _as_array(value: Operand) -> Array:
    if isinstance(value, (bool, int, float, complex)):
        return jnp.asarray(np.asarray(value, NUMBER_DTYPES[type(value)]))
    return _strong(value)


def _like(results: Sequence[Array], initial: Sequence[Array]) -> list[Array]:
    """Return the values that a loop carries on, in the dtypes it started with."""
    for result, start in zip(results, initial, strict=True):
        if result.shape != start.shape:
            raise Unsupported(f"a loop that carries {start.shape} on as {result.shape}")
    return [lax.convert_element_type(r, start.dtype) for r, start in zip(results, initial, strict=True)]


def scan(body: Graph, init: list[Array], xs: list[Array], others: list[Operand]) -> list[Array]:
    """Run a body along the first dim, carrying values on: the last ones, then the results of all steps."""
    step = Body(body)
    # A carried number of a weak dtype would be promoted in the first step and differ in the second.
    initial = [_strong(value) for value in init]

    def each(carried: list[Array], slices: list[Array]) -> tuple[list[Array], tuple[list[Array], Array]]:
        results, code = step(*carried, *slices, *others)
        return _like(results[: len(initial)], initial), (results[len(initial) :], code)

    carried, (stacked, codes) = lax.scan(each, initial, xs)
    # One code per step; ``check`` reduces them.
    step.check(codes)
    return [*carried, *stacked]


def associative_scan(body: Graph, xs: list[Array], others: list[Operand]) -> list[Array]:
    """Combine along the first dim, in an order of XLA's choice."""
    step = Body(body)

    def combine(left: list[Array], right: list[Array]) -> list[Array]:
        results, codes = jax.vmap(lambda a, b: step(*a, *b, *others))(left, right)
        step.check(codes)
        return _like(results, left)

    results: list[Array] = lax.associative_scan(combine, [_strong(x) for x in xs])
    return results
