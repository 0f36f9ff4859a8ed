"""Every pass in every mode it claims: it changes a graph of that mode, and the values stay those of CPU torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import isthmus
from isthmus._graph.passes import CUTS, PASSES
from isthmus._lazy import programs, recompile_warnings
from isthmus._lazy.recompile_warnings import RecompilationWarning
from isthmus._runtime.compiler import platform
from tests.lazy.helpers import setting


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


def attention_masks(x: torch.Tensor) -> torch.Tensor:
    """Attention under a mask made of numbers alone, as transformers makes it."""
    q, at = x[None, None], torch.arange(x.shape[0], device=x.device)
    mask = (at[None, :] <= at[:, None])[None, None].expand(1, 1, -1, -1)
    return F.scaled_dot_product_attention(q, q.sin(), q.cos(), attn_mask=mask).square().sum()


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    function.__name__: function
    for function in (attention_masks, cross_entropy, slice_gradients, fold_views, fold_constants)
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


def repeated_blocks(device: str) -> torch.Tensor:
    """Eight layers of sixteen calls each."""

    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            before = x
            for _ in range(5):
                x = torch.tanh(x @ x.t()).softmax(-1)
            x = x + before
        return x

    x = torch.linspace(-1, 1, 16).view(4, 4).to(device)
    return torch.compile(layers, backend="isthmus")(x) if device == "jax" else layers(x)


def freeze(device: str) -> torch.Tensor:
    """A weight whose inverse is needed at every call."""

    class Solve(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4) * 2 + 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.linalg.inv(self.weight.exp())

    model, x = Solve().to(device), torch.arange(8.0).view(2, 4).to(device)
    if device == "jax":
        model = torch.compile(model, backend="isthmus", options={"freeze": True})  # type: ignore[assignment]
    with torch.no_grad():
        return model(x) + model(x)


def split(device: str) -> torch.Tensor:
    """A list that grows by an element a round, beside much that does not."""

    def rounds() -> torch.Tensor:
        x, grown = torch.linspace(0, 1, 4).to(device), torch.ones(1).to(device)
        for _ in range(recompile_warnings._IN_A_ROW + 3):
            shown = x.exp().cos().tanh().sin().neg().abs() * grown.sum()
            grown = torch.cat([grown, shown[:1]])
            isthmus.sync()
        return grown

    if device == "cpu":
        return rounds()
    with setting("shapes", "exact"), isthmus.lazy(), pytest.warns(RecompilationWarning):
        return rounds().cpu()


CUT_PROGRAMS = {function.__name__: function for function in (repeated_blocks, freeze, split)}


def test_every_pass_that_cuts_has_a_program() -> None:
    assert set(CUT_PROGRAMS) == set(CUTS)


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, modes in CUTS.items() for mode in modes])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_pass_cuts_graphs_of_its_modes(name: str, mode: str, changes: Any) -> None:
    if name == "repeated_blocks" and platform() != "cpu":
        pytest.skip("blocks are compiled apart on the CPU alone")
    recompile_warnings.forget()  # lines that other tests were warned about
    programs._families.clear()
    function = CUT_PROGRAMS[name]
    torch.testing.assert_close(function("jax").cpu(), function("cpu"))
    assert (mode, name) in changes()


MASKS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "causal": (lambda at: at[None, :] <= at[:, None], True),
    "all": (lambda at: at[None, :] >= 0, True),
    "window": (lambda at: (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 2), False),
    "strictly causal": (lambda at: at[None, :] < at[:, None], False),
    "all but one": (lambda at: at[None, :] > 0, False),
    "numbers": (lambda at: (at[None, :] <= at[:, None]).float(), False),
    "causal in numbers": (lambda at: torch.where(at[None, :] <= at[:, None], 0.0, -torch.inf), True),
    "nearly causal in numbers": (lambda at: torch.where(at[None, :] <= at[:, None], 0.0, -9.0), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_only_known_masks_are_left_out(name: str, changes: Any) -> None:
    make, known = MASKS[name]

    def attend(x: torch.Tensor) -> torch.Tensor:
        mask = make(torch.arange(4, device=x.device))
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask.expand(4, 4))

    x = torch.randn(1, 2, 4, 8)
    found = torch.compile(attend, backend="isthmus")(x.to("jax"))
    assert torch.allclose(found.cpu(), attend(x), atol=1e-5)
    assert (("compile", "attention_masks") in changes()) == known


def test_a_mask_that_is_an_input_is_kept(changes: Any) -> None:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    x = torch.randn(1, 2, 4, 8)
    compiled = torch.compile(F.scaled_dot_product_attention, backend="isthmus")
    found = compiled(*[x.to("jax")] * 3, mask.to("jax"))
    assert torch.allclose(found.cpu(), F.scaled_dot_product_attention(x, x, x, mask), atol=1e-5)
    assert not any(name == "attention_masks" for _, name in changes())


def test_a_mask_whose_gradient_is_asked_for_is_kept() -> None:
    def gradients(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        at = torch.arange(4, device=x.device)
        mask = torch.where(at[None, :] <= at[:, None], 0.0, -torch.inf).requires_grad_()
        out = F.scaled_dot_product_attention(x, x.sin(), x.cos(), attn_mask=mask)
        return torch.autograd.grad(out.square().sum(), [x, mask])

    x = torch.randn(1, 2, 4, 8)
    expected = gradients(x.clone().requires_grad_())
    with isthmus.lazy():
        found = [grad.cpu() for grad in gradients(x.to("jax").requires_grad_())]
    torch.testing.assert_close(tuple(found), expected)


def test_the_table_of_passes_is_true() -> None:
    """ARCHITECTURE.md: a cell begins with "yes" where the pass serves the mode, and only there."""
    text = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.split("## The passes")[1].split("\n\n")[1].splitlines()]
    columns = {"lazy": 1, "compile": 2, "joint": 3, "export": 4}
    said = {
        row[0].strip().split("]")[0].lstrip("["): {
            m for m, at in columns.items() if row[at].strip().startswith("yes")
        }
        for row in rows[2:]
    }
    assert said == {each.name: set(each.modes) for each in PASSES} | {
        name: set(m) for name, m in CUTS.items()
    }
