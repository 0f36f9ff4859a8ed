"""Models to race: in plain PyTorch, with a batch, and as a JAX user would run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers import gpt, resnet
from peers.race import Thunk
from peers.training import JaxTraining, OptaxTraining


@dataclass(frozen=True)
class Case:
    """A model, its batch (inputs and targets) and loss, and its forward pass and training step in JAX."""

    title: str
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    loss: Callable[..., Tensor]
    forward: Thunk
    step: Thunk


def token_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next tokens."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def gpt_case(title: str, size: gpt.Size, training: Callable[..., Any]) -> Case:
    """Return a GPT of some size."""
    torch.manual_seed(0)
    model = gpt.GPT(size)
    tokens = torch.randint(size.vocabulary, (size.batch, size.context))
    targets = tokens.roll(-1, 1)
    p, jt, jy = gpt.parameters(model), jnp.asarray(tokens.numpy()), jnp.asarray(targets.numpy())
    forward = jax.jit(lambda p, x: gpt.forward(p, x, size))
    step = training(gpt.parameters(model), lambda p, x, y: gpt.loss(p, x, y, size))
    return Case(title, model, (tokens, targets), token_loss, lambda: forward(p, jt), lambda: step(jt, jy))


def resnet_case() -> Case:
    """Return a ResNet-18."""
    torch.manual_seed(0)
    model = resnet.ResNet()
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(100, (8,))
    p = gpt.parameters(model)
    s = {k: jnp.asarray(v.numpy()) for k, v in model.named_buffers() if "running" in k}
    ji, jl = jnp.asarray(images.permute(0, 2, 3, 1).numpy()), jnp.asarray(labels.numpy())
    forward = jax.jit(lambda p, s, x: resnet.forward(p, s, x))
    training = JaxTraining(gpt.parameters(model), resnet.loss, {k: jnp.array(v) for k, v in s.items()})
    title, batch = "ResNet-18 64x64 B8", (images, labels)
    return Case(title, model, batch, F.cross_entropy, lambda: forward(p, s, ji), lambda: training(ji, jl))


SMALL = gpt.Size(layers=4, width=128, heads=4, context=64, vocabulary=512, batch=4)
CASES: dict[str, Callable[[], Case]] = {
    "small": lambda: gpt_case("GPT L4 D128 T64 B4, optax", SMALL, OptaxTraining),
    "gpt": lambda: gpt_case("GPT L4 D256 T128 B8", gpt.Size(), JaxTraining),
    "resnet": resnet_case,
}
