"""Models of many families, compiled, compute and train as eager ones on the CPU do, and no op falls to the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import isthmus
from tests.families import FAMILIES, Family
from tests.families.family import Batch

STEPS = 5
SETTLED = 3
"""After as many steps everything is compiled: the optimizer's state exists, and its memory is reused."""

ON_CPU = ("ResNet", "LSTM", "Llama")


@pytest.fixture(autouse=True)
def fresh_counts() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    isthmus.metrics.clear()
    # Dynamo leaves modules with an nn.LSTM or nn.GRU uncompiled unless it is told otherwise.
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
    torch._dynamo.reset()


def _marked(names: tuple[str, ...] | None = None) -> list[Any]:
    """Return families as parameters, those that are not quick marked as slow."""
    slow = [pytest.mark.slow, pytest.mark.timeout(900)]
    return [
        pytest.param(family, id=family.name, marks=[] if family.quick else slow)
        for family in FAMILIES
        if names is None or family.name in names
    ]


def _to(batch: Batch, device: str) -> Batch:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a model's result, flat; the loss is the first."""
    if isinstance(result, dict):
        result = tuple(result.values())
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in _tensors(item)]
    return [result] if isinstance(result, Tensor) else []


def _evaluate(call: Any, model: nn.Module, batch: Batch) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        return _tensors(call(**batch))


def _train(
    call: Any, model: nn.Module, family: Family, batches: list[Batch]
) -> tuple[list[Tensor], list[Any]]:
    """Return the losses of some steps, and what had been compiled after each."""
    model.train()
    optimizer = family.optimizer(list(model.parameters()))
    losses, compiled = [], []
    for step in range(STEPS):
        loss = _tensors(call(**batches[step % len(batches)]))[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        compiled.append((counters["stats"]["unique_graphs"], isthmus.metrics.counts().get("compilations", 0)))
    return losses, compiled


def _assert_same(got: list[Tensor], want: list[Tensor], what: str) -> None:
    assert len(got) == len(want), what
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(g.cpu(), w, msg=lambda text, at=index: f"{what} {at}: {text}")


def _assert_same_state(ours: nn.Module, model: nn.Module) -> None:
    """Compare parameters and buffers by name."""
    want = model.state_dict()
    got = ours.state_dict()
    assert list(got) == list(want)
    for name, value in want.items():
        torch.testing.assert_close(got[name].cpu(), value, msg=lambda text, at=name: f"{at}: {text}")


def _assert_whole_graphs(family: Family, compiled: list[Any]) -> None:
    """Require one graph for evaluation and one for training, or else only the breaks that the model causes."""
    broken = {reason.splitlines()[0] for reason in counters["graph_break"]}
    assert broken == set(family.breaks)
    if not family.breaks:
        assert counters["stats"]["unique_graphs"] == 2
    assert compiled[SETTLED - 1 :] == compiled[SETTLED - 1 : SETTLED] * (STEPS - SETTLED + 1)


def _compare(family: Family, device: str) -> None:
    """Evaluate and train a model twice from the same weights: eager on the CPU, and compiled on ``device``."""
    torch.manual_seed(0)
    model = family.model()
    ours = copy.deepcopy(model).to(device)
    isthmus.metrics.clear()  # of what other tests ran on the CPU
    call = torch.compile(ours, backend="isthmus", options={"fallback": "error"})
    g = torch.Generator().manual_seed(1)
    batches = [family.batch(g) for _ in range(2)]
    moved = [_to(batch, device) for batch in batches]

    got = _evaluate(call, ours, moved[0])
    assert {tensor.device.type for tensor in got} == {device}
    _assert_same(got, _evaluate(model, model, batches[0]), "output")
    losses, compiled = _train(call, ours, family, moved)
    expected, _ = _train(model, model, family, batches)
    _assert_same(losses, expected, "loss of step")
    assert expected[-1] < max(expected[:2])
    _assert_same_state(ours, model)
    assert isthmus.metrics.fallbacks() == {}
    _assert_whole_graphs(family, compiled)


def test_there_are_twenty_families() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 20


@pytest.mark.parametrize("family", _marked())
def test_model_on_the_device(family: Family) -> None:
    _compare(family, "jax")


@pytest.mark.parametrize("family", _marked(ON_CPU))
def test_model_left_on_the_cpu(family: Family) -> None:
    _compare(family, "cpu")
    # Evaluation, forward and backward: that nothing fell to the CPU says little of tensors that are there.
    assert isthmus.metrics.counts()["compilations"] == 3


@pytest.mark.parametrize(
    "kind",
    [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}],
    ids=["plain", "both ways", "no bias"],
)
def test_lstm_of_cpu_tensors(kind: dict[str, Any]) -> None:
    """An input that needs no gradient takes torch's way through layers of oneDNN's, forward and backward."""
    model = nn.LSTM(4, 8, **kind)
    ours = copy.deepcopy(model)
    series = torch.randn(5, 3, 4)
    call = torch.compile(ours, backend="isthmus", options={"fallback": "error"})
    with torch.no_grad():
        _assert_same(_tensors(call(series)), _tensors(model(series)), "result")
    for lstm in (call, model):
        found, (_, cell) = lstm(series)
        (found.cos().sum() + cell.sum()).backward()
    _assert_same([p.grad for p in ours.parameters()], [p.grad for p in model.parameters()], "gradient")


@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_frozen_batch_norm_trains_the_rest(device: str) -> None:
    """Outside training the CPU saves no statistics for backward, and says so in the graph."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    nn.init.uniform_(model[1].running_mean, 1, 2)
    nn.init.uniform_(model[1].running_var, 1, 2)
    ours = copy.deepcopy(model).to(device)
    images = torch.randn(2, 3, 8, 8)
    torch.compile(ours, backend="isthmus", options={"fallback": "error"})(
        images.to(device)
    ).cos().sum().backward()
    model(images).cos().sum().backward()
    _assert_same([p.grad for p in ours.parameters()], [p.grad for p in model.parameters()], "gradient")


@pytest.mark.parametrize("bias", ["none", "learned", "fixed", "bool"])
def test_attention_of_cpu_tensors(bias: str) -> None:
    """torch has an op of its own for it, and another way where the bias needs a gradient."""
    query, key, value = (torch.randn(2, 4, n, 8, requires_grad=True) for n in (5, 7, 7))
    mask = None if bias == "none" else torch.randn(5, 7, requires_grad=bias == "learned")
    mask = mask > -1 if bias == "bool" else mask
    inputs = [query, key, value, *([mask] if bias == "learned" else [])]

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).cos().sum()

    compiled = torch.compile(attend, backend="isthmus", options={"fallback": "error"})
    got, want = (torch.autograd.grad(call(), inputs) for call in (compiled, attend))
    _assert_same(list(got), list(want), "gradient")
