"""Torch code inside JAX's transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P

import isthmus
from isthmus.errors import IsthmusError, TracedValueError

MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Views, writes through them, an index, a reduction."""
    y = x.clone()
    y[1:].mul_(2)
    y.t()[0].add_(y[:, 1])
    return torch.softmax(y, -1) * x[torch.arange(3, device="jax"), x.argmax(1)].unsqueeze(1)


def mixed_in_jax(x: Any) -> Any:
    y = x.at[1:].multiply(2)
    y = y.at[:, 0].add(y[:, 1])
    return jax.nn.softmax(y, -1) * x[jnp.arange(3), x.argmax(1)][:, None]


def total(f: Any, power: int = 2) -> Any:
    return lambda x: (f(x) ** power).sum()


TRANSFORMED = {
    "plain": lambda f: f,
    "jit": lambda f: jax.jit(f),
    "grad": lambda f: jax.jit(jax.grad(total(f))),
    "grad of grad": lambda f: jax.jit(jax.grad(total(jax.grad(total(f, 3))))),
    "vmap": lambda f: jax.jit(lambda x: jax.vmap(f)(jnp.stack([x, x + 1]))),
    "vmap of grad": lambda f: jax.jit(lambda x: jax.vmap(jax.grad(total(f)))(jnp.stack([x, x + 1]))),
    "jacfwd": lambda f: jax.jit(jax.jacfwd(f)),
    "jacrev": lambda f: jax.jit(jax.jacrev(f)),
    "hessian": lambda f: jax.jit(jax.hessian(total(f))),
    "checkpoint": lambda f: jax.jit(jax.grad(total(jax.checkpoint(f)))),
    "scan": lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, x: (f(c + x), c.sum()), x, jnp.stack([x, x]))),
    "grad of scan": lambda f: jax.jit(
        jax.grad(total(lambda x: jax.lax.scan(lambda c, x: (f(c + x), None), x, jnp.stack([x, x]))[0]))
    ),
    "shard_map": lambda f: jax.jit(jax.shard_map(f, mesh=MESH, in_specs=P("i"), out_specs=P("i"))),
    "grad without jit": lambda f: jax.grad(total(f)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(name: str) -> None:
    found, want = (TRANSFORMED[name](f)(X) for f in (isthmus.torch_function(mixed), mixed_in_jax))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, want)
    assert [a.dtype for a in jax.tree.leaves(found)] == [b.dtype for b in jax.tree.leaves(want)]


@pytest.mark.parametrize("name", ["jit", "grad", "vmap of grad", "jacfwd", "hessian"])
def test_transformations_with_64_bit_types(name: str) -> None:
    with jax.enable_x64(True):
        x = X.astype(jnp.float64)
        found, want = (TRANSFORMED[name](f)(x) for f in (isthmus.torch_function(mixed), mixed_in_jax))
        assert found.dtype == jnp.float64
        np.testing.assert_allclose(found, want, rtol=1e-10, atol=1e-10)


def test_backward_inside_a_trace() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (x.sin() * x).sum().backward()
        assert x.grad is not None
        return x.grad

    f = isthmus.torch_function(gradient)
    want = jax.grad(lambda x: (jnp.sin(x) * x).sum())
    np.testing.assert_allclose(jax.jit(f)(X), want(X), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(f)(X), want(X), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(total(f)))(X), jax.grad(total(want))(X), rtol=1e-4, atol=1e-5)


class Tripled(torch.autograd.Function):
    """The identity, with three times its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * ctx.scale * x, None


class NewStyle(torch.autograd.Function):
    """Two results and an integer, gradients of its own."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * y, x + y, x.argmax()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor, b: torch.Tensor, _: Any) -> Any:
        y = ctx.saved_tensors[1]
        return a * y * 10, None


def test_custom_gradients_are_respected() -> None:
    f = isthmus.torch_function(lambda x: Tripled.apply(x * 2, 3.0))
    for gradient in (jax.grad(lambda x: f(x).sum()), jax.jit(jax.grad(lambda x: f(x).sum()))):
        np.testing.assert_allclose(gradient(X), 12 * X, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(lambda x: f(x).sum()))(X), 12 * X, rtol=1e-6)
    twice = jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())
    np.testing.assert_allclose(twice(X), jnp.full_like(X, 12), rtol=1e-6)

    def second(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        product, total, at = NewStyle.apply(x, y)
        return product.sum() + total.sum() + at * 0

    grads = jax.jit(jax.grad(isthmus.torch_function(second), argnums=(0, 1)))(X, X + 1)
    np.testing.assert_allclose(grads[0], 10 * (X + 1), rtol=1e-6)
    np.testing.assert_allclose(grads[1], jnp.zeros_like(X))
    x = torch.ones(3, requires_grad=True)
    Tripled.apply(x, 3.0).sum().backward()  # outside, torch's own way
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3, 3]


