"""Every pass in every mode it claims: it changes a graph of that mode, and the values stay those of CPU torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import isthmus
from isthmus._graph.passes import PASSES


def cross_entropy(x: torch.Tensor) -> torch.Tensor:
    """The loss of a projection."""
    return F.cross_entropy(x @ x.T, torch.arange(x.shape[0], device=x.device))


def slice_gradients(x: torch.Tensor) -> torch.Tensor:
    """Two halves that make up the whole, as in rotary embeddings."""
    return torch.cat([-x[..., 2:].sin(), x[..., :2].cos()], -1).square().sum()


def fold_views(x: torch.Tensor) -> torch.Tensor:
    """A transposed result, read in its own layout."""
    return (x.t().sin().t().reshape(-1).view(2, -1) * 2).sum()


def fold_constants(x: torch.Tensor) -> torch.Tensor:
    """A constant that is cast."""
    return (x * torch.ones(4, dtype=torch.int64, device=x.device).to(torch.float32)).sum()


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    function.__name__: function for function in (cross_entropy, slice_gradients, fold_views, fold_constants)
}
RUNS = [
    (each.name, mode, way)
    for each in PASSES
    for mode, way in (
        ("lazy", "lazy"),
        ("lazy", "jit"),
        ("compile", "inside"),
        ("joint", "compile"),
        ("export", "export"),
    )
    if mode in each.modes
]


def gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[Any, Any]:
    """Return a loss and its gradient."""
    loss = function(x)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


@pytest.fixture
def changes(caplog: pytest.LogCaptureFixture) -> Any:
    """Return which passes changed a graph, as (mode, pass), while the test runs."""
    isthmus.config.log = "passes"
    caplog.set_level(logging.WARNING, logger="isthmus.passes")
    yield lambda: {(record.args[0], record.args[1]) for record in caplog.records if record.args}
    isthmus.config.log = "off"


def test_every_pass_has_a_program() -> None:
    assert set(PROGRAMS) == {each.name for each in PASSES}


@pytest.mark.parametrize(("name", "mode", "way"), RUNS, ids=lambda part: str(part))
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_pass_changes_graphs_of_its_modes(name: str, mode: str, way: str, changes: Any) -> None:
    function = PROGRAMS[name]
    torch.manual_seed(0)
    isthmus.clear_caches()
    x = torch.randn(4, 4)
    expected = gradient(function, x.clone().requires_grad_())
    on_device = x.to("jax").requires_grad_()
    if way == "lazy":
        with isthmus.lazy():
            loss, grad = gradient(function, on_device)
            loss, grad = loss.cpu(), grad.cpu()
    elif way == "jit":
        step = isthmus.jit(lambda x: gradient(function, x))
        step(on_device)
        loss, grad = (each.cpu() for each in step(on_device))
    elif way == "inside":  # forward and backward in one graph that is not split
        both = torch.compile(torch.func.grad_and_value(function), backend="isthmus")
        grad, loss = (each.cpu() for each in both(on_device.detach()))
    elif way == "export":  # torch.export takes gradients once they are ops of a graph
        both = make_fx(torch.func.grad_and_value(function))(x)
        grad, loss = isthmus.export(both, x).module()(x)
    else:
        compiled = torch.compile(function, backend="isthmus")
        loss, grad = (each.cpu() for each in gradient(compiled, on_device))
    torch.testing.assert_close((loss, grad), expected)
    assert (mode, name) in changes()
