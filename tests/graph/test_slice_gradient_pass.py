"""Gradients of pieces that make up a tensor are joined; of others, added up as autograd has it."""

import pytest
import torch

import isthmus
from isthmus import metrics
from isthmus._dynamo import backend
from isthmus._lazy import programs

aten = torch.ops.aten
JOINED = {
    "selected": lambda x: x[0].sin() * x[1].cos() * x[2],
    "selected along another dim": lambda x: x[:, 1].sin() * x[:, 0].cos() * x[:, -1] * x[:, 2],
    "halves": lambda x: torch.cat([-x[..., 2:].sin(), x[..., :2].cos()], -1),
    "three slices": lambda x: x[..., :1].sin().sum() + x[..., 1:3].cos().sum() + x[..., 3:].exp().sum(),
    "a slice and one element": lambda x: x[:2].sin().sum() + x[2].cos().sum(),
}
ADDED = {
    "one is missing": lambda x: x[0].sin() * x[1].cos(),
    "one is taken twice": lambda x: x[0].sin() * x[1].cos() * x[2] + x[0].exp(),
    "overlapping": lambda x: x[..., :3].sin().sum() + x[..., 2:].cos().sum(),
    "of two dims": lambda x: x[0].sin().sum() + x[:, 1].cos().sum() + x[1:].exp().sum(),
    "with a step": lambda x: x[..., ::2].sin() * x[..., 1::2].cos(),
    "with all of it": lambda x: x[0].sin() * x[1].cos() * x[2] * x.exp().sum(),
}


@pytest.fixture
def targets(monkeypatch, fresh_dynamo):
    """Return what backward graphs call."""
    found = []
    split = backend._partition

    def watched(*args, **kwargs):
        forward, backward = split(*args, **kwargs)
        found.extend(node.target for node in backward.graph.nodes)
        return forward, backward

    monkeypatch.setattr(backend, "_partition", watched)
    return found


def check(function, size, **options):
    x = torch.randn(size, requires_grad=True)
    y = x.detach().to("jax").requires_grad_()
    function(x).sum().backward()
    torch.compile(function, backend="isthmus", **options)(y).sum().backward()
    torch.testing.assert_close(y.grad.cpu(), x.grad)


@pytest.mark.parametrize("name", JOINED)
def test_pieces_that_make_up_the_whole_are_joined(name, targets):
    check(JOINED[name], (3, 4, 4))
    assert aten.cat.default in targets
    assert not {aten.select_backward.default, aten.slice_backward.default} & {*targets}


@pytest.mark.parametrize("name", ADDED)
def test_others_are_added_up(name, targets):
    check(ADDED[name], (3, 4, 4))
    assert {aten.select_backward.default, aten.slice_backward.default} & {*targets}


@pytest.mark.usefixtures("fresh_dynamo")
def test_sizes_may_change():
    for name in ("halves", "selected"):
        check(JOINED[name], (3, 4, 4), dynamic=True)


@pytest.fixture
def ops(monkeypatch):
    """Return what programs of lazy mode call."""
    found = []

    class Noted(programs.CompiledProgram):
        def __init__(self, graph, *args, **kwargs):
            found.extend(graph.ops)
            super().__init__(graph, *args, **kwargs)

    monkeypatch.setattr(programs, "CompiledProgram", Noted)
    programs._families.clear()  # other tests may have run the same functions
    return found


def check_lazy(function, size):
    x = torch.randn(size, requires_grad=True)
    y = x.detach().to("jax").requires_grad_()
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    with isthmus.lazy():
        (found,) = torch.autograd.grad(function(y).sum(), y)
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("name", JOINED)
def test_pieces_are_joined_in_lazy_mode(name, ops):
    check_lazy(JOINED[name], (3, 4, 4))
    assert aten.cat.default in ops
    assert not {aten.select_backward.default, aten.slice_backward.default} & {*ops}


@pytest.mark.parametrize("name", ADDED)
def test_others_are_added_up_in_lazy_mode(name, ops):
    check_lazy(ADDED[name], (3, 4, 4))
    assert {aten.select_backward.default, aten.slice_backward.default} & {*ops}


def test_a_slice_that_moves_compiles_no_more_once_it_has_moved(ops):
    counts = []
    for start in (1, 2, 3, 1, 4, 2):

        def function(x, start=start):
            return x[:, start : start + 2].sin() * x[:, start].unsqueeze(1) + x[start].exp()[:2]

        check_lazy(function, (8, 8))
        counts.append(metrics.as_dict()["compilations"]["count"])
    assert counts[1] == counts[-1]  # the second start makes it a run-time number
