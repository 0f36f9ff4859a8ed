"""``torch.compile(model)`` without a backend: the device's graphs come to this package, others stay TorchInductor's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import isthmus
from isthmus._device.torch_glue import default_backend


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the graphs that reach TorchInductor, which would want a C++ compiler here."""
    from torch._inductor import compile_fx

    torch.zeros(1, device="jax")  # replaces that function, which is put back after the test
    graphs: list[Any] = []
    monkeypatch.setattr(
        compile_fx, "compile_fx", lambda module, *args, **kwargs: graphs.append(module) or module
    )
    return graphs


def test_training_on_the_device_never_reaches_inductor(inductor: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.to("jax")
    torch.compile(model, fullgraph=True)(x.to("jax")).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), gradient)
    assert not inductor


def test_a_graph_that_only_makes_tensors_of_the_device(inductor: list[Any]) -> None:
    assert torch.compile(lambda: torch.arange(3, device="jax") + 1, fullgraph=True)().tolist() == [1, 2, 3]
    assert not inductor


def test_a_backend_that_hands_its_graph_to_inductor() -> None:
    import torch._inductor

    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return torch._inductor.compile(module, inputs)

    x = torch.randn(3, device="jax", requires_grad=True)
    torch.compile(lambda x: (x * 2).sin(), backend=backend, fullgraph=True)(x).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 2 * (2 * x.detach().cpu()).cos())
    assert len(graphs) == 1


def test_graphs_of_other_devices_stay_inductors(inductor: list[Any]) -> None:
    torch.zeros(1, device="jax")
    assert torch.compile(lambda x: x + 1)(torch.zeros(2)).tolist() == [1, 1]
    assert len(inductor) == 1


def test_an_optimizer_that_compiles_itself(inductor: list[Any]) -> None:
    parameter = nn.Parameter(torch.ones(3, device="jax"))
    parameter.grad = torch.ones(3, device="jax")
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    torch.compile(optimizer.step)()
    assert parameter.tolist() == [0.5, 0.5, 0.5]
    assert not inductor


def test_it_can_be_switched_off(inductor: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, device="jax")
    isthmus.config.compile = "inductor"
    try:
        torch.compile(lambda x: x + 2)(x)
    finally:
        isthmus.config.compile = "isthmus"
    assert len(inductor) == 1


def test_options_of_inductor_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_backend, "_warned", set())
    x = torch.zeros(2, device="jax")
    with pytest.warns(UserWarning, match=r"max_autotune.* are TorchInductor's and are left out"):
        assert torch.compile(lambda x: x + 3, mode="max-autotune-no-cudagraphs")(x).tolist() == [3, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.compile(lambda x: x + 4, mode="max-autotune-no-cudagraphs")(x).tolist() == [4, 4]
