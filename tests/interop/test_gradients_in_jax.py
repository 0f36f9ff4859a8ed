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
from tests.ops.test_opinfo import SPARSE, name_of

WIDE = (torch.float32, torch.float64)
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
# The storage that its samples are views of is gone; sizes are to be on the CPU; torch has no such numbers on "jax".
NOT_HERE = {"as_strided.partial_views", "chalf", "cov", "tensor_split"}
# torch gives the gradient to the elements of the first argument that were replaced, and none to those that were not.
WRONG_IN_TORCH = {"as_strided_scatter"}
# Draws: the key is another than the seed.
RANDOM = {
    "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
    "nn.functional.scaled_dot_product_attention", "normal.number_mean",
    "bernoulli", "empty", "empty_strided", "multinomial", "nn.functional.feature_alpha_dropout.with_train",
    "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d",
    "nn.functional.multi_head_attention_forward", "nn.functional.rrelu", "normal", "pca_lowrank", "svd_lowrank",
}  # fmt: skip


# Of equal elements either may come first.
TIES = {"msort"}
# torch has a formula for the whole, which runs in parts here; on matrices of full rank the parts agree with it.
IN_PARTS = {"linalg.pinv.hermitian", "linalg.pinv.singular"}


def entries() -> Iterator[Any]:
    """Yield the differentiable ops; one in thirty is not slow."""
    found = [
        op for op in op_db if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    ]
    for place, op in enumerate(sorted(found, key=name_of)):
        if (
            op.name not in SPARSE
            and name_of(op) not in NOT_TRACED | NOT_HERE | WRONG_IN_TORCH | RANDOM | IN_PARTS | TIES
        ):
            yield pytest.param(op, id=name_of(op), marks=[] if place % 30 == 0 else [pytest.mark.slow])


@pytest.mark.parametrize("kinks", [False, True], ids=["smooth", "kinks"])
@pytest.mark.parametrize("op", entries())
def test_gradients(op: OpInfo, kinks: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ran = [
            _compare(op, s, kinks)
            for s in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=True), 3)
        ]
    assert ran


def _compare(op: OpInfo, sample: SampleInput, kinks: bool) -> None:
    leaves, spec = jax.tree.flatten((sample.input, sample.args, sample.kwargs))
    at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    given = [(_at_kinks if kinks else torch.clone)(leaves[n].detach()) for n in at]
    moving = [place for place, n in enumerate(at) if leaves[n].requires_grad]

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        filled = list(leaves)
        for n, tensor in zip(at, tensors, strict=True):
            filled[n] = tensor
        first, args, kwargs = jax.tree.unflatten(spec, filled)
        found = sample.output_process_fn_grad(op(first, *args, **kwargs))
        return [t for t in jax.tree.leaves(found) if isinstance(t, torch.Tensor) and t.dtype in WIDE]

    try:
        results = call(*given)
    except (RuntimeError, ValueError, IndexError):
        assert kinks, "torch refuses only what was made of its samples"
        return
    for n in moving:
        given[n].requires_grad_()
    outs = [n for n, r in enumerate(call(*given)) if r.requires_grad]
    if not outs or not moving:
        return
    weights = [torch.randn(results[n].shape, generator=torch.Generator().manual_seed(n)) for n in outs]
    want = _gradients(call, given, moving, outs, weights)
    exact = _gradients(call, [_doubled(t) for t in given], moving, outs, [w.double() for w in weights])
    inside = isthmus.torch_function(call)
    arrays, weights = isthmus.to_jax([t.detach() for t in given]), isthmus.to_jax(weights)

    def of(*varying: Any) -> list[Any]:
        filled = list(arrays)
        for n, array in zip(moving, varying, strict=True):
            filled[n] = array
        found = inside(*filled)
        return [found[n] for n in outs]

    pull = jax.jit(lambda varying, given: jax.vjp(of, *varying)[1](given))
    for found, *known in zip(pull([arrays[n] for n in moving], weights), want, exact, strict=True):
        # Where torch's own float32 is far from its float64, either will do.
        near = [_is_near(np.asarray(found), k) for k in known]
        assert any(near), f"JAX {found}\ntorch {known[0]}\nin float64 {known[1]}"


def _is_near(found: Any, known: Any) -> bool:
    finite = np.isfinite(known)  # beyond, the order of multiplications decides
    return np.allclose(found[finite], known[finite], rtol=2e-3, atol=2e-4)


def _gradients(call: Any, given: Any, moving: list[int], outs: list[int], weights: Any) -> list[Any]:
    results = call(*given)
    wanted = [given[n] for n in moving]
    found = torch.autograd.grad([results[n] for n in outs], wanted, weights, allow_unused=True)
    return [
        np.zeros(t.shape) if g is None else g.numpy(force=True) for g, t in zip(found, wanted, strict=True)
    ]


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _at_kinks(tensor: torch.Tensor) -> torch.Tensor:
    """Return -1, 0 and 1 in place of the numbers: zeros, ends of ranges, and ties."""
    return tensor.round().remainder(3).sub(1) if tensor.is_floating_point() else tensor


def test_what_cannot_be_traced_says_so() -> None:
    with pytest.raises(IsthmusError, match=r"aten\..* has a result whose size depends on values"):
        jax.jit(isthmus.torch_function(lambda x: x[x > 0].sum() + x.masked_select(x > 0).sum()))(GRID)
