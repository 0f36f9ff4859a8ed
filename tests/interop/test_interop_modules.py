"""Flax and Equinox modules in torch: names, gradients, state, randomness and the way back."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

import isthmus
from isthmus.errors import IsthmusError
from tests.interpreters import forked


class LinenNet(linen.Module):
    rate: float = 0.0

    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = linen.BatchNorm(use_running_average=not train)(jnp.tanh(linen.Dense(4)(x)))
        return linen.Dense(2)(linen.Dropout(self.rate, deterministic=not train)(x))


class NnxNet(nnx.Module):
    def __init__(self, rate: float, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        first, last = self.layers
        return last(self.drop(self.norm(jnp.tanh(first(x)))))


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout

    def __init__(self, rate: float, key: Any) -> None:
        self.first, self.last = (eqx.nn.Linear(*io, key=key) for io in ((3, 4), (4, 2)))
        self.norm, self.drop = eqx.nn.BatchNorm(4, "batch", mode="batch"), eqx.nn.Dropout(rate)

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        x, state = self.norm(jnp.tanh(self.first(x)), state)
        return self.last(self.drop(x, key=key)), state


def batched(model: EquinoxNet, x: Any, state: Any, key: Any) -> Any:
    keys = None if key is None else jax.random.split(key, len(x))
    over = jax.vmap(
        model, in_axes=(0, None, None if key is None else 0), out_axes=(0, None), axis_name="batch"
    )
    return over(x, state, keys)


def of_linen(rate: float, seed: int) -> Any:
    variables = LinenNet().init(jax.random.key(seed), jnp.ones((1, 3)), train=False)
    return isthmus.jax_module(LinenNet(rate), variables, train_arg="train")


def of_nnx(rate: float, seed: int) -> Any:
    return isthmus.jax_module(NnxNet(rate, nnx.Rngs(seed)))


def of_equinox(rate: float, seed: int) -> Any:
    model, state = eqx.nn.make_with_state(EquinoxNet)(rate, jax.random.key(seed))
    return isthmus.jax_module(model, state, method=batched)


MAKERS = {"linen": of_linen, "nnx": of_nnx, "equinox": of_equinox}
libraries = pytest.mark.parametrize("library", MAKERS)


def make(library: str, rate: float = 0.0, seed: int = 0) -> Any:
    return MAKERS[library](rate, seed)


def inputs(seed: int = 5) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(seed)).to("jax")


NAMES = {
    "linen": (
        {"Dense_0.kernel", "Dense_0.bias", "Dense_1.kernel", "Dense_1.bias"}
        | {"BatchNorm_0.scale", "BatchNorm_0.bias"},
        {"BatchNorm_0.mean", "BatchNorm_0.var"},
    ),
    "nnx": (
        {"layers.0.kernel", "layers.0.bias", "layers.1.kernel", "layers.1.bias", "norm.scale", "norm.bias"},
        {"norm.mean", "norm.var"},
    ),
    "equinox": (
        {"first.weight", "first.bias", "last.weight", "last.bias", "norm.weight", "norm.bias"},
        {"norm.batch_counter", "norm.batch_state_index.0", "norm.batch_state_index.1"},
    ),
}


@libraries
def test_names_are_those_of_torch(library: str) -> None:
    net = make(library)
    parameters, buffers = NAMES[library]
    assert {name for name, _ in net.named_parameters()} == parameters
    assert {name for name, _ in net.named_buffers()} == buffers
    assert set(net.state_dict()) == parameters | buffers
    assert {t.device.type for t in net.state_dict().values()} == {"jax"}
    assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in net.parameters())
    assert "(4,)" in repr(net)


def in_jax(library: str, jax_side: Any, x: Any) -> tuple[Any, Any, list[Any]]:
    """Return the loss in train mode, its gradients and the new state, by the library and JAX alone."""
    if library == "linen":

        def loss(params: Any) -> Any:
            variables = {**jax_side, "params": params}
            out, new = LinenNet().apply(variables, x, train=True, mutable=["batch_stats"])
            return (out**2).sum(), new

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(jax_side["params"])
        return value, gradients, jax.tree.leaves(new)
    if library == "nnx":
        jax_side.train()
        value, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).sum())(jax_side)
        return value, gradients, jax.tree.leaves(nnx.state(jax_side, nnx.BatchStat))
    model, state = jax_side

    def of(model: Any) -> Any:
        out, new = batched(model, x, state, jax.random.key(0))
        return (out**2).sum(), new

    (value, new), gradients = eqx.filter_value_and_grad(of, has_aux=True)(model)
    return value, gradients, jax.tree.leaves(new)


def close(found: Any, want: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(found.detach().cpu()), np.asarray(want), rtol=rtol, atol=atol)


@libraries
def test_values_gradients_and_state_are_those_of_jax(library: str) -> None:
    net, x = make(library), inputs()
    value, gradients, state = in_jax(library, net.to_jax(), isthmus.to_jax(x))
    loss = net(x).square().sum()
    loss.backward()
    close(loss, value)
    wanted = jax.tree.leaves(gradients)
    assert len(wanted) == len(list(net.parameters())) == 6
    for parameter, want in zip(net.parameters(), wanted, strict=True):
        close(parameter.grad, want)
    for buffer, want in zip(net.buffers(), state, strict=True):
        close(buffer, want)


@libraries
def test_eval_mode_uses_the_state_and_leaves_it(library: str) -> None:
    net, x = make(library, rate=0.5), inputs()
    net(x)
    before, generator = {k: v.clone() for k, v in net.state_dict().items()}, torch.jax.get_rng_state()
    net.eval()
    a, b = net(x), net(x[:3])
    torch.testing.assert_close(a[:3], b)  # of the running statistics, not of the batch
    assert torch.equal(torch.jax.get_rng_state(), generator)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


@libraries
def test_dropout_follows_torchs_generator(library: str) -> None:
    net, x = make(library, rate=0.5), inputs()
    torch.manual_seed(1)
    first, second = net(x), net(x)
    torch.manual_seed(1)
    assert torch.equal(net(x), first)
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    assert not torch.equal(net(x), first)


@libraries
def test_a_checkpoint_of_torch_and_a_copy(library: str) -> None:
    net, other, x = make(library), make(library, seed=1), inputs()
    net(x)
    assert not torch.allclose(net.eval()(x), other.eval()(x))
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    torch.testing.assert_close(net(x), other(x), rtol=0, atol=0)

    twin = copy.deepcopy(net).train()
    before = net(x)
    twin(x).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    torch.testing.assert_close(net(x), before, rtol=0, atol=0)
    assert not torch.allclose(twin.eval()(x), before)
    assert all(p.grad is None for p in net.parameters())


def back_in_jax(library: str, jax_side: Any, x: Any) -> Any:
    if library == "linen":
        return LinenNet().apply(jax_side, x, train=False)
    if library == "nnx":
        jax_side.eval()
        return jax_side(x)
    model, state = jax_side
    return batched(eqx.nn.inference_mode(model), x, state, None)[0]


@libraries
def test_a_jax_program_goes_on_with_what_torch_trained(library: str) -> None:
    net, x = make(library), inputs()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
    there = net.to_jax()
    want = net.eval()(x)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()  # JAX's arrays are not torch's to change
    close(want, back_in_jax(library, there, isthmus.to_jax(x)))


@libraries
def test_bfloat16(library: str) -> None:
    net, x = make(library).to(torch.bfloat16), inputs().to(torch.bfloat16)
    floating = [t for t in net.state_dict().values() if t.is_floating_point()]
    assert {t.dtype for t in floating} == {torch.bfloat16}
    out = net(x)
    out.float().sum().backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in net.buffers() if b.is_floating_point()} == {torch.bfloat16}
    assert torch.isfinite(out).all().item()


def losses(library: str, run: Callable[..., Any]) -> list[float]:
    torch.manual_seed(0)
    net, x = make(library, rate=0.5), inputs()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    step = run(net, optimizer)
    found = [step(x).item() for _ in range(3)]
    return [*found, *[b.double().sum().item() for b in net.buffers()]]


def step_of(call: Any, optimizer: Any) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def lazily(net: Any, optimizer: Any) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        with isthmus.lazy():
            return step_of(net, optimizer)(x)

    return step


MODES = {
    "lazy": lazily,
    "jit": lambda net, optimizer: isthmus.jit(step_of(net, optimizer)),
    "compile": lambda net, optimizer: step_of(
        torch.compile(net, backend="isthmus", fullgraph=True), optimizer
    ),
}


eager_losses = functools.cache(lambda library: losses(library, step_of))


# What a mode does depends little on the library, so one has them all.
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=[pytest.mark.slow] * (name != "linen")) for name in MAKERS]
)
def test_every_mode_trains_it_alike(library: str, mode: str) -> None:
    # Dropout too: a key drawn at run time, not one that was compiled in.
    want = eager_losses(library)
    assert len(set(want[:3])) == 3
    torch.testing.assert_close(losses(library, MODES[mode]), want, rtol=1e-5, atol=1e-6)


def test_a_layer_in_a_torch_model() -> None:
    layer = linen.Dense(2)
    inner = isthmus.jax_module(layer, layer.init(jax.random.key(0), jnp.ones((1, 4))))
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), inner).to("jax")
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.bias", "2.kernel"]
    like = torch.nn.Linear(4, 2).to("jax")
    with torch.no_grad():
        like.weight.copy_(inner.kernel.t())
        like.bias.copy_(inner.bias)
    x = inputs()
    torch.testing.assert_close(model(x), like(model[:2](x)))
    inner.kernel.requires_grad_(False)
    model(x).sum().backward()
    assert inner.kernel.grad is None
    assert inner.bias.grad.tolist() == [6, 6]
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert torch.func.functional_call(model, zeros, (x,)).abs().sum().item() == 0


def test_torch_export_and_the_cpu() -> None:
    net, x = make("linen").eval(), inputs()
    want = net(x)
    torch.testing.assert_close(torch.export.export(net, (x,)).module()(x), want)
    torch.testing.assert_close(make("linen").eval().cpu()(x.cpu()), want.cpu())


def test_token_ids_are_integers_of_jax() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, ids: Any) -> Any:
            positions = jnp.sin(jnp.arange(ids.shape[-1]) / 7.0)  # float64 where JAX's 64-bit types are on
            return linen.Embed(10, 4)(ids) + positions[:, None]

    ids = torch.tensor([[1, 2, 9]]).to("jax")
    variables = Net().init(jax.random.key(0), isthmus.to_jax(ids))
    net = isthmus.jax_module(Net(), variables)
    found = net(ids)
    assert found.dtype == torch.float32
    close(found, Net().apply(variables, isthmus.to_jax(ids)))
    assert net.double()(ids).dtype == torch.float64


def test_a_call_keeps_for_backward_the_state_it_had() -> None:
    class Scaled(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            scale = self.variable("state", "scale", lambda: jnp.full((1,), 2.0))
            weight = self.param("weight", linen.initializers.ones, (1,))
            found = weight**2 * x * scale.value
            if not self.is_initializing():
                scale.value = scale.value * 10
            return found

    x = torch.ones(1, device="jax")
    net = isthmus.jax_module(Scaled(), Scaled().init(jax.random.key(0), jnp.ones(1)))
    first, second = net(x), net(x)
    for out, scale in ((first, 2.0), (second, 20.0)):
        (gradient,) = torch.autograd.grad(out.sum(), net.weight, create_graph=True)
        (again,) = torch.autograd.grad(gradient.sum(), net.weight)
        assert (gradient.item(), again.item()) == (2 * scale, 2 * scale)
    assert net.scale.item() == 200


def test_methods_and_arguments_by_name() -> None:
    class Net(linen.Module):
        def setup(self) -> None:
            self.inner = linen.Dense(2)

        def __call__(self, x: Any, deterministic: bool) -> Any:
            return self.inner(x) * (1 if deterministic else 2)

        def twice(self, x: Any) -> Any:
            return 2 * self.inner(x)

    x = inputs()
    variables = Net().init(jax.random.key(0), isthmus.to_jax(x), deterministic=True)
    net = isthmus.jax_module(Net(), variables, eval_arg="deterministic")
    trained, evaluated = net(x), net.eval()(x)
    torch.testing.assert_close(trained, 2 * evaluated)
    torch.testing.assert_close(net(x, deterministic=False), trained)
    for method in ("twice", Net.twice, lambda net, x: net.twice(x)):
        torch.testing.assert_close(isthmus.jax_module(Net(), variables, method=method)(x), trained)
    model = isthmus.jax_module(
        NnxNet(0.0, nnx.Rngs(0)), method=lambda m, x: {"first": m.layers[0](x), "x": x}
    )
    assert model(x)["first"].shape == (6, 4)


def test_names_torch_has_taken_get_an_underscore() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(2, name="type")(x) + self.param("forward", linen.initializers.ones, (2,))

    x = inputs()
    variables = Net().init(jax.random.key(0), isthmus.to_jax(x))
    net = isthmus.jax_module(Net(), variables)
    assert set(net.state_dict()) == {"forward_", "type_.bias", "type_.kernel"}
    close(net(x), Net().apply(variables, isthmus.to_jax(x)))
    assert jax.tree.structure(net.to_jax()) == jax.tree.structure(variables)


class Noise(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rngs = rngs

    def __call__(self, x: Any) -> Any:
        return x + jax.random.normal(self.rngs.noise(), x.shape)


def test_random_numbers_in_eval_mode_are_asked_for() -> None:
    x = inputs()
    with pytest.raises(IsthmusError, match="random_in_eval"):
        isthmus.jax_module(Noise(nnx.Rngs(noise=0))).eval()(x)
    net = isthmus.jax_module(Noise(nnx.Rngs(noise=0)), random_in_eval=True).eval()
    torch.manual_seed(0)
    first = net(x)
    assert not torch.equal(first, net(x))
    torch.manual_seed(0)
    assert torch.equal(first, net(x))


class Count(nnx.Module):
    def __init__(self) -> None:
        self.seen = nnx.Variable(jnp.zeros(2))
        self.weight = nnx.Param(jnp.ones(2))

    def __call__(self, x: Any, what: str) -> Any:
        if what == "reshape":
            self.seen.set_value(jnp.zeros(1))
        if what == "weight":
            self.weight.set_value(self.weight.get_value() * 2)
        return x


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: isthmus.jax_module(linen.Dense), TypeError, "not the class Dense"),
        (lambda: isthmus.jax_module(torch.nn.Linear(1, 1)), TypeError, "not Linear"),
        (lambda: isthmus.jax_module(linen.Dense(1)), IsthmusError, "module.init"),
        (
            lambda: isthmus.jax_module(linen.Dense(1), {"kernel": jnp.ones((1, 1))}),
            IsthmusError,
            "module.init",
        ),
        (lambda: isthmus.jax_module(Noise(nnx.Rngs(0)), {}), IsthmusError, "pass the module alone"),
        (lambda: isthmus.jax_module(eqx.nn.Identity(), {}), IsthmusError, "make_with_state"),
        (lambda: isthmus.jax_module(Count())(inputs(), "reshape"), IsthmusError, "shape of seen from"),
        (
            lambda: isthmus.jax_module(Count())(inputs(), "weight"),
            IsthmusError,
            "the parameter weight",
        ),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_neither_library_is_needed() -> None:
    code = """
import sys
for name in ("flax", "equinox", "optax", "orbax"):
    sys.modules[name] = None  # importing it fails
import isthmus, torch
isthmus.jax_function
try:
    isthmus.jax_module(torch.nn.Linear(1, 1))
except TypeError as error:
    print(error)
"""
    ran = forked(code)
    assert ran.returncode == 0, ran.stderr
    assert "takes a module of flax.linen, flax.nnx or equinox" in ran.stdout
