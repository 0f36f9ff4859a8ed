"""ResNet-18 in plain PyTorch, and the same one as a JAX user would write it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512)


class Basic(nn.Module):
    """Two convolutions on a residual path."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride != 1 else None
        self.bn3 = nn.BatchNorm2d(outputs) if stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.short is None else self.bn3(self.short(x))))


class ResNet(nn.Module):
    """Images in, logits of a class out."""

    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn = nn.BatchNorm2d(64)
        pairs = zip((64, *WIDTHS), WIDTHS, strict=False)
        self.blocks = nn.ModuleList(
            [
                Basic(inputs if n == 0 else outputs, outputs, 1 if n or inputs == outputs else 2)
                for inputs, outputs in pairs
                for n in range(2)
            ]
        )
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _conv(x: Any, weight: Any, stride: int, pad: int) -> Any:
    return jax.lax.conv_general_dilated(
        x, weight, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NHWC", "OIHW", "NHWC")
    )


def _batch_norm(x: Any, p: dict[str, Any], s: dict[str, Any], name: str, new: dict[str, Any] | None) -> Any:
    if new is None:
        mean, variance = s[f"{name}.running_mean"], s[f"{name}.running_var"]
    else:
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        count = x.size // x.shape[-1]
        new[f"{name}.running_mean"] = 0.9 * s[f"{name}.running_mean"] + 0.1 * mean
        unbiased = variance * count / (count - 1)
        new[f"{name}.running_var"] = 0.9 * s[f"{name}.running_var"] + 0.1 * unbiased
    scale = p[f"{name}.weight"] * jax.lax.rsqrt(variance + 1e-5)
    return (x - mean) * scale + p[f"{name}.bias"]


def forward(p: dict[str, Any], s: dict[str, Any], x: Any, new: dict[str, Any] | None = None) -> Any:
    """Return the logits for images with channels last; ``new`` receives the statistics when training."""
    x = jax.nn.relu(_batch_norm(_conv(x, p["conv.weight"], 2, 3), p, s, "bn", new))
    padding = ((0, 0), (1, 1), (1, 1), (0, 0))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
    for n in range(8):
        b = f"blocks.{n}"
        stride = 2 if f"{b}.short.weight" in p else 1
        y = jax.nn.relu(_batch_norm(_conv(x, p[f"{b}.conv1.weight"], stride, 1), p, s, f"{b}.bn1", new))
        y = _batch_norm(_conv(y, p[f"{b}.conv2.weight"], 1, 1), p, s, f"{b}.bn2", new)
        if stride == 2:
            x = _batch_norm(_conv(x, p[f"{b}.short.weight"], 2, 0), p, s, f"{b}.bn3", new)
        x = jax.nn.relu(y + x)
    return x.mean((1, 2)) @ p["head.weight"].T + p["head.bias"]


def loss(p: dict[str, Any], s: dict[str, Any], x: Any, targets: Any) -> tuple[Any, dict[str, Any]]:
    """Return the mean cross-entropy and the new statistics."""
    new: dict[str, Any] = {}
    logits = forward(p, s, x, new)
    chosen = jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean(), new
