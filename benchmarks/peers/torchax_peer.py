"""torchax beside hand-written JAX, in a process of its own: it and isthmus both call their device "jax"."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverloadPacket


def beside(case: str, rounds: int) -> None:
    """Print torchax's forward pass and training step of a case, if it is installed."""
    if importlib.util.find_spec("torchax") is None:
        return
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, __file__, case, str(rounds)], env=environment, check=False)


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


class Contender:
    """A case's model on torchax's device, as its users jit it."""

    def __init__(self, case: Any) -> None:
        import optax

        torchax = import_torchax()
        self.env = torchax.default_env()
        model = copy.deepcopy(case.model)
        with self.env:
            model.to("jax")
            self.weights, self.buffers = dict(model.named_parameters()), dict(model.named_buffers())
            transform = optax.adamw(1e-3, weight_decay=0.01)
            self.state = torchax.interop.call_jax(transform.init, self.weights)
            self.batch = [part.to("jax") for part in case.batch]

            def forward(weights: Any, buffers: Any, args: Any) -> Any:
                return torch.func.functional_call(model, (weights, buffers), args)

            model.eval()
            self.infer = torchax.interop.jax_jit(forward)
            self.infer(self.weights, self.buffers, self.batch[0])  # traced before it is told to train
            model.train()
            made = torchax.train.make_train_step(forward, case.loss, transform)
            self.train = torchax.interop.jax_jit(made, {"donate_argnums": (0, 2)})

    def forward(self) -> Any:
        """Run the forward pass."""
        with self.env:
            return self.infer(self.weights, self.buffers, self.batch[0]).jax()

    def step(self) -> Any:
        """Run a training step."""
        with self.env:
            value, self.weights, self.state = self.train(
                self.weights, self.buffers, self.state, self.batch[0], self.batch[1]
            )
        return value.jax()


def main() -> None:
    """Race it against JAX through both."""
    sys.path[0] = str(Path(__file__).parents[1])
    from peers.cases import CASES
    from peers.race import race, report

    case = CASES[sys.argv[1]]()
    contender, rounds = Contender(case), int(sys.argv[2])
    report(f"{case.title}, forward", race({"jax": case.forward, "torchax": contender.forward}, rounds), "jax")
    report(f"{case.title}, training step", race({"jax": case.step, "torchax": contender.step}, rounds), "jax")


if __name__ == "__main__":
    main()
