"""Padding that sums and products read is filled where a value is computed: one array for all readers, right values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from isthmus._runtime import compiler
from isthmus._runtime.padding import interpreter
from isthmus._runtime.padding.program import PaddedProgram, pad_to
from isthmus._runtime.padding.sizes import symbols
from isthmus._runtime.padding.wanted_zeros import wanted_zeros

SIZES = {"b": 3, "s": 50}
PADDED = {"b": 4, "s": 64}
DIMS = symbols({"b": 2, "s": 2})


def gradients(x: Any, up: Any, weight: Any, data: Any) -> tuple[Any, ...]:
    """Compute what a layer's backward does of a chain: a product of it as it is, and two sums over its rows."""
    flat = ((x + 1) * up + x * x * (1 - up)).reshape(-1, 32)
    written_out = lax.optimization_barrier(flat.T)
    return flat @ weight, written_out @ data.reshape(-1, 16), flat.sum(0)


def squares(x: Any, up: Any, weight: Any, data: Any) -> tuple[Any, ...]:
    """Attend within each row: both axes of the scores are summed over, one of them in a transposed product."""
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), x @ up.swapaxes(1, 2), 0) * 0.5
    return scores @ up, scores.swapaxes(1, 2) @ x, (scores.sum((0, 1)) * 1j).imag, weight + scores.sum()


FUNCTIONS = [gradients, squares]


def examples(sizes: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
    b, s = sizes["b"], sizes["s"]
    shapes = [(b, s, 32), (b, s, 32), (32, 16), (b, s, 16)]
    return [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]


def program(function: Callable[..., Any]) -> PaddedProgram:
    return PaddedProgram(function, examples(DIMS), DIMS, {"b": 2, "s": 2})


def multiplications(function: Callable[..., Any]) -> tuple[int, int]:
    """Count what multiplies elements in the program for a range, and in the exact one of its largest sizes."""
    padded = program(function)
    sizes = padded.sizes_for(SIZES, 1)
    assert sizes.bounds == PADDED
    traced, shapes = padded.function(sizes, [frozenset()] * 4)
    with compiler.scoped_x64():
        texts = [
            jax.jit(f).lower(*inputs).compile().as_text()
            for f, inputs in ((lambda *a: traced(*a)[0], shapes), (function, examples(PADDED)))
        ]
    found = [len(re.findall(r"= f32\[\S+ multiply\(", text)) for text in texts]
    return found[0], found[1]


@pytest.mark.skipif(compiler.platform() != "cpu", reason="XLA:CPU computes again what it can fuse twice")
def test_what_several_read_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    padded, exact = multiplications(gradients)
    assert padded == exact > 0
    # Filled where it is read it is computed again, so the count above says something.
    monkeypatch.setattr(interpreter, "wanted_zeros", lambda *_: {})
    padded, exact = multiplications(gradients)
    assert padded > exact


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -1e30])
@pytest.mark.parametrize("filled_early", [True, False])
def test_results_are_those_of_the_exact_program(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], poison: float, filled_early: bool
) -> None:
    if not filled_early:
        monkeypatch.setattr(interpreter, "wanted_zeros", lambda *_: {})
    generator = np.random.default_rng(0)
    inputs = [generator.normal(size=x.shape).astype(np.float32) for x in examples(SIZES)]
    padded = program(function)
    executable = padded.executable(padded.sizes_for(SIZES, 1))
    arguments = [pad_to(x, shape, poison) for x, shape in zip(inputs, executable.inputs, strict=True)]
    with compiler.scoped_x64():
        found = executable.call(padded.true_sizes(SIZES), *arguments)
        expected = jax.jit(function)(*inputs)
    for result, wanted in zip(found, expected, strict=True):
        part = np.asarray(result)[tuple(slice(0, n) for n in wanted.shape)]
        np.testing.assert_allclose(part, wanted, rtol=2e-4, atol=2e-4)


def test_zeros_are_wanted_where_a_value_is_made() -> None:
    padded = program(gradients)
    jaxpr = padded.closed.jaxpr
    wanted = wanted_zeros(jaxpr)
    made = {eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars if wanted.get(v)}
    assert "add" in made
    # Both axes that the rows of a product are made of; the features are summed over by the other product.
    chain = next(eqn for eqn in reversed(jaxpr.eqns) if eqn.primitive.name == "add")
    assert wanted[chain.outvars[0]] == {0, 1}
