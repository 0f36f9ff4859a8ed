"""Gradients of pieces that make up a tensor are joined; of others, added up as autograd has it."""

import pytest
import torch

from isthmus._dynamo import backend

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
