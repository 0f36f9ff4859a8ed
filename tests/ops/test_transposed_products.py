"""Weight gradients on the CPU: which products get their transposed left matrix in memory of its own, in every mode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import isthmus
from isthmus._ops.linalg.matmul import linear_backward
from isthmus._ops.linalg.transposed_products import written_out
from isthmus._runtime import compiler

pytestmark = pytest.mark.skipif(compiler.platform() != "cpu", reason="other devices have a product for it")


def barriers(rows: Any, inner: Any, columns: Any, dtype: Any = jnp.float32) -> int:
    """Count the barriers in the product of a transposed matrix of this size."""
    left, right = (jax.ShapeDtypeStruct(size, dtype) for size in ((inner, rows), (inner, columns)))
    traced = jax.make_jaxpr(lambda x, y: written_out(x.T, y) @ y)(left, right)
    return str(traced).count("optimization_barrier")


def test_large_products_with_more_rows_than_columns_are_written_out() -> None:
    assert barriers(256, 128, 64) == barriers(128, 128, 128) == 1
    assert barriers(64, 128, 256) == 0  # fast as it is
    assert barriers(16, 16, 8) == 0
    assert barriers(256, 128, 64, jnp.bfloat16) == 0
    (inner,) = jax.export.symbolic_shape("n")
    assert barriers(256, inner, 64) == 1  # a range of sizes, which may be large ones
    assert barriers(inner, 128, 64) == barriers(64, inner, 256) == 0
    with compiler.portable():
        assert barriers(256, 128, 64) == 0


def test_gradients_of_what_is_written_out() -> None:
    grad, x, weight = (
        jax.random.normal(jax.random.key(n), s) for n, s in enumerate([(128, 256), (128, 64), (256, 64)])
    )

    def loss(grad: jax.Array) -> jax.Array:
        return (linear_backward(x, grad, weight, [True, True, True])[1] ** 2).sum()

    wanted = 2 * x @ (grad.T @ x).T
    np.testing.assert_allclose(jax.grad(loss)(grad), wanted, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(jax.vmap(jax.grad(loss))(grad[None])[0], wanted, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("mode", ["eager", "lazy", "jit", "compile"])
def test_weight_gradients_agree_with_torch(mode: str) -> None:
    def gradient(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        layer.zero_grad()
        layer(x).square().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    torch.manual_seed(0)
    layer, x = nn.Linear(64, 256), torch.randn(128, 64)
    wanted = gradient(layer, x).clone()
    layer, x = layer.to("jax"), x.to("jax")
    found = {
        "eager": lambda: gradient(layer, x),
        "lazy": lambda: lazily(gradient, layer, x),
        "jit": lambda: isthmus.jit(gradient)(layer, x),
        "compile": lambda: gradient(torch.compile(layer, backend="isthmus"), x),
    }[mode]()
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-3)


def lazily(function: Any, *args: Any) -> Any:
    """Call a function in lazy mode."""
    with isthmus.lazy():
        return function(*args)
