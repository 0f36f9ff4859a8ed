"""Gradients of torch code that JAX differentiates: those of torch's own autograd, at kinks and ties too."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import isthmus
from isthmus.errors import IsthmusError
from tests.test_opinfo import SPARSE, name_of

GRID = jnp.round(jnp.linspace(-3.0, 3.0, 16)).reshape(1, 1, 4, 4)
SYMMETRIC = jnp.array([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]])
FUNCTIONS: dict[str, tuple[Callable[..., Any], Any]] = {
    "relu": (F.relu, GRID),
    "relu6": (F.relu6, GRID),
    "abs": (torch.abs, GRID),
    "clamp": (lambda x: x.clamp(-1, 1), GRID),
    "hardswish": (F.hardswish, GRID),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), GRID),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 3), GRID),
    "norm": (lambda x: x.norm(dim=-1), jnp.zeros((2, 3))),
    "cholesky": (torch.linalg.cholesky, SYMMETRIC),
    "eigvalsh": (torch.linalg.eigvalsh, SYMMETRIC),
    "inv": (torch.linalg.inv, SYMMETRIC),
    "polygamma": (lambda x: torch.polygamma(2, x), GRID + 4.5),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), GRID),
    "amax": (lambda x: x.amax((2, 3)), GRID),
    "sort": (lambda x: x.flatten().sort()[0].cumsum(0), GRID),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kinks(name: str) -> None:
    function, x = FUNCTIONS[name]
    given = torch.tensor(np.asarray(x)).requires_grad_()
    out = function(given)
    weights = torch.arange(1.0, out.numel() + 1).reshape(out.shape)
    (want,) = torch.autograd.grad(out, given, weights)
    inside = isthmus.torch_function(function)
    pulled = jax.jit(lambda x, g: jax.vjp(inside, x)[1](g))(x, jnp.asarray(weights.numpy()))[0]
    np.testing.assert_allclose(pulled, want.numpy(), rtol=1e-4, atol=1e-5)
    forward, reverse = (jax.jit(jac(inside))(x) for jac in (jax.jacfwd, jax.jacrev))
    np.testing.assert_allclose(forward, reverse, rtol=1e-4, atol=1e-5)


def test_second_derivatives_of_torchs_formulas() -> None:
    f = isthmus.torch_function(
        lambda x: torch.linalg.cholesky(x @ x.T + torch.eye(3, device="jax")).square().sum()
    )
    want = lambda x: jnp.trace(x @ x.T + jnp.eye(3))  # noqa: E731  # the squares of a factor sum up to the trace
    x = SYMMETRIC / 3
    np.testing.assert_allclose(jax.jit(jax.hessian(f))(x), jax.hessian(want)(x), rtol=1e-3, atol=1e-3)
    pooled = isthmus.torch_function(lambda x: F.max_pool2d(x, 2).pow(3).sum())
    found = jax.jit(jax.grad(lambda x: jax.grad(pooled)(x).sum()))(GRID)
    given = torch.tensor(np.asarray(GRID)).requires_grad_()
    (once,) = torch.autograd.grad(F.max_pool2d(given, 2).pow(3).sum(), given, create_graph=True)
    np.testing.assert_allclose(found, torch.autograd.grad(once.sum(), given)[0].numpy(), rtol=1e-5)


# What tracing cannot do: sizes that depend on values, values that Python reads.
NOT_TRACED = {
    "allclose", "argwhere", "combinations", "equal", "index_put", "item", "linspace.tensor_overload",
    "logspace.tensor_overload", "masked_select", "narrow", "nn.functional.ctc_loss",
    "nn.functional.gaussian_nll_loss", "nonzero", "to", "unique", "unique_consecutive",
}  # fmt: skip
# Draws: the key is another than the seed.
RANDOM = {
    "bernoulli", "empty", "empty_strided", "multinomial", "nn.functional.feature_alpha_dropout.with_train",
    "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d",
    "nn.functional.multi_head_attention_forward", "nn.functional.rrelu", "normal", "pca_lowrank", "svd_lowrank",
}  # fmt: skip


def entries() -> Iterator[Any]:
    """Yield the differentiable ops; one in twelve is not slow."""
    found = [
        op for op in op_db if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    ]
    for place, op in enumerate(sorted(found, key=name_of)):
        if op.name not in SPARSE and name_of(op) not in NOT_TRACED | RANDOM:
            yield pytest.param(op, id=name_of(op), marks=[] if place % 12 == 0 else [pytest.mark.slow])


@pytest.mark.parametrize("kinks", [False, True], ids=["smooth", "kinks"])
@pytest.mark.parametrize("op", entries())
def test_gradients(op: OpInfo, kinks: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ran = [_compare(op, s, kinks) for s in itertools.islice(op.sample_inputs("cpu", torch.float32), 3)]
    assert ran


def _compare(op: OpInfo, sample: SampleInput, kinks: bool) -> None:
    leaves, spec = jax.tree.flatten((sample.input, sample.args, sample.kwargs))
    at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    given = [_at_kinks(leaves[n].detach()) if kinks else leaves[n].detach() for n in at]
    moving = [n for n, t in enumerate(given) if t.is_floating_point()]

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        filled = list(leaves)
        for n, tensor in zip(at, tensors, strict=True):
            filled[n] = tensor
        first, args, kwargs = jax.tree.unflatten(spec, filled)
        found = sample.output_process_fn_grad(op(first, *args, **kwargs))
        return [t for t in jax.tree.leaves(found) if isinstance(t, torch.Tensor) and t.dtype == torch.float32]

    tensors = [t.clone().to("jax").requires_grad_(t.is_floating_point()) for t in given]
    try:
        results = call(*tensors)
    except (RuntimeError, ValueError, IndexError):
        assert kinks, "torch refuses only what was made of its samples"
        return
    outs = [n for n, r in enumerate(results) if r.requires_grad]
    if not outs:
        return
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(results[n].shape, generator=generator).to("jax") for n in outs]
    wanted = [tensors[n] for n in moving]
    want = torch.autograd.grad([results[n] for n in outs], wanted, weights, allow_unused=True)
    inside = isthmus.torch_function(call)
    arrays = isthmus.to_jax([t.detach() for t in tensors])

    def of(*varying: Any) -> list[Any]:
        filled = list(arrays)
        for n, array in zip(moving, varying, strict=True):
            filled[n] = array
        found = inside(*filled)
        return [found[n] for n in outs]

    pull = jax.jit(lambda varying, given: jax.vjp(of, *varying)[1](given))
    for found, gradient in zip(pull([arrays[n] for n in moving], isthmus.to_jax(weights)), want, strict=True):
        expected = np.zeros(found.shape) if gradient is None else gradient.cpu().numpy()
        np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-3, atol=2e-4)


def _at_kinks(tensor: torch.Tensor) -> torch.Tensor:
    """Return -1, 0 and 1 in place of the numbers: zeros, ends of ranges, and ties."""
    return tensor.round().remainder(3).sub(1) if tensor.is_floating_point() else tensor


def test_what_cannot_be_traced_says_so() -> None:
    with pytest.raises(IsthmusError, match=r"aten\..* has a result whose size depends on values"):
        jax.jit(isthmus.torch_function(lambda x: x[x > 0].sum() + x.masked_select(x > 0).sum()))(GRID)
