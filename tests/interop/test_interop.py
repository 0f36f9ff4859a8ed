"""torch and JAX in one program: the same arrays on both sides, and gradients across the border."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl

import isthmus
from isthmus._interop.functions import TracedCall
from isthmus.errors import IsthmusError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]


def pointer(array: Any) -> int:
    return array.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back_is_the_same_memory(dtype: torch.dtype) -> None:
    want = torch.arange(6).reshape(2, 3).to(dtype)
    x = want.to("jax")
    array = isthmus.to_jax(x)
    assert isinstance(array, jax.Array)
    again = isthmus.from_jax(array)
    assert pointer(isthmus.to_jax(again)) == pointer(array) == pointer(isthmus.to_jax(x))
    assert again.dtype == dtype
    assert torch.equal(again.cpu(), want)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("write", [lambda t: t.add_(1), lambda t: t[0].fill_(9), lambda t: t.t().mul_(2)])
def test_a_write_never_changes_what_the_other_side_holds(write: Any, lazy: bool) -> None:
    isthmus.set_mode("lazy" if lazy else "eager")
    try:
        mine = jnp.arange(6.0).reshape(2, 3)
        x = isthmus.from_jax(mine)
        held = isthmus.to_jax(x)
        write(x)
        assert not torch.equal(x.cpu(), torch.arange(6.0).reshape(2, 3))
        for array in (mine, held):
            np.testing.assert_array_equal(np.asarray(array), np.arange(6.0).reshape(2, 3))
    finally:
        isthmus.set_mode("eager")


VIEWS: list[Any] = [
    lambda t: t,
    lambda t: t[1:],
    lambda t: t.t(),
    lambda t: t.view(-1)[::2],
    lambda t: t[:, 1],
]
WRITES: list[Any] = [
    lambda t: t.add_(1),
    lambda t: t.mul_(t),
    lambda t: t.fill_(3),
    lambda t: t.copy_(t.flip(0)),
    lambda t: torch.add(t, 2, out=t),
    lambda t: t.index_fill_(0, torch.tensor([0], device="jax"), 7),
]
STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "hold", "adopt", "jit"]), st.integers(0, 4), st.integers(0, 5)),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(steps=STEPS)
def test_arrays_that_are_held_never_change(lazy: bool, steps: list[tuple[str, int, int]]) -> None:
    x, want = torch.arange(12.0).reshape(3, 4).to("jax"), torch.arange(12.0).reshape(3, 4)
    held: list[tuple[Any, Any]] = []
    isthmus.set_mode("lazy" if lazy else "eager")
    try:
        for kind, view, write in steps:
            if kind == "hold":
                array = isthmus.to_jax(VIEWS[view](x))
                held.append((array, np.array(array)))
            elif kind == "adopt":
                array = isthmus.to_jax(x)
                x = isthmus.from_jax(array)
                held.append((array, np.array(array)))
            else:
                change = WRITES[write]
                (isthmus.jit(change) if kind == "jit" else change)(VIEWS[view](x))
                _on_the_cpu(change, VIEWS[view](want))
        np.testing.assert_array_equal(x.cpu(), want)
        for array, before in held:
            np.testing.assert_array_equal(array, before)
    finally:
        isthmus.set_mode("eager")


def _on_the_cpu(change: Any, tensor: torch.Tensor) -> None:
    if change is WRITES[5]:
        tensor.index_fill_(0, torch.tensor([0]), 7)
    else:
        change(tensor)


def test_views_show_their_elements() -> None:
    x = torch.arange(12.0).reshape(3, 4).to("jax")
    for view in (x.t(), x[1:], x[:, ::2], x[1], x.flatten()[3:9], x.unfold(1, 2, 1)):
        np.testing.assert_array_equal(np.asarray(isthmus.to_jax(view)), view.cpu().numpy())


def test_trees() -> None:
    tree = {"a": [torch.ones(2).to("jax"), 3], "b": (torch.zeros(1), None)}
    there = isthmus.to_jax(tree)
    assert isinstance(there["a"][0], jax.Array)
    assert isinstance(there["b"][0], jax.Array)
    assert there["a"][1] == 3
    back = isthmus.from_jax(there)
    assert [t.device.type for t in (back["a"][0], back["b"][0])] == ["jax", "jax"]


def test_what_cannot_cross_says_so() -> None:
    with pytest.raises(TypeError, match="key_data"):
        isthmus.from_jax(jax.random.key(0))
    with pytest.raises(IsthmusError, match="meta"):
        isthmus.to_jax(torch.empty(2, device="meta"))


def test_arguments_that_cannot_be_told_apart() -> None:
    with pytest.raises(TypeError, match="an argument is a set, which is neither a tensor"):
        isthmus.jax_function(lambda x, s: x)(torch.ones(2), {1})


def f64(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    return (torch.rand(shape, dtype=torch.float64, generator=g) + 0.5).to("jax").requires_grad_()


def powers(d: dict[str, Any], k: float = 2.0) -> dict[str, Any]:
    return {"value": jnp.sin(d["a"]) * d["b"] ** k, "where": jnp.argmax(d["a"])}


def test_gradients_cross_the_border_twice() -> None:
    f = isthmus.jax_function(powers)
    a, b = f64(4), f64(4)
    for k in (2.0, 3.0):
        assert torch.autograd.gradcheck(lambda a, b, k=k: f({"a": a, "b": b}, k=k)["value"], (a, b))
        assert torch.autograd.gradgradcheck(lambda a, b, k=k: f({"a": a, "b": b}, k=k)["value"], (a, b))
    found = f({"a": a, "b": b})
    assert found["where"].dtype in (torch.int32, torch.int64)
    assert not found["where"].requires_grad
    assert found["where"].item() == a.argmax().item()


def test_only_what_wants_a_gradient_gets_one() -> None:
    f = isthmus.jax_function(lambda w, i, x: (w[i] * x).sum())
    w, i = torch.ones(3, 2).to("jax").requires_grad_(), torch.tensor([0, 2, 2]).to("jax")
    x = torch.full((2,), 3.0).to("jax")
    f(w, i, x).backward()
    assert w.grad is not None
    assert w.grad.tolist() == [[3, 3], [0, 0], [6, 6]]
    assert x.grad is None
    with torch.no_grad():
        assert not f(w, i, x).requires_grad


def test_a_custom_gradient_is_respected() -> None:
    @jax.custom_vjp
    def straight(x: Any) -> Any:
        return jnp.round(x)

    straight.defvjp(lambda x: (straight(x), None), lambda _, g: (g * 10,))
    x = torch.tensor([0.2, 1.7]).to("jax").requires_grad_()
    isthmus.jax_function(straight)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [10, 10]


def test_in_a_model_that_torch_trains() -> None:
    class Swish(torch.nn.Module):
        forward = staticmethod(isthmus.jax_function(jax.nn.silu))

    def losses(activation: torch.nn.Module) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), activation, torch.nn.Linear(5, 1)).to("jax")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 12).reshape(4, 3).to("jax")
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    torch.testing.assert_close(losses(Swish()), losses(torch.nn.SiLU()))


def test_it_is_compiled_once() -> None:
    traced = []

    def f(x: Any, n: int) -> Any:
        traced.append(n)
        return x * n

    g, x = isthmus.jax_function(f), torch.ones(3).to("jax")
    assert [g(x, 2).sum().item() for _ in range(3)] == [6, 6, 6]
    assert traced == [2]
    assert g(x, 3).sum().item() == 9
    assert g(x, True).sum().item() == 3
    assert len(traced) == 3


def modes() -> list[Any]:
    return [
        pytest.param(lambda f: f, id="eager"),
        pytest.param(lambda f: torch.compile(f, backend="isthmus", fullgraph=True), id="compiled"),
        pytest.param(isthmus.jit, id="jit"),
        pytest.param(in_lazy_mode, id="lazy"),
    ]


def in_lazy_mode(function: Any) -> Any:
    def run(*args: Any) -> Any:
        with isthmus.lazy():
            return function(*args)

    return run


@pytest.mark.parametrize("mode", modes())
def test_it_is_an_op_in_every_mode(mode: Any) -> None:
    f = isthmus.jax_function(powers)

    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return f({"a": x * 2, "b": w}, k=3.0)["value"] + 1

    x, w = f64(4), f64(4)
    for scale in (1.0, 2.0):
        given = (x.detach() * scale).requires_grad_()
        with torch.no_grad() if mode is isthmus.jit else contextlib.nullcontext():
            found = mode(forward)(given, w)
        want = torch.sin(given * 2) * w**3 + 1
        torch.testing.assert_close(found, want)
        if mode is not isthmus.jit:
            both = [torch.autograd.grad(y.square().sum(), (given, w)) for y in (found, want)]
            torch.testing.assert_close(*both)


def test_a_training_step_is_one_program_with_it_inside() -> None:
    f, w = isthmus.jax_function(jnp.tanh), torch.ones(3).to("jax").requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.5)

    @isthmus.jit
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = f(w * x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.tensor([0.1, 0.2, 0.3]).to("jax")
    mine = torch.ones(3)
    for _ in range(4):
        want = torch.tanh(mine * x.cpu()).sum()
        torch.testing.assert_close(step(x).cpu(), want)
        mine = mine - 0.5 * x.cpu() * (1 - torch.tanh(mine * x.cpu()) ** 2)
    torch.testing.assert_close(w.detach().cpu(), mine)


def test_a_graph_outlives_the_function_in_it() -> None:
    with isthmus.lazy():
        y = isthmus.jax_function(lambda x: x**2)(torch.ones(3, device="jax") * 2) + 1
        gc.collect()
        assert y.tolist() == [5, 5, 5]


def test_torch_export_holds_it_as_one_op() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return isthmus.jax_function(jnp.tanh)(x * 2)

    x = torch.linspace(-1, 1, 5)
    program = torch.export.export(Model(), (x,))
    gc.collect()
    assert [str(n.target) for n in program.graph.nodes].count("isthmus.jax.default") == 1
    torch.testing.assert_close(program.module()(x), torch.tanh(x * 2))


@pytest.mark.parametrize("dynamic", [True, False])
def test_other_sizes_are_other_graphs(dynamic: bool) -> None:
    f = isthmus.jax_function(lambda x: x - jnp.arange(x.shape[0]))
    compiled = torch.compile(lambda x: f(x) * 2, backend="isthmus", fullgraph=True, dynamic=dynamic)
    for size in (3, 5, 3):
        x = torch.ones(size).to("jax")
        torch.testing.assert_close(compiled(x).cpu(), (1 - torch.arange(size)) * 2.0)


def test_cpu_tensors_stay_there() -> None:
    x = torch.linspace(0, 1, 4, dtype=torch.float64).requires_grad_()
    y = isthmus.jax_function(jnp.tanh)(x)
    assert y.device.type == "cpu"
    assert torch.autograd.gradcheck(isthmus.jax_function(jnp.tanh), (x,))
    torch.testing.assert_close(y, torch.tanh(x))
    compiled = torch.compile(isthmus.jax_function(jnp.tanh), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.tanh(x))


def test_arrays_and_keys_are_arguments() -> None:
    traced = []

    def noise(x: Any, key: Any, scale: Any) -> Any:
        traced.append(1)
        return x + scale * jax.random.normal(key, x.shape)

    f, x = isthmus.jax_function(noise), torch.zeros(4).to("jax")
    for seed in (0, 1):
        key = jax.random.key(seed)
        found = f(x, key, np.float32([2, 2, 2, 2]))
        np.testing.assert_allclose(
            np.asarray(isthmus.to_jax(found)), 2 * jax.random.normal(key, (4,)), rtol=1e-6
        )
    assert traced == [1]


def test_without_tensors_the_result_is_on_jax() -> None:
    assert isthmus.jax_function(lambda n: jnp.arange(n))(4).tolist() == [0, 1, 2, 3]


def test_what_the_gradient_needs_is_kept_once() -> None:
    forward = TracedCall(jnp.tanh).forward_with_residuals((0,), [torch.ones(3)])
    assert len(forward.function.results) == 1 + len([s for s in forward.sources if s > 1])
    both = TracedCall(lambda x, y: x * y).forward_with_residuals((0, 1), [torch.ones(3), torch.ones(3)])
    assert sorted(both.sources) == [0, 1]
    assert len(both.function.results) == 1


def test_a_pallas_kernel() -> None:
    def kernel(x: Any, y: Any, out: Any) -> None:
        out[...] = x[...] * y[...] + 1

    def call(x: Any, y: Any) -> Any:
        block = pl.BlockSpec((2, 4), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            kernel, shape, grid=(2,), in_specs=[block, block], out_specs=block, interpret=True
        )(x, y)

    f = isthmus.jax_function(call)
    x, y = torch.arange(16.0).reshape(4, 4).to("jax"), torch.full((4, 4), 2.0).to("jax")
    want = x.cpu() * 2 + 1
    for mode in (lambda f: f, lambda f: torch.compile(f, backend="isthmus", fullgraph=True), in_lazy_mode):
        torch.testing.assert_close(mode(f)(x, y).cpu(), want)


def test_transformations_of_torch() -> None:
    f = isthmus.jax_function(lambda x, w: jnp.tanh(x @ w).sum())
    x, w = f64(5, 3).detach(), f64(3).detach()

    def want(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).sum()

    for transform in (
        lambda f: torch.func.vmap(f, in_dims=(0, None)),
        lambda f: torch.func.grad(f, argnums=1),
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=1), in_dims=(0, None)),
        lambda f: torch.func.jacrev(torch.func.grad(f, argnums=1), argnums=1),
    ):
        torch.testing.assert_close(transform(f)(x, w), transform(want)(x, w))


def test_forward_mode_of_torch() -> None:
    f, x = isthmus.jax_function(lambda x, n: (jnp.sin(x) * n, jnp.argmax(x))), f64(3).detach()
    found, tangent = torch.func.jvp(lambda x: f(x, 2.0)[0], (x,), (torch.ones_like(x),))
    torch.testing.assert_close(found, torch.sin(x) * 2)
    torch.testing.assert_close(tangent, torch.cos(x) * 2)
    torch.testing.assert_close(torch.func.jacfwd(lambda x: f(x, 2.0)[0])(x), torch.diag(torch.cos(x) * 2))


def test_complex_gradients_are_torchs() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128).to("jax").requires_grad_()
    f = isthmus.jax_function(lambda z: (z**2 * jnp.exp(z)).imag)
    assert torch.autograd.gradcheck(f, (z,))
    assert torch.autograd.gradgradcheck(f, (z,))
    x = f64(6)
    assert torch.autograd.gradcheck(isthmus.jax_function(jnp.fft.fft), (x,))


def test_numbers_that_change_under_torch_compile() -> None:
    f = isthmus.jax_function(lambda x, n: x * n)
    compiled = torch.compile(lambda x, n: f(x, n) + 1, backend="isthmus")
    for n in (1, 2, 3, 4, 0.5, 1.5):
        assert compiled(torch.ones(2, device="jax"), n).tolist() == [n + 1] * 2


def test_the_same_function_with_other_settings_and_numbers() -> None:
    f, x = isthmus.jax_function(lambda x, s: jnp.zeros(3) + jnp.copysign(x, s)), torch.ones(3).to("jax")
    assert f(x, np.float32(0.0)).tolist() == [1, 1, 1]
    assert f(x, np.float32(-0.0)).tolist() == [-1, -1, -1]
    assert f(x, 1.0).dtype == torch.float32
    with jax.enable_x64(True):
        assert f(x, 1.0).dtype == torch.float64


def test_an_array_from_outside_is_taken_anew_by_jit() -> None:
    held = {"a": jnp.ones(2)}
    f = isthmus.jit(lambda x: x + isthmus.from_jax(held["a"]))
    x = torch.ones(2).to("jax")
    assert f(x).tolist() == [2, 2]
    held["a"] = jnp.full(2, 5.0)
    assert f(x).tolist() == [6, 6]


@pytest.mark.parametrize("way", ["default", "closure", "module"])
def test_a_compiled_function_is_not_given_another_jax_function(way: str) -> None:
    """One line of code compiled with several JAX functions that differ in what they close over."""

    class Apply(torch.nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Any) -> Any:
            return self.function(x)

    def around(scaled: Any) -> Any:
        if way == "module":
            return Apply(scaled)
        return (lambda x, f=scaled: f(x)) if way == "default" else (lambda x: scaled(x))

    x = torch.ones(2, device="jax", requires_grad=True)
    for n in range(3):
        compiled = torch.compile(around(isthmus.jax_function(lambda a, n=n: a * (n + 2))), backend="isthmus")
        compiled(x).sum().backward()
        assert x.grad.tolist() == [n + 2.0] * 2
        x.grad = None
