"""A Pallas kernel with its own gradient inside a torch model, eager and under torch.compile.

python examples/pallas_kernel.py             # on a CPU the kernel is interpreted
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax.experimental import pallas
from torch import nn

import isthmus

WIDTH, ROWS, EPS, STEPS = 32, 16, 1e-6, 8


def scale_of(x: Any) -> Any:
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS)


def kernel(x: Any, out: Any) -> None:
    """Normalize a block of rows by their root mean square."""
    out[...] = x[...] * scale_of(x[...])


@jax.custom_vjp
def rms_norm(x: Any) -> Any:
    block = pallas.BlockSpec((ROWS, WIDTH), lambda n: (n, 0))
    specs: dict[str, Any] = {"grid": len(x) // ROWS, "in_specs": [block], "out_specs": block}
    shape, interpret = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.default_backend() == "cpu"
    return pallas.pallas_call(kernel, shape, interpret=interpret, **specs)(x)


def backward(x: Any, given: Any) -> Any:
    unit = x * scale_of(x)
    return (scale_of(x) * (given - unit * jnp.mean(given * unit, axis=-1, keepdims=True)),)


rms_norm.defvjp(lambda x: (rms_norm(x), x), backward)


class PallasNorm(nn.Module):
    """The kernel as a layer."""

    forward = staticmethod(isthmus.jax_function(rms_norm))


def train(name: str, norm: nn.Module) -> list[float]:
    """Return the losses of a model with the norm in it, which learns to shift its input."""
    torch.manual_seed(0)
    x = torch.randn(4 * ROWS, WIDTH).to("jax")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH)).to("jax")
    run = torch.compile(model, backend="isthmus", fullgraph=True) if name == "compiled" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        loss = F.mse_loss(run(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{name:8}  loss {losses[0]:.5f} -> {losses[-1]:.5f}")
    return losses


def main() -> dict[str, list[float]]:
    """Return the losses with torch's own norm, with the kernel, and with the kernel in a compiled model."""
    in_torch = nn.RMSNorm(WIDTH, eps=EPS, elementwise_affine=False)
    norms = {"torch": in_torch, "pallas": PallasNorm(), "compiled": PallasNorm()}
    return {name: train(name, norm) for name, norm in norms.items()}


if __name__ == "__main__":
    main()
