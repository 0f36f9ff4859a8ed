"""torchax's own training step of the small GPT, beside hand-written JAX: a process of its own.

It cannot share one with isthmus, since both call their device "jax"; run by ``benchmarks/interop.py train``.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import torch
import torch.nn.functional as F
from torch._ops import OpOverloadPacket

sys.path.insert(0, str(Path(__file__).parents[1]))
from peers import gpt
from peers.race import race, report
from peers.training import OptaxTraining

STEPS = 5


def import_torchax() -> Any:
    """Import torchax; where torch has lost overloads it names, those of named tensors, it gets another for each."""
    known = OpOverloadPacket.__getattr__

    def found(self: Any, name: str) -> Any:
        try:
            return known(self, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return torch.ops.aten.sin.default

    OpOverloadPacket.__getattr__ = found  # type: ignore[method-assign]
    try:
        import torchax
        import torchax.interop
        import torchax.train

        torchax.default_env()  # loads the rest of it
    finally:
        OpOverloadPacket.__getattr__ = known  # type: ignore[method-assign]
    return torchax


def main() -> None:
    """Race both through a few steps."""
    torchax = import_torchax()
    size = gpt.Size(layers=4, width=128, heads=4, context=64, vocabulary=512, batch=4)
    torch.manual_seed(0)
    original = gpt.GPT(size)
    tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    arrays = [jnp.asarray(part.numpy(), jnp.int32) for part in batch]
    by_hand = OptaxTraining(gpt.parameters(original), lambda p, x, y: gpt.loss(p, x, y, size))
    model, env = copy.deepcopy(original), torchax.default_env()
    with env:
        model.to("jax")
        weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        transform = optax.adamw(1e-3, weight_decay=0.01)
        state = torchax.interop.call_jax(transform.init, weights)
        inputs = [part.to("jax") for part in batch]

        def forward(weights: Any, buffers: Any, args: Any) -> Any:
            return torch.func.functional_call(model, (weights, buffers), args)

        def loss(logits: Any, targets: Any) -> Any:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        made = torchax.train.make_train_step(forward, loss, transform)
        step = torchax.interop.jax_jit(made, {"donate_argnums": (0, 2)})
    held = [weights, state]

    def run() -> Any:
        with env:
            for _ in range(STEPS):
                value, held[0], held[1] = step(held[0], buffers, held[1], inputs[0], inputs[1])
        return value.jax()

    def by_hand_too() -> Any:
        return [by_hand(*arrays) for _ in range(STEPS)][-1]

    report(
        f"{STEPS} training steps: torchax",
        race({"jax.jit + optax": by_hand_too, "torchax": run}, 15),
        "jax.jit + optax",
    )


if __name__ == "__main__":
    main()
