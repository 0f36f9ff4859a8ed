"""The gradient of every sample of a batch, by jax.grad and jax.vmap over a torch module.

python examples/per_sample_gradients.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isthmus

BATCH, CLASSES = 16, 5


class Net(nn.Module):
    """A small convolutional classifier, written in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3, stride=2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.second(self.first(image).relu()).relu().mean((-2, -1)))


def by_jax(net: Net, images: Tensor, labels: Tensor) -> Tensor:
    """Return the norm of each sample's gradient, all of them from one program."""
    params, apply = isthmus.functional(net)  # a dict of arrays, and the module as a pure function of them

    def loss(params: Any, image: Any, label: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, image), label)

    @jax.jit
    def norms(params: Any, images: Any, labels: Any) -> Any:
        gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, images, labels)
        return jnp.sqrt(sum(jnp.square(g).reshape(BATCH, -1).sum(1) for g in gradients.values()))

    images, labels = isthmus.to_jax((images.to("jax"), labels.to("jax")))
    return isthmus.from_jax(norms(params, images, labels)).cpu()


def by_loop(net: Net, images: Tensor, labels: Tensor) -> Tensor:
    """Return the same in plain torch: one backward per sample."""
    norms = []
    for image, label in zip(images, labels, strict=True):
        loss = F.cross_entropy(net(image), label)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        norms.append(torch.cat([g.flatten() for g in gradients]).norm())
    return torch.stack(norms)


def main() -> tuple[Tensor, Tensor]:
    """Return the norms as JAX and as a loop of torch's on the CPU find them."""
    torch.manual_seed(0)
    net = Net()
    images, labels = torch.randn(BATCH, 1, 12, 12), torch.arange(BATCH) % CLASSES
    found, wanted = by_jax(net, images, labels), by_loop(net, images, labels)
    for n in range(0, BATCH, 4):
        print(f"sample {n:2}  gradient norm {found[n]:.5f}  in a loop {wanted[n]:.5f}")
    print(f"largest difference of {BATCH}: {(found - wanted).abs().max():.1e}")
    return found, wanted


if __name__ == "__main__":
    main()