def test_results_without_gradients_and_gradients_without_values() -> None:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            ctx.set_materialize_grads(False)
            still = x * 3
            ctx.mark_non_differentiable(still)
            return x * 2, still, x * 5

        @staticmethod
        def backward(ctx: Any, a: Any, _: Any, unused: Any) -> Any:
            assert unused is None
            assert ctx.needs_input_grad == (True,)
            return a * 2

    def total_of(x: torch.Tensor) -> torch.Tensor:
        found, still, _ = Both.apply(x)
        return found.sum() + still.sum()

    np.testing.assert_allclose(jax.jit(jax.grad(isthmus.torch_function(total_of)))(X), jnp.full_like(X, 2))


def test_complex_gradients_are_jaxs() -> None:
    z = jnp.asarray([1 + 2j, 3 - 1j], jnp.complex64)
    pairs: list[Any] = [
        (lambda z: z.abs().sum(), lambda z: jnp.abs(z).sum()),
        (lambda z: torch.linalg.vector_norm(z), jnp.linalg.norm),
    ]
    for ours, theirs in pairs:
        np.testing.assert_allclose(jax.grad(isthmus.torch_function(ours))(z), jax.grad(theirs)(z), rtol=1e-5)
    x = jnp.linspace(0.1, 1, 6)
    found = jax.grad(isthmus.torch_function(lambda x: torch.fft.fft(x).abs().sum()))(x)
    np.testing.assert_allclose(found, jax.grad(lambda x: jnp.abs(jnp.fft.fft(x)).sum())(x), rtol=1e-4)


def test_random_code_runs_with_and_without_a_trace() -> None:
    f, key = isthmus.torch_function(lambda x: x + torch.rand(3, 4, device="jax")), jax.random.key(0)
    eager = f(X, rng=key)
    np.testing.assert_allclose(jax.jit(lambda key: f(X, rng=key))(key), eager, rtol=1e-6)
    np.testing.assert_allclose(f(X, rng=key), eager, rtol=1e-6)


def test_writing_autograd_functions_are_refused() -> None:
    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    with pytest.raises(IsthmusError, match="mark_dirty"):
        jax.jit(isthmus.torch_function(lambda x: Doubling.apply(x.clone())))(X)


def test_random_numbers_come_from_the_key() -> None:
    f = isthmus.torch_function(lambda x: F.dropout(x, 0.5) + torch.rand(3, 4, device="jax"))
    key, other = jax.random.key(0), jax.random.key(1)
    compiled = jax.jit(lambda x, key: f(x, rng=key))
    first = compiled(X, key)
    np.testing.assert_array_equal(first, compiled(X, key))
    np.testing.assert_allclose(first, f(X, rng=key), rtol=1e-6)
    assert not np.array_equal(first, compiled(X, other))
    keys = jax.random.split(key, 5)
    many = jax.vmap(lambda key: f(X, rng=key))(keys)
    assert len({bytes(np.asarray(one)) for one in many}) == 5
    np.testing.assert_allclose(many[2], f(X, rng=keys[2]), rtol=1e-6)
    old = isthmus.torch_function(lambda x: torch.rand_like(x))(X, rng=jax.random.PRNGKey(0))
    assert np.unique(old).size == X.size
    with pytest.raises(IsthmusError, match=r"pass a key, as in rng=jax\.random\.key\(0\)"):
        f(X)
    given = isthmus.torch_function(lambda x: x.bernoulli(generator=torch.Generator()))
    with pytest.raises(RuntimeError, match="a generator cannot be drawn from"):
        given(X, rng=key)


@pytest.mark.parametrize(
    "read",
    [lambda x: x.sum().item(), lambda x: x if x.sum() > 0 else -x, lambda x: x.tolist(), lambda x: x.cpu()],
)
def test_reading_a_tracer_names_the_line(read: Any) -> None:
    with pytest.raises(TracedValueError, match=rf"{__file__}:{read.__code__.co_firstlineno}"):
        jax.jit(isthmus.torch_function(read))(X)


def test_sizes_that_depend_on_values_say_so() -> None:
    with pytest.raises(IsthmusError, match=r"nonzero.*size depends on values"):
        jax.jit(isthmus.torch_function(lambda x: x.nonzero()))(X)


def test_results_are_trees_of_arrays() -> None:
    found = jax.jit(isthmus.torch_function(lambda x: {"a": [x.argmax(1), None], "b": (x.double(), 3)}))(X)
    assert [found["a"][0].dtype, found["b"][0].dtype] == [jnp.int32, jnp.float32]
    assert found["a"][1] is None
    assert found["b"][1] == 3
