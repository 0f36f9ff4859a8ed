"""Effort: small programs of single ops are compiled by XLA's quicker way, and compute the same but for last bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from isthmus._runtime import compiler, cpu_compile_options

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not cpu_compile_options._is_known(),
    reason="only XLA for the CPU has the option",
)
OPS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + x,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "log": lambda x: x.abs().log(),
    "pow": lambda x: x.abs().pow(1.7),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.1),
    "cat": lambda x: torch.cat([x, x]),
    "where": lambda x: torch.where(x > 0, x, -x),
    "flip": lambda x: x.flip(0),
}


def options(function: Callable[..., Any], *sizes: int) -> dict[str, Any]:
    with compiler.scoped_x64():
        return cpu_compile_options.options_for(jax.jit(function).trace(*[jnp.zeros(n) for n in sizes]))


def test_small_loops_are_compiled_with_less_effort() -> None:
    assert options(lambda x: jnp.tanh(x) + 1, 4096) == cpu_compile_options._OLDER
    assert options(lambda x, y: jnp.concatenate([x, y]), 2000, 2000) == cpu_compile_options._OLDER


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (lambda x: jnp.tanh(x) + 1, 4097),
        (lambda x: jnp.concatenate([x, x]), 4000),
        (lambda x: x[:, None] * x, 100),  # what is between counts
        (jnp.sum, 4),
        (jax.nn.softmax, 4),
        (jnp.cumsum, 4),
        (lambda x: x @ x, 4),
        (lambda x: x.at[0].add(1), 4),
        (lambda x: jax.lax.fori_loop(0, 9, lambda n, y: y * 2, x), 4),
        (lambda x: jax.jit(jnp.sum)(x), 4),  # inside another
    ],
)
def test_others_are_not(function: Callable[[Any], Any], size: int) -> None:
    assert options(function, size) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPS)
def test_no_more_than_last_bits_differ(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    both: list[list[Any]] = []
    used: list[dict[str, Any]] = []

    def noted(traced: Any) -> dict[str, Any]:
        used.append(cpu_compile_options.options_for(traced))
        return used[-1]

    def build_op(function: Any, inputs: Any, donate: Any = (), sharding: Any = None, name: str = "") -> Any:
        ways = [compiler.build(function, inputs, (), way) for way in (noted, None)]

        def call(*arrays: Any) -> Any:
            both.append([np.asarray(jax.tree.leaves(way.call(*arrays))[0]) for way in ways])
            return ways[0].call(*arrays)

        return dataclasses.replace(ways[0], call=call)

    monkeypatch.setattr(compiler, "build_op", build_op)
    shape = (23, 29 + dtype.itemsize)  # of no other test
    OPS[name](torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to("jax"))
    assert both
    assert any(used)
    for quick, whole in both:
        if quick.dtype.kind == "f":
            np.testing.assert_array_max_ulp(quick, whole, 4)
        else:
            np.testing.assert_array_equal(quick, whole)
