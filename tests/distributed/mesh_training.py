"""Trains a small model on a mesh in several modes and says how it compares with CPU torch.

``python -m tests.distributed.mesh_training MODEL PARALLELISM MODE,MODE [STEPS]``. The optimizer is AdamW as it is by
default. A parameter that no loss depends on (a bias before a BatchNorm, or of attention's keys) has a gradient of
rounding errors alone, of which AdamW makes whole steps: such parameters are not compared (``without_influence``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import isthmus
import isthmus.distributed as dist
from isthmus._device.core.buffer import buffer_of
from tests.distributed.mesh_process import say

MODES = ["eager", "lazy", "jit", "compile model", "compile step", "train_step"]
PARALLELISMS = ["dp", "fsdp", "tp", "fsdp tp"]
Step = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = [nn.Linear(width, width) for _ in range(4)]
        self.up, self.down, self.drop = nn.Linear(width, 64), nn.Linear(64, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = [
            layer(y).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v)
        ]
        y = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.drop(self.o(y))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A language model with tied embeddings."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.places = nn.Parameter(torch.randn(8, 16) * 0.02)
        self.blocks = nn.ModuleList([Block(16, 8, dropout) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        y = self.tokens(x) + self.places
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)]
        self.norm_a, self.norm_b = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return F.relu(x + self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))


class Experts(nn.Module):
    """Feed-forward networks, stacked: one for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(8, 16, 32) * 0.2),
            nn.Parameter(torch.randn(8, 32, 16) * 0.2),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what each expert makes of its tokens."""
        return torch.bmm(F.gelu(torch.bmm(tokens, self.up)), self.down)


class Mixture(nn.Module):
    """A mixture of experts that sends each token to the expert its gate likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.gate, self.experts = nn.Linear(16, 16), nn.Linear(16, 8), Experts()
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.into(x)
        weight, expert = self.gate(x).softmax(-1).max(-1)
        chosen = F.one_hot(expert, 8)
        place = (
            expert * len(x) + (chosen.cumsum(0) * chosen).sum(-1) - 1
        )  # room for all tokens with one expert
        tokens = x.new_zeros(8 * len(x), 16).index_add(0, place, x)
        out = self.experts(tokens.view(8, len(x), 16)).reshape(-1, 16)
        return self.head(x + out[place] * weight[:, None])


def make(name: str) -> nn.Module:
    """Return a model with the same parameters every time."""
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    if name == "experts":
        return Mixture()
    if name in ("gpt", "gpt with dropout"):
        return GPT(0.1 if name == "gpt with dropout" else 0.0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), Residual(16), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 8),
    )  # fmt: skip


PLANS = {
    "mlp": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "gpt": {
        **{f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")},
        **{f"blocks.*.{name}": RowwiseParallel() for name in ("o", "down")},
    },
    "resnet": {"6": ColwiseParallel(output_layouts=Replicate())},
    "experts": {"experts": dist.ExpertParallel()},
    # Between the layers of a pair activations are split along the sequence.
    "gpt by sequence": {
        **{f"blocks.*.{name}": SequenceParallel() for name in ("norm1", "norm2")},
        **{f"blocks.*.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")},
        **{f"blocks.*.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")},
    },
}


