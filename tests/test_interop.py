"""torch and JAX in one program: the same arrays on both sides, and gradients across the border."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isthmus
from isthmus.errors import IsthmusError, JitError

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


def test_recorded_tensors_are_computed_first() -> None:
    with isthmus.lazy():
        x = torch.ones(3, device="jax") * 2
        y = isthmus.jax_function(jnp.square)(x) + 1
    assert y.tolist() == [5, 5, 5]


@pytest.mark.parametrize("jit", [True, False])
def test_without_jax_jit_it_gives_the_same(jit: bool) -> None:
    x = f64(3)
    assert torch.autograd.gradcheck(isthmus.jax_function(jnp.tanh, jit=jit), (x,))


def test_torch_compile_breaks_its_graph_around_it() -> None:
    f, x = isthmus.jax_function(jnp.tanh), f64(3)
    found = torch.compile(lambda x: f(x * 2) + 1, backend="isthmus")(x)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(found, torch.tanh(x * 2) + 1)
    torch.testing.assert_close(gradient, 2 * (1 - torch.tanh(x.detach() * 2) ** 2))


def test_isthmus_jit_refuses_it() -> None:
    with pytest.raises(JitError, match="read while the function is recorded"):
        isthmus.jit(isthmus.jax_function(jnp.tanh))(torch.ones(3).to("jax"))
