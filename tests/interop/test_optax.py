"""optax drives torch modules."""

from __future__ import annotations

import copy
import io
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import isthmus
from isthmus.errors import IsthmusError

X = torch.linspace(-1, 1, 24).reshape(6, 4)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to("jax")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(X.to("jax")).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


PAIRS = {
    "sgd": (lambda: optax.sgd(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "adam": (lambda: optax.adam(1e-2), lambda p: torch.optim.Adam(p, 1e-2)),
    "adamw": (
        lambda: optax.adamw(1e-2, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_it_steps_as_torch_does(name: str) -> None:
    ours, theirs = PAIRS[name]
    a, b = mlp(), mlp()
    found = train(a, isthmus.optax.Optimizer(a.parameters(), ours()), 5)
    np.testing.assert_allclose(found, train(b, theirs(b.parameters()), 5), rtol=1e-4)


def test_a_step_is_one_program_under_jit() -> None:
    a, b = mlp(), mlp()
    want = train(a, isthmus.optax.Optimizer(a.parameters(), optax.adam(1e-2)), 5)
    optimizer, x = isthmus.optax.Optimizer(b.parameters(), optax.adam(1e-2)), X.to("jax")

    @isthmus.jit
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = b(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    np.testing.assert_allclose([step(x).item() for _ in range(5)], want, rtol=1e-5)


@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_state_dicts_go_on_where_they_were(device: str) -> None:
    model = mlp().to(device)
    optimizer = isthmus.optax.Optimizer(model.parameters(), optax.adam(1e-2))
    x = X.to(device)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    steps(model, optimizer)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    steps(model, optimizer)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    again = mlp().to(device)
    again.load_state_dict(weights)
    resumed = isthmus.optax.Optimizer(again.parameters(), optax.adam(1e-2))
    resumed.load_state_dict(state)
    steps(again, resumed)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    kept = resumed.state_dict()["state"][0]
    assert kept["0/count"].dtype == torch.int32
    assert kept["0/count"].item() == 6


def test_groups_have_transformations_of_their_own() -> None:
    model = mlp()
    groups = [
        {"params": [model[0].weight, model[0].bias]},
        {"params": model[2].parameters(), "transformation": optax.set_to_zero()},
    ]
    optimizer = isthmus.optax.Optimizer(groups, optax.sgd(0.1))
    before = [p.clone() for p in model.parameters()]
    train(model, optimizer, 1)
    assert [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)] == [
        False,
        False,
        True,
        True,
    ]


def test_schedulers_set_the_learning_rate() -> None:
    a, b = mlp(), mlp()
    ours = isthmus.optax.Optimizer(a.parameters(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    theirs = torch.optim.SGD(b.parameters(), lr=0.1)
    found = []
    for model, optimizer in ((a, ours), (b, theirs)):
        losses = train(model, optimizer, 1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        for _ in range(4):
            losses += train(model, optimizer, 1)
            schedule.step()
        found.append(losses)
    np.testing.assert_allclose(*found, rtol=1e-4)


def test_a_schedule_may_begin_before_the_first_step() -> None:
    model = mlp()
    optimizer = isthmus.optax.Optimizer(
        model.parameters(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    before = model[0].weight.clone()
    train(model, optimizer, 1)
    gradient = model[0].weight.grad
    assert gradient is not None
    torch.testing.assert_close(model[0].weight, before - 0.05 * gradient)
    schedule.step()


def test_copies_go_on_alone() -> None:
    model = mlp()
    optimizer = isthmus.optax.Optimizer(model.parameters(), optax.adam(1e-2))
    train(model, optimizer, 2)
    other, copied = copy.deepcopy((model, optimizer))
    want = train(model, optimizer, 2)
    np.testing.assert_allclose(train(other, copied, 2), want, rtol=1e-6)


def test_another_parameter_in_the_place_of_one() -> None:
    a, b = (torch.ones(2, device="jax", requires_grad=True) for _ in range(2))
    optimizer = isthmus.optax.Optimizer([a, b], optax.sgd(0.1, momentum=0.9))
    a.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    b.sum().backward()
    with pytest.raises(IsthmusError, match="parameters 1 of a group have gradients, and 0 had"):
        optimizer.step()


def test_extra_arguments_reach_the_update() -> None:
    def init(params: Any) -> Any:
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None, *, scale: Any, **_: Any) -> Any:
        return [-scale * u for u in updates], state

    w = torch.ones(2, device="jax", requires_grad=True)
    optimizer = isthmus.optax.Optimizer([w], optax.GradientTransformationExtraArgs(init, update))
    w.sum().backward()
    optimizer.step(scale=torch.tensor(0.25, device="jax"))
    assert w.tolist() == [0.75, 0.75]


def test_what_does_not_fit_is_refused() -> None:
    model = mlp()
    optimizer = isthmus.optax.Optimizer(model.parameters(), optax.adam(1e-2))
    train(model, optimizer, 1)
    model[0].weight.grad = None
    with pytest.raises(
        IsthmusError, match="parameters 1, 2, 3 of a group have gradients, and 0, 1, 2, 3 had"
    ):
        optimizer.step()
    other = isthmus.optax.Optimizer(mlp().parameters(), optax.sgd(0.1, momentum=0.9))
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(IsthmusError, match="another transformation's"):
        _step(other)
    with pytest.raises(ValueError, match=r"groups of \[4\] parameters, the optimizer has groups of \[2\]"):
        isthmus.optax.Optimizer(model[0].parameters(), optax.adam(1e-2)).load_state_dict(
            optimizer.state_dict()
        )


def _step(optimizer: torch.optim.Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_arrays_of_jax_are_the_state() -> None:
    model = mlp()
    optimizer = isthmus.optax.Optimizer(model.parameters(), optax.adam(1e-2))
    train(model, optimizer, 2)
    state = isthmus.to_jax(optimizer.state[model[0].weight])
    assert state["0/mu/0"].shape == (8, 4)
    assert state["0/count"] == jnp.int32(2)
