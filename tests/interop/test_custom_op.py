"""torch ops that JAX functions implement."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import Tensor

import isthmus
from tests.interop.test_interop import f64, in_lazy_mode


@isthmus.custom_op("isthmus_tests::scaled_sin")
def scaled_sin(x: Tensor, y: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return jnp.sin(x) * y * scale, jnp.argmax(x, axis=-1)


@isthmus.custom_op("isthmus_tests::total", schema="(Tensor[] parts, int power, Tensor? bias=None) -> Tensor")
def total(parts: list[jax.Array], power: int, bias: jax.Array | None = None) -> jax.Array:
    found = sum(p**power for p in parts)
    return found if bias is None else found + bias


MODES = {
    "eager": lambda f: f,
    "lazy": in_lazy_mode,
    "compiled": lambda f: torch.compile(f, backend="isthmus", fullgraph=True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_it_computes_and_differentiates(mode: str, device: str) -> None:
    x, y = f64(3, 4).detach().to(device).requires_grad_(), f64(4).detach().to(device).requires_grad_()
    value, at = MODES[mode](lambda x, y: torch.ops.isthmus_tests.scaled_sin(x, y, 3.0))(x, y)
    want = torch.sin(x) * y * 3
    torch.testing.assert_close(value, want)
    assert at.tolist() == x.argmax(-1).tolist()
    assert not at.requires_grad
    grads = [torch.autograd.grad(v.square().sum(), (x, y)) for v in (value, want)]
    torch.testing.assert_close(*grads)


def test_gradients_of_gradients() -> None:
    x, y = f64(3), f64(3)
    assert torch.autograd.gradcheck(lambda x, y: scaled_sin(x, y, 2.0)[0], (x, y))
    assert torch.autograd.gradgradcheck(lambda x, y: scaled_sin(x, y, 2.0)[0], (x, y))


def test_lists_and_absent_tensors() -> None:
    a, b, bias = f64(3), f64(3), f64(3)
    torch.testing.assert_close(total([a, b], 2), a**2 + b**2)
    assert torch.autograd.gradcheck(lambda a, b, c: total([a, b], 3, c), (a, b, bias))
    (gradient,) = torch.autograd.grad(total([a, b.detach()], 2).sum(), a)
    torch.testing.assert_close(gradient, 2 * a)


def test_it_is_named_in_graphs() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.isthmus_tests.scaled_sin(x, x)[0]

    program = torch.export.export(Model(), (torch.ones(3),))
    assert "isthmus_tests.scaled_sin.default" in [str(node.target) for node in program.graph.nodes]
    assert program.module()(torch.ones(3)).shape == (3,)


def test_torch_checks_it() -> None:
    torch.library.opcheck(scaled_sin, (torch.rand(2, 3, requires_grad=True), torch.rand(3), 2.0))


def test_inside_jax() -> None:
    f = isthmus.torch_function(lambda x: torch.ops.isthmus_tests.scaled_sin(x, x)[0].sum())
    x = jnp.linspace(0, 1, 3)
    want = jax.grad(lambda x: (jnp.sin(x) * x).sum())(x)
    assert jnp.allclose(jax.jit(jax.grad(f))(x), want)
