"""A recurrent network is one op for each layer and direction, with gradients of gradients; the rest is torch's."""

import contextlib
import copy

import jax
import numpy as np
import pytest
import torch
from torch import nn

import isthmus
from isthmus._device.kernels import recurrent
from isthmus._ops.linalg import matmul

KINDS = [nn.LSTM, nn.GRU, nn.RNN]


def pair(kind, *args, dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    model = kind(*args, **kwargs).to(dtype)
    return model, copy.deepcopy(model).to("jax")


def flat(results):
    """Return an output and its states as a list of tensors."""
    y, states = results
    return [y, *(states if isinstance(states, tuple) else (states,))]


def trained(model, x, *, run=None, states=None):
    """Return outputs, states and the gradients of all that has one."""
    x = x.clone().requires_grad_()
    results = flat((model if run is None else run)(x, states))
    sum(r.square().sum() for r in results).backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    return [t.detach().cpu() for t in [*results, *gradients]]


def assert_alike(found, want, **tolerances):
    assert len(found) == len(want)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, check_stride=False, **tolerances)


@pytest.fixture
def layers(monkeypatch):
    """Return kind and direction of the layers that were run as one op."""
    seen = []
    theirs = recurrent.LAYER

    def layer(*args):
        seen.append(args[3:])
        return theirs(*args)

    monkeypatch.setattr(recurrent, "LAYER", layer)
    return seen


@pytest.mark.parametrize(
    ("kind", "kwargs", "name"),
    [
        (nn.LSTM, {}, "lstm"),
        (nn.LSTM, {"bias": False}, "lstm"),
        (nn.GRU, {}, "gru"),
        (nn.GRU, {"bias": False, "batch_first": True}, "gru"),
        (nn.RNN, {}, "tanh"),
        (nn.RNN, {"nonlinearity": "relu", "bias": False}, "relu"),
    ],
    ids=["lstm", "lstm without bias", "gru", "gru without bias", "tanh", "relu"],
)
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_layer_is_one_op(layers, kind, kwargs, name, mode):
    model, ours = pair(kind, 3, 4, 2, bidirectional=True, **kwargs)
    x = torch.randn(5, 2, 3)
    want = trained(model, x)
    with isthmus.lazy() if mode == "lazy" else contextlib.nullcontext():
        found = trained(ours, x.to("jax"))
    assert_alike(found, want)
    assert layers == [(name, False), (name, True)] * 2


@pytest.mark.parametrize("kind", KINDS)
@torch._dynamo.config.patch(allow_rnn=True)
def test_in_compiled_and_jitted_functions(kind):
    x = torch.randn(5, 2, 3)
    model, ours = pair(kind, 3, 4)
    want = trained(model, x)
    compiled = torch.compile(ours, backend="isthmus", fullgraph=True)
    assert_alike(trained(ours, x.to("jax"), run=compiled), want)

    ours = copy.deepcopy(model).to("jax")
    step = isthmus.jit(lambda x: trained_on_device(ours, x))
    for _ in range(2):
        assert_alike(step(x.to("jax")), want[:1] + want[-len(list(model.parameters())) :])


def trained_on_device(model, x):
    results = flat(model(x))
    gradients = torch.autograd.grad(sum(r.square().sum() for r in results), list(model.parameters()))
    return [results[0].detach(), *gradients]


@pytest.mark.parametrize("kind", KINDS)
def test_in_jax_programs(kind):
    model, _ = pair(kind, 3, 4)
    x = torch.randn(5, 2, 3)
    y, _ = model(x)
    y.square().sum().backward()
    params, apply = isthmus.functional(model)

    def loss(params, x):
        return (apply(params, x)[0] ** 2).sum()

    gradients = jax.jit(jax.grad(loss))(params, x.numpy())
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "kwargs"), [(nn.LSTM, {"proj_size": 2}), (nn.LSTM, {}), (nn.GRU, {}), (nn.RNN, {})]
)
def test_what_does_not_fit_is_taken_apart(layers, kind, kwargs):
    model, ours = pair(kind, 3, 4, **kwargs)
    lengths = torch.tensor([5, 3])
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 3), lengths)
    assert_alike([ours(packed.to("jax"))[0].data], [model(packed)[0].data])
    if kwargs:
        x = torch.randn(5, 2, 3)
        assert_alike(trained(ours, x.to("jax")), trained(model, x))
    assert layers == []


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_torchs(layers, kind):
    model, ours = pair(kind, 3, 4)
    for shape in ((5, 2, 4), (5,), (5, 2, 3, 1)):
        with pytest.raises((RuntimeError, ValueError)) as want:
            model(torch.randn(shape))
        with pytest.raises(want.type) as found:
            ours(torch.randn(shape, device="jax"))
        assert str(found.value) == str(want.value)
    assert layers == []


