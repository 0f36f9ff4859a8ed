"""A Flax layer inside a torch model: one optimizer of torch's trains both, and Flax has its layer back after.

python examples/flax_layer.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from flax import nnx
from torch import Tensor, nn

import isthmus

TOKENS, LENGTH, WIDTH, STEPS = 12, 6, 32, 50


class Mixer(nnx.Module):
    """Mix positions through a gate: a layer written in Flax."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mix = nnx.Linear(LENGTH, LENGTH, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.mix(x.swapaxes(1, 2)).swapaxes(1, 2) * nnx.sigmoid(self.gate(x))


class Model(nn.Module):
    """Tokens in, logits out: torch around a layer of Flax's."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, WIDTH)
        self.mixer = isthmus.jax_module(Mixer(nnx.Rngs(0)))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mixer(self.token(tokens)))


def train(model: Model) -> list[float]:
    """Teach the model to reverse its input: only Flax's layer sees more than one position."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(TOKENS, (64, LENGTH)).to("jax")
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> tuple[list[float], float]:
    """Return the losses, and how far Flax's own run of the trained layer is from torch's."""
    torch.manual_seed(0)
    model = Model().to("jax")
    print(f"parameters of Flax's in the torch model: {', '.join(model.mixer.state_dict())}")
    losses = train(model)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {STEPS} steps")

    mixer = model.mixer.to_jax()  # an nnx module again, with the trained weights
    x = torch.randn(1, LENGTH, WIDTH).to("jax")
    again = isthmus.from_jax(nnx.jit(mixer)(isthmus.to_jax(x)))
    difference = (again - model.mixer(x)).abs().max().item()
    print(f"{type(mixer).__name__} in Flax and in torch differ by {difference:.1e}")
    return losses, difference


if __name__ == "__main__":
    main()
