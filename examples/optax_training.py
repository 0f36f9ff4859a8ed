"""Train a torch model with optax: in a torch loop, saved, and resumed by isthmus.train_step as one program.

python examples/optax_training.py
"""

from __future__ import annotations

import optax
import torch
from torch import Tensor, nn

import isthmus

STEPS = 20


def make() -> tuple[nn.Module, isthmus.optax.Optimizer]:
    """Return a model and an optimizer for it: AdamW with clipped gradients and a warm-up, as optax composes them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to("jax")
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-2, warmup_steps=5, decay_steps=2 * STEPS)
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    return model, isthmus.optax.Optimizer(model.parameters(), transformation)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int) -> list[float]:
    """Train as in any torch program: optax's optimizer is one of torch's here."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> tuple[list[float], list[float]]:
    """Return the losses of a run in one piece, and of one that was saved half-way and went on as one program."""
    torch.manual_seed(1)
    x = torch.randn(64, 8)
    y = x[:, :4].prod(1, keepdim=True) + x[:, 4:].sum(1, keepdim=True)
    x, y = x.to("jax"), y.to("jax")

    model, optimizer = make()
    whole = loop(model, optimizer, x, y, 2 * STEPS)
    print(f"a torch loop             loss {whole[0]:.4f} -> {whole[-1]:.4f} in {2 * STEPS} steps")

    model, optimizer = make()
    losses = loop(model, optimizer, x, y, STEPS)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    model, optimizer = make()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = isthmus.train_step(model, loss_fn, optimizer)
    losses += [step(x, y).item() for _ in range(STEPS)]
    print(f"resumed by train_step    loss {losses[0]:.4f} -> {losses[STEPS]:.4f} -> {losses[-1]:.4f}")
    return whole, losses


if __name__ == "__main__":
    main()