@pytest.mark.parametrize("kind", KINDS)
def test_unbatched_input_and_given_states(kind):
    model, ours = pair(kind, 3, 4)
    x, h, c = torch.randn(5, 3), torch.randn(1, 4), torch.randn(1, 4)
    states = (h, c) if kind is nn.LSTM else h
    moved = tuple(s.to("jax") for s in states) if kind is nn.LSTM else h.to("jax")
    assert_alike(trained(ours, x.to("jax"), states=moved), trained(model, x, states=states))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients(kind):
    def second(model, x):
        y, _ = model(x)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *model.parameters()], allow_unused=True)

    model, ours = pair(kind, 3, 4, 2, bidirectional=True, dtype=torch.float64)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    found = second(ours, x.to("jax").requires_grad_())
    want = second(model, x.requires_grad_())
    for a, b in zip(found, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a.cpu(), b)


@pytest.mark.parametrize("kind", KINDS)
def test_under_function_transforms(kind):
    model, ours = pair(kind, 3, 4)
    x, tangent = torch.randn(5, 2, 3), torch.randn(5, 2, 3)

    def results(model, x, tangent):
        call = lambda x: model(x)[0]  # noqa: E731
        gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, x)[0].sum())
        return [
            torch.func.jvp(call, (x,), (tangent,))[1],
            *gradients(dict(model.named_parameters())).values(),
        ]

    found, want = (
        results(ours, x.to("jax"), tangent.to("jax")),
        results(model.double(), x.double(), tangent.double()),
    )
    for a, b in zip(found, want, strict=True):
        assert torch.allclose(a.cpu().double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "name"), list(zip(KINDS, ["lstm", "gru", "tanh"], strict=True)), ids=["lstm", "gru", "tanh"]
)
def test_graphs_with_layers_run_on_the_cpu(kind, name):
    model, ours = pair(kind, 3, 4)
    x = torch.randn(5, 2, 3)
    with isthmus.lazy():
        y = ours(x.to("jax"))[0]
        assert "rnn_layer" in isthmus.graph_of(y).to_fx().code
    weights, states = list(model.parameters()), [torch.zeros(2, 4)] * (2 if kind is nn.LSTM else 1)
    y, _ = model(x)
    assert_alike(torch.ops.isthmus.rnn_layer(x, weights, states, name, False)[:1], [y])
    grads = [torch.ones_like(y), *map(torch.zeros_like, states)]
    found = torch.ops.isthmus.rnn_layer_backward(grads, x, weights, states, name, False)
    assert_alike(found[1 : 1 + len(weights)], torch.autograd.grad(y.sum(), weights))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_computes_in_half_precision(kind):
    model, ours = pair(kind, 3, 4)
    x = torch.randn(5, 2, 3)
    with torch.autocast("jax"):
        y, _ = ours(x.to("jax"))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())
    torch.testing.assert_close(y.float().cpu(), model(x)[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("kind", "kwargs", "dtype"),
    [
        (nn.LSTM, {}, torch.float32),
        (nn.LSTM, {"proj_size": 2}, torch.float32),
        (nn.GRU, {}, torch.float64),
        (nn.RNN, {}, torch.float32),
    ],
    ids=["lstm", "projection", "gru", "rnn"],
)
def test_dropout_between_layers_drops_in_training_alone(kind, kwargs, dtype):
    model, ours = pair(kind, 3, 8, 2, dropout=0.5, dtype=dtype, **kwargs)
    x = torch.randn(4, 2, 3, dtype=dtype)
    one, other = (ours(x.to("jax"))[0] for _ in range(2))
    assert not torch.equal(one, other)
    assert torch.allclose(ours.eval()(x.to("jax"))[0].cpu(), model.eval()(x)[0], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_types_as_accelerators_give_them(kind, dtype, monkeypatch):
    # They round what they store; the CPU keeps it wide.
    monkeypatch.setattr(matmul, "product_dtype", np.dtype)
    model, ours = pair(kind, 3, 4, 2, dtype=dtype)
    x = torch.randn(6, 2, 3).to(dtype)
    assert_alike(trained(ours, x.to("jax")), trained(model, x), rtol=0.02, atol=0.04)
