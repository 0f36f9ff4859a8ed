"""A small training run in each mode, to be disturbed: what it computes undisturbed, and whether its state is whole."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import isthmus

MODES = ("eager", "lazy", "jit", "compile", "train_step")


class Training:
    """A model, its optimizer and one step, on the device in a mode; steps are numbered, and each has its own batch."""

    def __init__(self, mode: str, device: str = "jax") -> None:
        self.mode, self.device, self.done = mode, device, 0
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))
        self.model = model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, capturable=device == "jax")
        self._step = self._wrapped()

    def _wrapped(self) -> Callable[..., Any]:
        if self.mode == "jit":
            return isthmus.jit(self._train)
        if self.mode == "compile":
            return torch.compile(self._train, backend="isthmus")
        if self.mode == "train_step":
            return isthmus.train_step(self.model, _loss, self.optimizer)
        return self._train

    def _train(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the batch of the next step."""
        made = torch.Generator().manual_seed(self.done)
        x = torch.randn(16, 4, generator=made)
        return x.to(self.device), x[:, :2].sin().to(self.device)

    def step(self) -> None:
        """Train one step; only one that was not disturbed counts."""
        batch = self.batch()
        with isthmus.lazy() if self.mode == "lazy" else contextlib.nullcontext():
            self._step(*batch)
        self.done += 1

    def run(self, steps: int) -> None:
        """Train some steps."""
        for _ in range(steps):
            self.step()

    def state(self) -> dict[str, Tensor]:
        """Return every parameter, statistic and moment on the CPU: all of it can be read, whatever happened."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for at, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{at}.{name}": value for name, value in state.items()}
        return {name: value.detach().cpu().clone() for name, value in found.items()}

    def take_over(self, other: Training) -> None:
        """Have the state of another run."""
        self.model.load_state_dict({k: v.cpu() for k, v in other.model.state_dict().items()})
        # torch would share the tensors of the other run.
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        for group in self.optimizer.param_groups:
            group["capturable"] = self.device == "jax"
        self.done = other.done


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Return whether two states agree as two compilations of one program do."""
    return left.keys() == right.keys() and all(
        torch.allclose(left[name].double(), right[name].double(), rtol=1e-4, atol=1e-5) for name in left
    )


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Return the names of what differs, for messages."""
    return [name for name in left if name not in right or not same({"": left[name]}, {"": right[name]})]


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Run backward passes on this thread, where a trace function sees them."""
    with torch.autograd.set_multithreading_enabled(False):
        yield
