"""Small models to be trained by several ranks, the same on every rank and on the CPU; and the training itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import isthmus

Tensor = torch.Tensor
STEPS, BATCH, VOCABULARY, WIDTH = 3, 4, 32, 16


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.middle(F.gelu(self.up(x)))))

    def loss(self, data: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self(data[0]), data[1])


class Attention(nn.Module):
    """Attention of as many heads as its local weights have, so that tensor parallelism may split it."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """A block of GPT, or one of Llama: RMS norms, a gated MLP, no biases."""

    def __init__(self, llama: bool) -> None:
        super().__init__()
        self.llama = llama
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norm1, self.attention, self.norm2 = norm(WIDTH), Attention(not llama), norm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32, bias=not llama), nn.Linear(32, WIDTH, bias=not llama)
        if llama:
            self.gate = nn.Linear(WIDTH, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        hidden = F.silu(self.gate(y)) * self.up(y) if self.llama else F.gelu(self.up(y))
        return x + self.down(hidden)


class Language(nn.Module):
    def __init__(self, llama: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(llama) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, data: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(data[0]).flatten(0, 1), data[1].flatten())


def make(name: str) -> Any:
    """Return a model with the same parameters in every process."""
    torch.manual_seed(0)
    return MLP() if name == "mlp" else Language(llama=name == "llama")


def batches(name: str) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of all ranks together."""
    generator = torch.Generator().manual_seed(1)
    if name == "mlp":
        return [
            (torch.randn(BATCH, 8, generator=generator), torch.randn(BATCH, 4, generator=generator))
            for _ in range(STEPS)
        ]
    tokens = [torch.randint(0, VOCABULARY, (BATCH, 7), generator=generator) for _ in range(STEPS)]
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def part(rank: int, world: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.chunk(world)[rank].to("jax")


def train(
    module: Any,
    name: str,
    take: Callable[[Tensor], Tensor],
    loss_of: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = None,
    settled: int = 2,
    **options: Any,
) -> list[float]:
    """Train for a few steps; return the losses, averaged over ranks that have different batches.

    Nothing is compiled after as many steps as ``settled`` says.
    """
    optimizer = optimizer or optimizer_of(module, name, **options)
    losses, compilations = [], []
    for data in batches(name):
        data = (take(data[0]), take(data[1]))
        optimizer.zero_grad()
        loss = (loss_of or (lambda module, data: loss_by(module, name, data)))(module, data)
        loss.backward()
        optimizer.step()
        losses.append(averaged(loss.detach()))
        compilations.append(isthmus.metrics.counts()["compilations"])
    assert compilations[-1] == compilations[settled - 1], f"compiled after step {settled}: {compilations}"
    return losses


def optimizer_of(module: Any, name: str, **options: Any) -> torch.optim.Optimizer:
    """Return Adam for the MLP. The gradient of a key's bias is zero but for rounding, which Adam would magnify."""
    if name == "mlp":
        return torch.optim.AdamW(module.parameters(), lr=1e-2, **options)
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, **options)


def loss_by(module: Any, name: str, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of what a wrapped module computes: wrappers run their code in ``forward`` alone."""
    out = module(data[0])
    return (
        F.mse_loss(out, data[1]) if name == "mlp" else F.cross_entropy(out.flatten(0, 1), data[1].flatten())
    )


def averaged(loss: Tensor) -> float:
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    loss = loss.clone()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss.item()


def on_cpu(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[float], Any]:
    """Train one process on the CPU with the whole batches; return losses and the trained model."""
    model = make(name).to(dtype)
    optimizer = optimizer_of(model, name)
    losses = []
    for data in batches(name):
        data = tuple([x.to(dtype) if x.is_floating_point() else x for x in data])
        optimizer.zero_grad()
        loss = model.loss(data)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def same_training(name: str, module: Any, losses: list[float], tolerance: float = 1e-5) -> None:
    """Compare losses and final parameters with those of the CPU."""
    wanted, model = on_cpu(name)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=0, atol=tolerance)
    exact = dict(on_cpu(name, torch.float64)[1].named_parameters())
    module = getattr(module, "module", module)
    module = getattr(module, "_orig_mod", module)
    for (key, want), got in zip(model.named_parameters(), module.parameters(), strict=True):
        whole = got.full_tensor() if hasattr(got, "full_tensor") else got
        close_to(exact[key], whole, want, tolerance, key)


def close_to(exact: Tensor, got: Tensor, want: Tensor, tolerance: float = 1e-5, what: str = "") -> None:
    """Check that a tensor is what float64 gives, but for a tolerance and the CPU's own error.

    Where a gradient is nearly zero, AdamW makes much of its rounding: the CPU's float32 is no closer to float64 there.
    """
    error = (got.detach().cpu().double() - exact.detach()).abs()
    excess = (error - (want.detach().double() - exact.detach()).abs()).max().item()
    assert excess < tolerance, f"{what} is off by {excess:.1e} more than on the CPU"
