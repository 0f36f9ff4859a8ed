"""Training steps as one program."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn

import isthmus
from isthmus.errors import IsthmusError

X, Y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.linspace(0, 1, 8).reshape(8, 1)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), dropout

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * nn.functional.dropout(self.down(torch.tanh(self.up(x))), self.dropout)


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Block(8, dropout), Block(8, dropout), nn.Linear(8, 1)).to("jax")


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def by_hand(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(net, X.to("jax"), Y.to("jax"))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, capturable=True),
    "optax": lambda p: isthmus.optax.Optimizer(p, optax.adamw(1e-2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 4}, {"remat": Block}], ids=["plain", "accumulate", "remat"]
)
def test_it_trains_as_a_loop_does(name: str, options: Any) -> None:
    a, b = model(), model()
    want = by_hand(a, OPTIMIZERS[name](a.parameters()), 5)
    step = isthmus.train_step(b, loss_fn, OPTIMIZERS[name](b.parameters()), **options)
    found = [step(X.to("jax"), Y.to("jax")).item() for _ in range(5)]
    np.testing.assert_allclose(found, want, rtol=1e-4)
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-5)
        assert other.grad is None


def test_it_is_one_program_after_the_first_steps() -> None:
    net = model()
    step = isthmus.train_step(net, loss_fn, torch.optim.AdamW(net.parameters(), 1e-2))
    x, y = X.to("jax"), Y.to("jax")
    for _ in range(3):
        step(x, y)
    isthmus.metrics.clear()
    for _ in range(3):
        step(x, y)
    counts = isthmus.metrics.as_dict()
    assert counts["compilations"]["count"] == 0
    assert counts["ops recorded"] == 0


@pytest.mark.parametrize("name", ["AdamW", "optax"])
def test_it_is_recorded_once(name: str) -> None:
    net = model()
    step = isthmus.train_step(net, loss_fn, OPTIMIZERS[name](net.parameters()))
    for _ in range(3):
        step(X.to("jax"), Y.to("jax"))
    assert [len(captures) for captures in step.captures.values()] == [1]


def test_parameters_that_get_no_gradient() -> None:
    a, b = model(), model()
    for net in (a, b):
        net.unused = nn.Linear(2, 2).to("jax")
    want = by_hand(a[:4], OPTIMIZERS["optax"](a[:4].parameters()), 3)

    def some(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_fn(net[:4], x, y)

    step = isthmus.train_step(b, some, OPTIMIZERS["optax"](b.parameters()))
    np.testing.assert_allclose([step(X.to("jax"), Y.to("jax")).item() for _ in range(3)], want, rtol=1e-4)


def test_an_optimizer_that_has_stepped_goes_on() -> None:
    a, b = model(), model()
    one, other = (torch.optim.Adam(net.parameters(), 1e-2) for net in (a, b))
    want = by_hand(a, one, 5)
    found = by_hand(b, other, 2)
    step = isthmus.train_step(b, loss_fn, other)
    found += [step(X.to("jax"), Y.to("jax")).item() for _ in range(3)]
    np.testing.assert_allclose(found, want, rtol=1e-4)


def test_more_than_a_loss_is_returned() -> None:
    def both(model: nn.Module, x: torch.Tensor, *, y: torch.Tensor) -> Any:
        out = model(x)
        return (out - y).square().mean(), {"out": out, "name": "mse"}

    net = model()
    want = net(X.to("jax")).detach().cpu()
    step = isthmus.train_step(net, both, torch.optim.SGD(net.parameters(), 0.1), accumulate=2)
    loss, rest = step(X.to("jax"), y=Y.to("jax"))
    assert loss.dim() == 0
    assert rest["name"] == "mse"
    torch.testing.assert_close(rest["out"].cpu(), want)


def test_rematerialized_dropout_is_the_same_dropout() -> None:
    found = []
    for remat in ((), Block):
        net = model(dropout=0.5)
        step = isthmus.train_step(net, loss_fn, torch.optim.SGD(net.parameters(), 0.1), remat=remat)
        torch.manual_seed(3)
        found.append([step(X.to("jax"), Y.to("jax")).item() for _ in range(4)])
    np.testing.assert_allclose(*found, rtol=1e-5)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


def test_rematerialized_buffers_are_written_once() -> None:
    found = []
    for remat in ((), Normed):
        torch.manual_seed(0)
        net = nn.Sequential(Normed(), nn.Linear(4, 1)).to("jax")
        step = isthmus.train_step(net, loss_fn, torch.optim.SGD(net.parameters(), 0.1), remat=remat)
        losses = [step(X.to("jax"), Y.to("jax")).item() for _ in range(3)]
        assert net[0].norm.num_batches_tracked.item() == 3
        found.append([*losses, *net[0].norm.running_mean.tolist()])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_remat_under_autocast_and_with_gradients_inside() -> None:
    found = []
    for remat in ((), Block):
        net = model()

        def loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            with torch.autocast("jax", dtype=torch.bfloat16):
                out = net(x)
            (slope,) = torch.autograd.grad(out.float().sum(), x, retain_graph=True)
            return (out.float() - y).square().mean() + 0 * slope.sum()

        step = isthmus.train_step(net, loss, torch.optim.SGD(net.parameters(), 0.1), remat=remat)
        found.append([step(X.to("jax"), Y.to("jax")).item() for _ in range(3)])
    np.testing.assert_allclose(*found, rtol=1e-3)


def test_a_module_may_be_named_twice() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = isthmus.train_step(net, loss_fn, optimizer, remat=[Block, net[1]])
    want = by_hand(model(), torch.optim.SGD(net.parameters(), 0.0), 1)
    np.testing.assert_allclose(step(X.to("jax"), Y.to("jax")).item(), want[0], rtol=1e-5)


def program(step: Any) -> Any:
    """Return the program of a step, which has been recorded once."""
    ((replay,),) = step.captures.values()
    return replay.execution.program.executable


def test_remat_keeps_arguments_and_computes_again() -> None:
    torch.manual_seed(0)
    deep = nn.Sequential(*[Block(64) for _ in range(8)]).to("jax")
    x = torch.randn(512, 64, device="jax")
    programs = []
    for remat in ((), Block):
        optimizer = torch.optim.SGD(deep.parameters(), 0.1)
        step = isthmus.train_step(deep, lambda m, x: m(x).square().mean(), optimizer, remat=remat)
        step(x)
        programs.append(program(step))
    texts = [one.lowered.as_text() for one in programs]
    # Products of transposed matrices have barriers of their own on the CPU.
    plain, again = (text.count("stablehlo.optimization_barrier") for text in texts)
    assert again - plain == 16
    assert [text.count("stablehlo.tanh") for text in texts] == [8, 16]
    if (
        jax.default_backend() != "cpu"
    ):  # XLA's CPU compiler looks through barriers and shares what is the same
        plain, less = (one.compiled.memory_analysis().temp_size_in_bytes for one in programs)
        assert less < 0.6 * plain


def test_what_cannot_be_done_says_so() -> None:
    net = model()
    with pytest.raises(TypeError, match=r"isthmus.optax.Optimizer\(model.parameters"):
        isthmus.train_step(net, loss_fn, optax.adam(1e-3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ValueError, match="a batch of 8 cannot be split into 3 parts"):
        isthmus.train_step(net, loss_fn, optimizer, accumulate=3)(X.to("jax"), Y.to("jax"))
    with pytest.raises(IsthmusError, match="no LSTM to rematerialize"):
        isthmus.train_step(net, loss_fn, optimizer, remat=nn.LSTM)
    with pytest.raises(IsthmusError, match="Linear is not a part of the model"):
        isthmus.train_step(net, loss_fn, optimizer, remat=[nn.Linear(2, 2)])
