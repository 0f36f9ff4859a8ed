"""Modules as pure functions of their parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import isthmus
from isthmus.errors import IsthmusError


def mlp(device: str = "jax") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).to(device)


X = torch.linspace(-1, 1, 20).reshape(5, 4)


@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_it_computes_what_the_module_computes(device: str) -> None:
    model = mlp(device)
    params, apply = isthmus.functional(model)
    assert params.keys() == dict(model.named_parameters()).keys()
    want = mlp("cpu")(X).detach().numpy()
    np.testing.assert_allclose(apply(params, X), want, rtol=1e-5, atol=1e-6)
    for call in (apply, jax.jit(apply)):
        np.testing.assert_allclose(call(params, jnp.asarray(X.numpy())), want, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter is dict(model.named_parameters())[name]  # the module has its own again
        assert parameter.requires_grad


def test_gradients_are_those_of_torch() -> None:
    model = mlp("cpu")
    params, apply = isthmus.functional(model)
    found = jax.jit(jax.grad(lambda p, x: (apply(p, x) ** 2).mean()))(params, jnp.asarray(X.numpy()))
    model(X).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(found[name], parameter.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_per_sample_gradients() -> None:
    model = mlp("cpu")
    params, apply = isthmus.functional(model)
    gradient = jax.grad(lambda p, x: (apply(p, x) ** 2).sum())
    found = jax.jit(jax.vmap(gradient, in_axes=(None, 0)))(params, jnp.asarray(X.numpy()))
    for n, x in enumerate(X):
        model.zero_grad()
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            np.testing.assert_allclose(found[name][n], parameter.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_an_ensemble_is_a_vmap_over_parameters() -> None:
    params, apply = isthmus.functional(mlp())
    many = jax.tree.map(lambda p: jnp.stack([p, 2 * p, -p]), params)
    x = jnp.asarray(X.numpy())
    found = jax.vmap(apply, in_axes=(0, None))(many, x)
    for n, scale in enumerate((1, 2, -1)):
        one = jax.tree.map(lambda p, scale=scale: scale * p, params)
        np.testing.assert_allclose(found[n], apply(one, x), rtol=1e-5, atol=1e-6)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = self.seen + len(x)  # replaced, not written to
        return self.last(self.norm(x))


def test_buffers_are_a_state() -> None:
    torch.manual_seed(0)
    model = Normalized()
    params, apply = isthmus.functional(model)
    before = {name: b.clone() for name, b in model.named_buffers()}
    state, x = apply.state, jnp.asarray(X.numpy())
    assert state["seen"].dtype == jnp.int32  # JAX's 64-bit types are off
    step = jax.jit(lambda p, s, x: apply(p, x, state=s, train=True))
    for _ in range(3):
        found, state = step(params, state, x)
    for name, b in model.named_buffers():
        assert torch.equal(b, before[name])
    for _ in range(3):
        want = model.train()(X)
    np.testing.assert_allclose(found, want.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert state.keys() == dict(model.named_buffers()).keys()
    for name, b in model.named_buffers():
        np.testing.assert_allclose(state[name], b.numpy(), rtol=1e-5, err_msg=name)
    with pytest.raises(IsthmusError, match=r"writes to its buffers \(.*norm.running_mean.*state=state"):
        apply(params, x, train=True)
    model.eval()
    found, same = jax.jit(lambda p, s, x: apply(p, x, state=s, train=False))(params, state, x)
    np.testing.assert_allclose(found, model(X).detach().numpy(), rtol=1e-4, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, same, state)


def test_train_is_an_argument() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)).to("jax").eval()
    params, apply = isthmus.functional(model)
    x, key = jnp.ones((2, 4)), jax.random.key(0)
    np.testing.assert_array_equal(apply(params, x), apply(params, x, train=False))
    dropped = apply(params, x, train=True, rng=key)
    assert (np.asarray(dropped) == 0).mean() > 0.2
    assert not model.training
    assert not model[1].training
    with pytest.raises(IsthmusError, match="pass a key"):
        apply(params, x, train=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def test_tied_weights_stay_tied() -> None:
    torch.manual_seed(0)
    model = Tied()
    params, apply = isthmus.functional(model)
    assert list(params) == ["embedding.weight"]
    tokens = torch.tensor([[1, 5, 5], [0, 2, 6]])
    found = jax.jit(jax.grad(lambda p, t: (apply(p, t) ** 2).sum()))(
        params, jnp.asarray(tokens.numpy(), jnp.int32)
    )
    model(tokens).square().sum().backward()
    assert model.embedding.weight.grad is not None
    np.testing.assert_allclose(
        found["embedding.weight"], model.embedding.weight.grad.numpy(), rtol=1e-4, atol=1e-5
    )


def test_optax_trains_it_in_a_scan() -> None:
    params, apply = isthmus.functional(mlp())
    optimizer = optax.adam(1e-2)
    x, y = jnp.asarray(X.numpy()), jnp.ones((5, 3))

    def loss(params: Any) -> Any:
        return ((apply(params, x) - y) ** 2).mean()

    def step(carry: Any, _: Any) -> Any:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), value

    (_, _), losses = jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), None, length=60))(params)
    assert losses[-1] < 0.1 * losses[0]


def test_written_parameters_are_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Parameter(torch.zeros(1), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(1)
            return x + self.seen

    params, apply = isthmus.functional(Counting())
    with pytest.raises(IsthmusError, match=r"writes to its parameters \(seen\)"):
        apply(params, jnp.ones(2))


def test_threads_take_turns() -> None:
    model = mlp("cpu")
    params, apply = isthmus.functional(model)
    x = jnp.asarray(X.numpy())
    want = np.asarray(apply(params, x))
    with ThreadPoolExecutor(4) as pool:
        sizes = list(range(1, 6)) * 4
        found = list(pool.map(lambda n: jax.jit(lambda p, x: apply(p, x))(params, x[:n]), sizes))
    for n, one in zip(sizes, found, strict=True):
        np.testing.assert_allclose(one, want[:n], rtol=1e-5, atol=1e-6)
    assert all(isinstance(p, nn.Parameter) and p.device.type == "cpu" for p in model.parameters())


def test_recurrent_modules() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 6, batch_first=True)
    params, apply = isthmus.functional(model)
    found, (h, c) = jax.jit(apply)(params, jnp.asarray(X.numpy())[None])
    want, (wh, wc) = model(X[None])
    for a, b in ((found, want), (h, wh), (c, wc)):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_named() -> None:
    params, apply = isthmus.functional(mlp())
    with pytest.raises(IsthmusError, match=r"missing \['0.bias'\], not known \['bias'\]"):
        apply(
            {"bias": params["0.bias"], **{k: v for k, v in params.items() if k != "0.bias"}}, jnp.ones((1, 4))
        )
    with pytest.raises(IsthmusError, match=r"0.bias is \[3\], the module has \[8\]"):
        apply({**params, "0.bias": jnp.zeros(3)}, jnp.ones((1, 4)))
    with pytest.raises(TypeError, match="params is a list, not a dictionary"):
        apply(list(params.values()), jnp.ones((1, 4)))
    with pytest.raises(TypeError, match="name it in static_argnames"):
        jax.jit(apply)(params, jnp.ones((1, 4)), train=False)
    with pytest.raises(TypeError, match=r"rng is 0, not a key"):
        isthmus.torch_function(torch.rand_like)(jnp.ones(3), rng=0)
    with pytest.raises(IsthmusError, match="float64, and JAX's 64-bit types are off"):
        isthmus.functional(mlp().double())


def test_models_of_transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    model = GPT2LMHeadModel(config).eval()
    params, apply = isthmus.functional(model)
    tokens = torch.arange(12).reshape(2, 6)
    found = jax.jit(lambda p, t: apply(p, input_ids=t, labels=t, use_cache=False))(
        params, jnp.asarray(tokens.numpy(), jnp.int32)
    )
    want = model(input_ids=tokens, labels=tokens)
    np.testing.assert_allclose(found.loss, want.loss.item(), rtol=1e-5)
    np.testing.assert_allclose(found.logits, want.logits.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_weights_that_every_device_has_get_the_gradients_of_all_of_them() -> None:
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from torch import nn
import isthmus

params, apply = isthmus.functional(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
mesh = Mesh(np.array(jax.devices()), ("i",))
params = jax.device_put(params, NamedSharding(mesh, P()))
x = jnp.linspace(-1, 1, 12).reshape(4, 3)
split = jax.shard_map(apply, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
loss = lambda f: jax.jit(jax.grad(lambda params, x: (f(params, x) ** 2).sum(), argnums=(0, 1)))
assert len(jax.devices()) == 2
jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), loss(split)(params, x), loss(apply)(params, x)
)
"""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("x64", ["0", "1"])
def test_torchs_derivatives_of_operands_that_vary_differently(x64: str) -> None:
    """Ops with a derivative of torch's, of a replicated operand and one that is split over devices."""
    code = """
import jax, jax.numpy as jnp, numpy as np, torch
from jax.sharding import Mesh, PartitionSpec as P
import isthmus

mesh = Mesh(np.array(jax.devices()), ("i",))
weight, x = jnp.linspace(-1, 1, 4, dtype="float32")[None], jnp.arange(16, dtype="float32").reshape(4, 4) / 7 - 1
for function in (
    torch.hypot,
    lambda a, b: torch.cdist(a, b.expand(3, 4)),
    lambda a, b: torch.nn.functional.binary_cross_entropy_with_logits(b.expand_as(a), a.sigmoid(), reduction="none"),
):
    apply = isthmus.torch_function(function)
    split = jax.shard_map(
        lambda w, x: jax.lax.psum(apply(x, w).sum(), "i"), mesh=mesh, in_specs=(P(), P("i")), out_specs=P()
    )
    whole = lambda w, x: apply(x, w).sum()
    for a, b in zip(jax.grad(split, (0, 1))(weight, x), jax.grad(whole, (0, 1))(weight, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
"""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": x64}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
