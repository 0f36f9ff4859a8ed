"""Train with a torch optimizer on "jax": a plain torch loop, then the same step as one XLA program.

python examples/torch_optimizer.py
"""

from __future__ import annotations

import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isthmus

STEPS = 30


def spirals(count: int = 256) -> tuple[Tensor, Tensor]:
    """Return points on two spirals and which spiral each is on."""
    label = torch.arange(count) % 2
    radius = torch.linspace(0.1, 1, count)
    angle = 2 * math.pi * radius + math.pi * label
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), label


def make_model(device: str) -> nn.Module:
    torch.manual_seed(0)  # drawn on the CPU, so every model starts from the same weights
    return nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)).to(
        device
    )


def loop(device: str) -> list[Tensor]:
    """Train as in any torch program; only the device is new."""
    x, label = (t.to(device) for t in spirals())
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def one_program() -> list[Tensor]:
    """Train with forward, backward and the optimizer's step in one program."""
    x, label = (t.to("jax") for t in spirals())
    model = make_model("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = isthmus.train_step(model, lambda model, x, label: F.cross_entropy(model(x), label), optimizer)
    return [step(x, label) for _ in range(STEPS)]


def main() -> dict[str, list[float]]:
    """Return the losses of each way to train."""
    found = {}
    ways = {"cpu": lambda: loop("cpu"), "jax": lambda: loop("jax"), "train_step": one_program}
    for name, train in ways.items():
        started = time.perf_counter()
        losses = found[name] = torch.stack(train()).tolist()
        seconds = time.perf_counter() - started
        print(f"{name:10}  loss {losses[0]:.4f} -> {losses[-1]:.4f}  in {seconds:.2f} s, compiling included")
    return found


if __name__ == "__main__":
    main()
