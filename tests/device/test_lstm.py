"""An LSTM is one op for each layer and direction, with gradients of gradients; what does not fit is torch's own."""

import copy

import pytest
import torch
from torch import nn

import isthmus
from isthmus._device.kernels import lstm


def pair(*args, dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    model = nn.LSTM(*args, **kwargs).to(dtype)
    return model, copy.deepcopy(model).to("jax")


@pytest.fixture
def layers(monkeypatch):
    """Return the layers that were run as one op."""
    seen = []
    theirs = lstm._LAYER
    torch.zeros(1, device="jax")  # loads the lowerings
    assert all(map(lstm._is_served, lstm._DTYPES))  # asked of the real op, and remembered

    def layer(*args):
        seen.append(args[7])
        return theirs(*args)

    monkeypatch.setattr(lstm, "_LAYER", layer)
    return seen


def test_a_layer_is_one_op(layers):
    model, ours = pair(3, 4, 2, bidirectional=True)
    x = torch.randn(5, 2, 3)
    with isthmus.lazy():
        found = ours(x.to("jax"))[0].cpu()
    assert torch.allclose(found, model(x)[0], atol=1e-5)
    assert layers == [False, True, False, True]


@pytest.mark.parametrize(
    ("kwargs", "dtype"),
    [({"proj_size": 2}, torch.float32), ({}, torch.float64)],
    ids=["projection", "double"],
)
def test_what_does_not_fit_is_taken_apart(layers, kwargs, dtype):
    model, ours = pair(3, 4, dtype=dtype, **kwargs)
    x = torch.randn(5, 2, 3, dtype=dtype)
    assert torch.allclose(ours(x.to("jax"))[0].cpu(), model(x)[0], atol=1e-5)
    assert layers == []


def test_unbatched_input_and_given_states():
    model, ours = pair(3, 4)
    x, h, c = torch.randn(5, 3), torch.randn(1, 4), torch.randn(1, 4)
    found, want = ours(x.to("jax"), (h.to("jax"), c.to("jax"))), model(x, (h, c))
    for a, b in zip([found[0], *found[1]], [want[0], *want[1]], strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a.cpu(), b, atol=1e-5)


def test_gradients_of_gradients():
    def second(model, x):
        y, _ = model(x)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *model.parameters()])

    model, ours = pair(3, 4, 2, bidirectional=True)
    x = torch.randn(5, 2, 3)
    found = second(ours, x.to("jax").requires_grad_())
    want = second(model.double(), x.double().requires_grad_())
    for a, b in zip(found, want, strict=True):
        assert torch.allclose(a.cpu().double(), b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "dtype"),
    [({}, torch.float32), ({"proj_size": 2}, torch.float32), ({}, torch.float64)],
    ids=["layers", "projection", "double"],
)
def test_dropout_between_layers_drops_in_training_alone(kwargs, dtype):
    model, ours = pair(3, 8, 2, dropout=0.5, dtype=dtype, **kwargs)
    x = torch.randn(4, 2, 3, dtype=dtype)
    one, other = (ours(x.to("jax"))[0] for _ in range(2))
    assert not torch.equal(one, other)
    assert torch.allclose(ours.eval()(x.to("jax"))[0].cpu(), model.eval()(x)[0], atol=1e-5)
