"""Chains of primitives made at random on arrays with two padded axes, against the exact program."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from isthmus._runtime import compiler
from isthmus._runtime.padding.program import PaddedProgram, pad_to
from isthmus._runtime.padding.sizes import Refused, symbols

LEAST = {"b": 2, "s": 6}
Step = Callable[[Any], Any]


def merge(i: int) -> Step:
    return lambda x: x.reshape(*x.shape[:i], x.shape[i] * x.shape[i + 1], *x.shape[i + 2 :])


def swap(i: int, j: int) -> Step:
    return lambda x: jnp.swapaxes(x, i, j)


def weigh(i: int) -> Step:
    """Multiply with what depends on the place and on the size of an axis."""
    return lambda x: (
        x * (1 + jnp.arange(x.shape[i]) / x.shape[i]).reshape([-1 if k == i else 1 for k in range(x.ndim)])
    )


def steps(x: Any, rng: random.Random) -> Step:
    """Return something to do with an array of this shape."""
    i = rng.randrange(x.ndim)
    choices: list[Step] = [
        weigh(i),
        swap(i, rng.randrange(x.ndim)),
        lambda x: jnp.flip(x, i),
        lambda x: jnp.cumsum(x, i),
        lambda x: jnp.sort(x, i),
        lambda x: x - x.mean(i, keepdims=True),
        lambda x: jax.nn.softmax(x, i),
        lambda x: x * x.max(i, keepdims=True),
        lambda x: jnp.concatenate([x, x[(slice(None),) * i + (slice(0, 1),)] * 2], i),
        lambda x: jnp.concatenate([x, x + 1], i),
        lambda x: lax.slice_in_dim(x, 1, x.shape[i], 1, i),
        lambda x: lax.slice_in_dim(x, 0, x.shape[i], 2, i),
        lambda x: jnp.pad(x, [(1, 2) if k == i else (0, 0) for k in range(x.ndim)], constant_values=0.25),
        lambda x: jnp.take(x, jnp.array([1, 0, 1]), i),
        lambda x: jnp.where(jnp.argmax(x, i, keepdims=True) % 2 == 0, x, -x),
        lambda x: x.reshape(-1)[: math.prod(x.shape)].reshape(x.shape),
        lambda x: jnp.stack([x, x + 2], i),
        lambda x: lax.dynamic_update_slice_in_dim(x, lax.slice_in_dim(x, 0, 1, axis=i) * 3, 1, i),
    ]
    if x.ndim > 1:
        j = rng.randrange(x.ndim - 1)
        choices += [merge(j), merge(j), lambda x: x.sum(j), lambda x: merge(j)(x).reshape(x.shape)]
    if x.ndim < 5:
        choices += [
            lambda x: jnp.broadcast_to(jnp.expand_dims(x, i), (*x.shape[:i], x.shape[i], *x.shape[i:]))
        ]
    return rng.choice(choices)


def chain(seed: int) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function of six steps, the same for every size; a step that JAX refuses for symbols is left out."""
    dims = symbols(LEAST)
    rng = random.Random(seed)
    function: list[Step] = []
    shape = jax.ShapeDtypeStruct((dims["b"], dims["s"], 4), jnp.float32)
    with compiler.scoped_x64():
        while len(function) < 6:
            step = steps(shape, rng)
            try:
                new = jax.eval_shape(step, shape)
            except Exception:
                continue
            if new.ndim and new.dtype == jnp.float32:
                function.append(step)
                shape = new

    def run(x: Any) -> tuple[Any, ...]:
        for step in function:
            x = step(x)
        return (x, x.sum())

    return run


def check(seed: int) -> bool:
    """Compare a chain for two sizes and three poisons; return whether it could be padded."""
    function, dims = chain(seed), symbols(LEAST)
    try:
        inputs = [jax.ShapeDtypeStruct((dims["b"], dims["s"], 4), np.float32)]
        program = PaddedProgram(function, inputs, dims, LEAST)
        executable = program.executable(program.sizes_for({"b": 6, "s": 13}, 1))
    except Refused:
        return False
    for b, s in ((6, 13), (5, 9)):
        x = np.random.default_rng(seed).normal(0.1, 0.6, (b, s, 4)).astype(np.float32)
        with compiler.scoped_x64():
            exact = [np.asarray(y) for y in jax.jit(function)(x)]
            for poison in (np.nan, np.inf, -1e4):
                results = executable.call(
                    program.true_sizes({"b": b, "s": s}), pad_to(x, executable.inputs[0], poison)
                )
                for result, expected in zip(results, exact, strict=True):
                    part = np.asarray(result)[tuple(slice(0, n) for n in expected.shape)]
                    np.testing.assert_allclose(part, expected, rtol=2e-4, atol=2e-4, err_msg=f"seed {seed}")
    return True


@pytest.mark.parametrize("seed", range(8))
def test_a_chain_does_not_show_its_padding(seed: int) -> None:
    assert check(seed)


@pytest.mark.slow
def test_many_chains_do_not_show_their_padding() -> None:
    assert sum(check(seed) for seed in range(8, 200)) > 150
