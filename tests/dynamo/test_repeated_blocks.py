"""Identical blocks compiled once, and parameters folded once: the same results from other programs."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

from isthmus._dynamo import compile_log, specialization
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Item
from isthmus._graph.passes import repeated_blocks
from isthmus._graph.passes.stages import Stage, with_common_outputs
from isthmus._graph.passes.stages import stages_of as stages_from
from isthmus._runtime.compiler import platform
from isthmus.errors import ConfigError
from tests import models

DEPTH = 8


class Layer(nn.Module):
    """A residual block with enough nodes to be worth a program."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(8, width)
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(-1, -2), -1) @ v * scale
        return x + self.down(torch.tanh(self.up(x) + 1) * 2 - 0.5)


class Deep(nn.Module):
    """Equal layers, one wider one between them if asked, and what is shared by all."""

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layers = nn.ModuleList([Layer(4) for _ in range(DEPTH)])
        self.odd = nn.Linear(4, 4) if odd else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, scale = self.first(x), x.mean()
        for place, layer in enumerate(self.layers):
            x = layer(x, scale)
            if self.odd is not None and place == 0:
                x = self.odd(x).relu()
        return x.sum(-1)


def trained(model: nn.Module, x: torch.Tensor, **options: Any) -> tuple[Any, list[Any], compile_log.Record]:
    """Return a compiled model's result, its parameters' gradients, and what was compiled."""
    torch._dynamo.reset()
    mine = copy.deepcopy(model).to("jax")
    with compile_log.recording() as found:
        result = torch.compile(mine, backend="isthmus", options=options)(x.to("jax"))
        result.sum().backward()
    return result.detach().cpu(), [p.grad.cpu() for p in mine.parameters()], found


def stages_of(graph: Any) -> list[Stage]:
    """Return the stages that the one program of a graph was cut into."""
    (program,) = graph.programs
    (run,) = program.runs.values()
    return run.specialization.stages


@pytest.mark.skipif(platform() != "cpu", reason="only there are blocks compiled apart")
@pytest.mark.parametrize("odd", [False, True])
def test_layers_share_programs_and_give_the_same_results(odd: bool) -> None:
    torch.manual_seed(0)
    model, x = Deep(odd), torch.randn(2, 5, 3)
    whole, gradients, fused = trained(model, x, blocks="fuse")
    result, others, shared = trained(model, x)
    assert [len(stages_of(graph)) for graph in fused.graphs] == [0, 0]
    assert len(fused.compilations) == 2
    for graph in shared.graphs:
        keys = [stage.key for stage in stages_of(graph)]
        assert max(keys.count(key) for key in keys) >= DEPTH - 1
        assert len({*keys}) <= 5
    assert len(shared.compilations) == sum(len({s.key for s in stages_of(graph)}) for graph in shared.graphs)
    torch.testing.assert_close(result, whole)
    for got, want in zip(others, gradients, strict=True):
        torch.testing.assert_close(got, want)


def test_small_graphs_and_lists_of_like_calls_stay_whole() -> None:
    def lists(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x.sin() for x in xs] + [x.cos() for x in xs]

    torch._dynamo.reset()
    with compile_log.recording() as found:
        torch.compile(lists, backend="isthmus")([torch.randn(2, device="jax") for _ in range(40)])
    assert [stages_of(graph) for graph in found.graphs] == [[]]


def test_what_repeats_is_found() -> None:
    assert repeated_blocks.repeats([*range(100, 103), *([*range(20)] * 7), 5]) == (3, 20, 7)
    assert repeated_blocks.repeats([*range(100)]) is None
    assert repeated_blocks.repeats([*range(20)] * (repeated_blocks.COPIES - 1)) is None


def test_random_layers_stay_whole() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)) for _ in range(12)])
    x = torch.ones(3, 4)
    _, _, found = trained(model, x)
    assert all(stages_of(graph) == [] for graph in found.graphs)


@pytest.mark.parametrize(
    "model", [models.MLP, models.Transformer, models.DropoutMLP, models.VAE, models.SmallGPT]
)
def test_graphs_in_random_stages(model: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a graph is cut, results and gradients are those of one program."""
    chance, counts = random.Random(0), []

    def cut(graph: Graph) -> list[Stage]:
        calls = [n for n in graph.nodes if not isinstance(n.call, Item)]
        ends = sorted({0, len(calls), *[chance.randrange(len(calls)) for _ in range(4)]})
        pieces = [repeated_blocks._with_items(calls[a:b], graph) for a, b in itertools.pairwise(ends)]
        counts.append(len(pieces))
        return with_common_outputs(stages_from(graph, pieces))

    def results() -> list[torch.Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        mine = model().to("jax")
        batch = [part.to("jax") for part in model.batch(torch.Generator().manual_seed(0))]
        loss = torch.compile(mine, backend="isthmus")(*batch)
        loss.backward()
        return [loss.detach().cpu(), *[p.grad.cpu() for p in mine.parameters() if p.grad is not None]]

    whole = results()
    monkeypatch.setattr(specialization, "repeated_blocks", cut)
    torch.testing.assert_close(results(), whole)
    assert max(counts) > 2


def test_checks_of_stages_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index out of range in a later copy of a program, after one in range in the first."""

    def halves(graph: Graph) -> list[Stage]:
        calls = [n for n in graph.nodes if not isinstance(n.call, Item)]
        middle = len(calls) // 2
        return with_common_outputs(stages_from(graph, [calls[:middle], calls[middle:]]))

    monkeypatch.setattr(specialization, "repeated_blocks", halves)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, at: x.gather(0, at).sin().gather(0, at - 1), backend="isthmus")
    x = torch.arange(4.0, device="jax")
    at = torch.tensor([1, 2, 3])
    torch.testing.assert_close(compiled(x, at.to("jax")).cpu(), x.cpu().gather(0, at).sin().gather(0, at - 1))
    with pytest.raises(RuntimeError, match="out of bounds"):
        compiled(x, torch.tensor([0, 1, 2]).to("jax")).cpu()
    with pytest.raises(RuntimeError, match="out of bounds"):
        compiled(x, torch.tensor([1, 2, 4]).to("jax")).cpu()


class Weighted(nn.Module):
    """A weight of which much is computed, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, count: bool = False) -> torch.Tensor:
        if count:
            self.calls.add_(1)
        return x @ torch.linalg.inv(self.weight.exp() + torch.eye(4, device=x.device) * 9)


def test_frozen_parameters_are_computed_on_once() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Weighted().to("jax")
    x = torch.randn(3, 4, device="jax")
    with torch.no_grad(), compile_log.recording() as found:
        compiled = torch.compile(model, backend="isthmus", options={"freeze": True})
        want = model(x).cpu()
        torch.testing.assert_close(compiled(x).cpu(), want)
        first, second = stages_of(*found.graphs)
        assert torch.ops.aten.linalg_inv_ex.default in first.alone({}).ops
        assert torch.ops.aten.linalg_inv_ex.default not in second.alone({}).ops
        model.weight.zero_()  # a promise not to do this was given
        torch.testing.assert_close(compiled(x).cpu(), want)


def test_frozen_parameters_may_not_be_written() -> None:
    torch._dynamo.reset()
    model = Weighted().to("jax")
    compiled = torch.compile(model, backend="isthmus", options={"freeze": True})
    with (
        torch.no_grad(),
        pytest.raises(Exception, match="takes parameters and buffers for constants") as found,
    ):
        compiled(torch.randn(3, 4, device="jax"), count=True)
    assert isinstance(found.value.__cause__ or found.value, (ConfigError, RuntimeError))