def data(name: str, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return a batch of 16 for each step."""
    generator = torch.Generator().manual_seed(1)
    if name in ("mlp", "experts"):
        return [
            (torch.randn(16, 16, generator=generator), torch.randn(16, 8, generator=generator))
            for _ in range(steps)
        ]
    if name.startswith("gpt"):
        draw = [torch.randint(0, 32, (2, 16, 8), generator=generator) for _ in range(steps)]
        return [(x, y) for x, y in draw]
    return [
        (torch.randn(16, 3, 4, 4, generator=generator), torch.randint(0, 8, (16,), generator=generator))
        for _ in range(steps)
    ]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a batch."""
    out = model(x)
    if y.is_floating_point():
        return F.mse_loss(out, y)
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return the step of a training loop."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def adam(model: nn.Module, mode: str = "eager") -> torch.optim.Optimizer:
    """Return the optimizer of a model."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=mode in ("jit", "compile step"))


def without_influence(name: str) -> list[str]:
    """Return the parameters whose gradient is zero: in float64 it is, next to that of the others."""
    model = make(name.split()[0]).double()
    x, y = [t.double() if t.is_floating_point() else t for t in data(name, 1)[0]]
    loss_of(model, x, y).backward()
    largest = {key: p.grad.abs().max().item() for key, p in model.named_parameters() if p.grad is not None}
    return [key for key, size in largest.items() if size < 1e-12 * max(largest.values())]


def reference(name: str, steps: int) -> tuple[list[float], list[Tensor]]:
    """Return losses and final parameters of CPU torch; with dropout, of one device."""
    model = make(name)
    if name == "gpt with dropout":
        model = model.to("jax")
        torch.manual_seed(5)
    step = stepper(model, adam(model))
    losses = [step(x.to(device(model)), y.to(device(model))).item() for x, y in data(name, steps)]
    return losses, [p.detach().cpu() for p in model.parameters()]


def device(model: nn.Module) -> torch.device:
    """Return where a model is."""
    return next(model.parameters()).device


def in_mode(mode: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return the step in a mode."""
    if mode == "jit":
        return isthmus.jit(stepper(model, optimizer))
    if mode == "compile model":
        return stepper(torch.compile(model, backend="isthmus"), optimizer)
    if mode == "compile step":
        return torch.compile(stepper(model, optimizer), backend="isthmus")
    if mode == "train_step":
        return isthmus.train_step(model, loss_of, optimizer)
    return stepper(model, optimizer)


def parallel(name: str, parallelism: str) -> tuple[nn.Module, Any]:
    """Return a model on a new mesh of eight devices, split, and the dims of the mesh that share the batch."""
    if "fsdp" in parallelism and parallelism != "fsdp":
        mesh = dist.init_device_mesh((4, 2), ("dp", "tp"))
    elif parallelism == "ep":
        mesh = dist.init_device_mesh((2, 4), ("dp", "ep"))
    else:
        mesh = dist.init_device_mesh((8,), ("tp" if parallelism == "tp" else "dp",))
    model = make(name).to("jax")
    if parallelism == "ep":
        dist.parallelize_module(model, mesh["ep"], PLANS[name])
    if {"tp", "sp"} & set(parallelism.split()):
        plan = PLANS["gpt by sequence" if "sp" in parallelism.split() else name.split()[0]]
        dist.parallelize_module(model, mesh["tp"], plan)
    if "fsdp" in parallelism:
        dist.fully_shard(model, mesh=mesh["dp"])
    return model, None if parallelism == "tp" else mesh["dp"]


def bytes_on_one(tensor: Tensor) -> int:
    """Return the bytes of a tensor on the first device."""
    return sum(
        shard.data.nbytes for shard in buffer_of(tensor).value.addressable_shards if shard.device.id == 0
    )


def facts(
    model: nn.Module, optimizer: torch.optim.Optimizer, wanted: list[Tensor], free: Sequence[str] = ()
) -> dict[str, Any]:
    """Return how parameters, gradients and optimizer state are split, and how far parameters are from the reference."""
    rows = []
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]["exp_avg"]
        grad = None if parameter.grad is None else dist.sharding_of(parameter.grad)
        shardings = [
            dist.sharding_of(parameter),
            dist.sharding_of(state),
            grad or dist.sharding_of(parameter),
        ]
        same = all(sharding == shardings[0] for sharding in shardings)
        whole = not any(isinstance(place, Shard) for place in shardings[0])
        rows.append((name, same, whole, parameter.nbytes, bytes_on_one(parameter), bytes_on_one(state)))
    pairs = [(p, w) for (key, p), w in zip(model.named_parameters(), wanted, strict=True) if key not in free]
    return {
        "parameters": max((p.detach().cpu() - w).abs().max().item() for p, w in pairs),
        "not compared": list(free),
        "split otherwise": [row[0] for row in rows if not row[1]],
        "whole": [row[0] for row in rows if row[2]],
        "bytes": [row[3:] for row in rows if not row[2]],
    }


def train(name: str, parallelism: str, mode: str, steps: int, wanted: Any) -> dict[str, Any]:
    """Train, and return what is to be checked."""
    torch._dynamo.reset()
    model, batch_mesh = parallel(name, parallelism)
    optimizer = adam(model, mode)
    step = in_mode(mode, model, optimizer)
    torch.manual_seed(5)
    losses, compilations = [], []
    with isthmus.lazy() if mode == "lazy" else torch.enable_grad():
        for x, y in data(name, steps):
            if batch_mesh is not None:
                x, y = [dist.distribute_tensor(t, batch_mesh, [Shard(0)]) for t in (x, y)]
            else:
                x, y = x.to("jax"), y.to("jax")
            losses.append(step(x, y).item())
            compilations.append(isthmus.metrics.counts().get("compilations", 0))
    found = facts(model, optimizer, wanted[1], without_influence(name))
    errors = [abs(a - b) for a, b in zip(losses, wanted[0], strict=True)]
    return {"mode": mode, "losses": max(errors), "compiled late": compilations[-1] - compilations[1], **found}


def main(name: str, parallelism: str, modes: str, steps: str = "4") -> None:
    """Train in each mode and say what was found."""
    wanted = reference(name, int(steps))
    for mode in modes.split(","):
        say(train(name, parallelism, mode, int(steps), wanted))


if __name__ == "__main__":
    main(*sys.argv[1:])
