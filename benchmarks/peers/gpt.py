"""A GPT in plain PyTorch, and the same one as a JAX user would write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """How large a GPT and its batches are."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    vocabulary: int = 1024
    batch: int = 8


class Block(nn.Module):
    """Causal self-attention and a perceptron, each on a residual path."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parameters(model: nn.Module) -> dict[str, Any]:
    """Return a torch model's parameters as JAX arrays."""
    return {name: jnp.asarray(p.detach().float().cpu().numpy()) for name, p in model.named_parameters()}


def _norm(x: Any, weight: Any, bias: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5) * weight + bias).astype(x.dtype)


def forward(p: dict[str, Any], tokens: Any, size: Size, attention: str | None = None) -> Any:
    """Return the logits, as ``GPT`` does."""

    def linear(x: Any, name: str) -> Any:
        y = x @ p[f"{name}.weight"].T
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def norm(x: Any, name: str) -> Any:
        return _norm(x, p[f"{name}.weight"], p[f"{name}.bias"])

    batch, time = tokens.shape
    x = p["token.weight"][tokens] + p["position.weight"][:time]
    for n in range(size.layers):
        b = f"blocks.{n}"
        parts = linear(norm(x, f"{b}.norm1"), f"{b}.qkv").reshape(batch, time, 3, size.heads, -1)
        q, k, v = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
        x = x + linear(mixed.reshape(batch, time, size.width), f"{b}.out")
        x = x + linear(jax.nn.gelu(linear(norm(x, f"{b}.norm2"), f"{b}.up")), f"{b}.down")
    return linear(norm(x, "norm"), "head")


def loss(p: dict[str, Any], tokens: Any, targets: Any, size: Size, attention: str | None = None) -> Any:
    """Return the mean cross-entropy."""
    logits = forward(p, tokens, size, attention).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()
