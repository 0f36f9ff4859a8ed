"""Branches and loops: their bodies run on padded arrays, and what they hand on is in the canonical layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from isthmus._runtime.padding.interpreter import Interpreter, out_dtype, out_shape, rule
from isthmus._runtime.padding.layout import PaddedArray, length
from isthmus._runtime.padding.sizes import Size, is_symbolic

Array = jax.Array


def _shaped(
    run: Interpreter, arrays: Sequence[Array], shapes: Sequence[tuple[Size, ...]]
) -> list[PaddedArray]:
    """Return arrays in the canonical layout of these shapes."""
    return [
        PaddedArray(array, shape, tuple(run.layout(n) for n in shape))
        for array, shape in zip(arrays, shapes, strict=True)
    ]


def _arrays(run: Interpreter, values: Sequence[PaddedArray]) -> list[Array]:
    """Return values as arrays in the canonical layout."""
    return [run.canonical(x).array for x in values]


@rule("cond")
def cond(run: Interpreter, eqn: JaxprEqn, index: PaddedArray, *operands: PaddedArray) -> list[PaddedArray]:
    """Run one of several branches."""
    shapes = [x.shape for x in operands]

    def branch(closed: ClosedJaxpr) -> Any:
        return lambda *arrays: _arrays(run, run.evaluate(closed, _shaped(run, arrays, shapes)))

    # All branches must return arrays of the same shapes, whichever layouts their rules would choose: canonical ones.
    branches = [branch(closed) for closed in eqn.params["branches"]]
    arrays = lax.switch(index.array.astype(jnp.int32), branches, *_arrays(run, operands))
    return _shaped(run, arrays, [out_shape(eqn, n) for n in range(len(arrays))])


@rule("custom_linear_solve")
def custom_linear_solve(run: Interpreter, eqn: JaxprEqn, *operands: PaddedArray) -> list[PaddedArray]:
    """Run the solver; the other functions of the primitive are for its derivatives."""
    lengths, closed = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
    # Constants come in the order matvec, vecmat, solve, transpose_solve, then the right-hand sides.
    before = lengths.matvec + lengths.vecmat
    after = before + lengths.solve + lengths.transpose_solve
    return run.evaluate(closed, [*operands[before : before + lengths.solve], *operands[after:]])


@rule("while")
def while_(run: Interpreter, eqn: JaxprEqn, *operands: PaddedArray) -> list[PaddedArray]:
    """Run a loop; a condition that looks at all elements looks at true ones, by the rules of its reductions."""
    tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test_consts, body_consts = operands[:tests], operands[tests : tests + bodies]
    carry = operands[tests + bodies :]
    shapes = [x.shape for x in carry]

    def test(arrays: Sequence[Array]) -> Array:
        values = [*test_consts, *_shaped(run, arrays, shapes)]
        return run.evaluate(eqn.params["cond_jaxpr"], values)[0].array

    def body(arrays: Sequence[Array]) -> Sequence[Array]:
        values = [*body_consts, *_shaped(run, arrays, shapes)]
        return _arrays(run, run.evaluate(eqn.params["body_jaxpr"], values))

    return _shaped(run, lax.while_loop(test, body, _arrays(run, carry)), shapes)


@rule("scan")
def scan(run: Interpreter, eqn: JaxprEqn, *operands: PaddedArray) -> list[PaddedArray]:
    """Run a loop over the leading axis; one of symbolic length ends after the true number of steps."""
    consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
    steps, backward, closed = eqn.params["length"], eqn.params["reverse"], eqn.params["jaxpr"]
    fixed, carry, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
    carry_shapes = [x.shape for x in carry]
    shapes = [out_shape(eqn, n) for n in range(len(eqn.outvars))]
    x_shapes = [x.shape[1:] for x in xs]

    def body(arrays: Sequence[Array], rows: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        values = [*fixed, *_shaped(run, arrays, carry_shapes), *_shaped(run, rows, x_shapes)]
        outputs = _arrays(run, run.evaluate(closed, values))
        return outputs[:carries], outputs[carries:]

    start, stacked = _arrays(run, carry), _arrays(run, xs)
    if not is_symbolic(steps):
        last, ys = lax.scan(body, start, stacked, steps, backward, unroll=eqn.params["unroll"])
        return _shaped(run, [*last, *ys], shapes)
    # A scan needs a static length, and padded rows must not reach the carry, so this is a while loop over true rows.
    count = run.sizes.true(steps)

    def step(state: tuple[Array, list[Array], list[Array]]) -> Any:
        n, arrays, ys = state
        # From the last true row, not from the last row.
        at = count - 1 - n if backward else n
        rows = [lax.dynamic_index_in_dim(x, at, keepdims=False) for x in stacked]
        arrays, new = body(arrays, rows)
        return (
            n + 1,
            arrays,
            [lax.dynamic_update_index_in_dim(y, v, at, 0) for y, v in zip(ys, new, strict=True)],
        )

    lengths = [[length(run.layout(n)) for n in shape] for shape in shapes[carries:]]
    # Rows after the true ones are never written and stay zero.
    empty = [jnp.zeros(n, out_dtype(eqn, carries + k)) for k, n in enumerate(lengths)]
    initial = (jnp.zeros((), jnp.int32), start, empty)
    _, last, ys = lax.while_loop(lambda state: state[0] < count, step, initial)
    return _shaped(run, [*last, *ys], shapes)
