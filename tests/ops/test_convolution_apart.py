"""Convolutions taken apart: the results and gradients of whole ones, and which those are on each device."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import isthmus
from isthmus._ops.nn import convolution as whole
from isthmus._ops.nn import convolution_apart
from isthmus._ops.nn.convolution_apart import Convolution
from isthmus._runtime.compiler import platform

pytestmark = pytest.mark.skipif(platform() != "cpu", reason="elsewhere XLA has kernels for all of them")

# input, weight, stride, padding, dilation, transposed, output padding, groups
CASES: dict[str, tuple[Any, ...]] = {
    "depthwise": ((2, 6, 9, 8), (6, 1, 3, 3), [1], [1], [1], False, [0], 6),
    "depthwise, strided": ((2, 6, 9, 8), (6, 1, 5, 3), [2, 3], [2, 0], [1], False, [0], 6),
    "depthwise, dilated": ((2, 6, 9, 8), (6, 1, 3, 3), [1], [2], [2], False, [0], 6),
    "depthwise, several out": ((2, 4, 7, 7), (12, 1, 3, 3), [2], [1], [1], False, [0], 4),
    "depthwise, one dim": ((2, 6, 11), (6, 1, 4), [1], [3], [1], False, [0], 6),
    "depthwise, three dims": ((2, 4, 5, 4, 3), (4, 1, 2, 3, 2), [1], [1], [1], False, [0], 4),
    "depthwise, transposed": ((2, 6, 5, 4), (6, 1, 3, 3), [2], [1], [1], True, [1], 6),
    "groups": ((2, 6, 9, 8), (9, 2, 3, 3), [1], [1], [1], False, [0], 3),
    "groups, strided": ((2, 6, 9, 8), (9, 2, 3, 2), [2, 3], [0, 2], [1, 2], False, [0], 3),
    "groups, transposed": ((2, 6, 5, 4), (6, 2, 3, 3), [2], [1], [1], True, [1, 0], 3),
    "groups, transposed, more at the end": ((1, 4, 4), (4, 2, 3), [1], [1], [3], True, [2], 2),
    "many groups": ((1, 130, 5, 5), (130, 2, 3, 3), [1], [1], [1], False, [0], 65),
    "a larger window": ((2, 4, 2, 2), (5, 4, 3, 3), [1], [1], [1], False, [0], 1),
    "a larger window, strided": ((2, 4, 2, 9), (5, 4, 3, 3), [2], [1], [1], False, [0], 1),
    "a larger window, transposed": ((2, 4, 2, 2), (4, 5, 3, 3), [2], [1], [1], True, [1], 1),
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Take even the smallest apart; return what was."""
    seen: list[Any] = []
    apart = convolution_apart.apart
    monkeypatch.setattr(convolution_apart, "_FEW", 0)
    monkeypatch.setattr(convolution_apart, "apart", lambda given: seen.append(given) or apart(given))
    return seen


def given(case: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(case[0]).to(dtype), torch.randn(case[1]).to(dtype)


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_torchs(name: str, always: list[Any]) -> None:
    case = CASES[name]
    x, w = given(case)
    bias = torch.randn(w.shape[0] if not case[5] else w.shape[1] * case[7])
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    wanted = torch.ops.aten.convolution(*leaves, *case[2:])
    grad = torch.randn(wanted.shape)
    gradients = torch.autograd.grad(wanted, leaves, grad)
    arrays = [jnp.asarray(t.detach().numpy()) for t in (x, w, bias, grad)]
    found = whole.convolution(*arrays[:3], *case[2:])
    assert len(always) == 1
    np.testing.assert_allclose(found, wanted.detach(), rtol=1e-4, atol=1e-4)
    got = whole.convolution_backward(arrays[3], *arrays[:2], list(bias.shape), *case[2:], [True] * 3)
    assert len(always) >= 2
    for mine, theirs in zip(got, gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["depthwise", "groups", "a larger window"])
def test_other_dtypes_sum_as_wide(name: str, dtype: torch.dtype, always: list[Any]) -> None:
    case = CASES[name]
    x, w = given(case, dtype)
    wanted = torch.ops.aten.convolution(x.double(), w.double(), None, *case[2:]).to(dtype)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(t.double().numpy()).astype(str(dtype).split(".")[1]) for t in (x, w)]
        found = whole.convolution(*arrays, None, *case[2:])
        assert found.dtype == arrays[0].dtype
        got = torch.from_numpy(np.array(found.astype(jnp.float64))).to(dtype)
    assert always
    torch.testing.assert_close(got, wanted)


def test_what_one_group_holds_stays_there(always: list[Any]) -> None:
    case = CASES["groups"]
    x, w = given(case)
    x[:, :2] = torch.inf
    found = whole.convolution(jnp.asarray(x.numpy()), jnp.asarray(w.numpy()), None, *case[2:])
    assert always
    assert np.isfinite(np.asarray(found)[:, 3:]).all()


def test_small_ones_whole_ones_and_integers_are_left_to_xla() -> None:
    def takes(x: Any, w: Any, groups: int, dtype: Any = jnp.float32) -> bool:
        shapes = jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct(w, dtype)
        given = Convolution(*shapes, [1, 1], [(1, 1)] * 2, [1, 1], [1, 1], groups, dtype)
        return convolution_apart.takes(given)

    assert takes((8, 64, 32, 32), (64, 1, 3, 3), 64)
    assert not takes((1, 4, 8, 8), (4, 1, 3, 3), 4)
    assert not takes((8, 64, 32, 32), (64, 64, 3, 3), 1)
    assert not takes((8, 64, 32, 32), (64, 1, 31, 31), 64)
    assert not takes((8, 64, 32, 32), (64, 1, 3, 3), 64, jnp.int32)


def test_a_model_of_them_trains_in_every_mode(always: list[Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1, 1, groups=64),
        nn.Conv2d(64, 64, 3, 2, 1, groups=16),
        nn.Flatten(),
        nn.LazyLinear(4),
    )
    x = torch.randn(4, 3, 32, 32)
    model(x).square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    for name in ("eager", "compiled", "lazy"):
        mine = copy_to_jax(model)
        run = torch.compile(mine, backend="isthmus") if name == "compiled" else mine
        with isthmus.lazy() if name == "lazy" else contextlib.nullcontext():
            run(x.to("jax")).square().sum().backward()
        for p, grad in zip(mine.parameters(), wanted, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad.cpu(), grad, rtol=1e-3, atol=1e-3)
        assert always, "some were taken apart"
        always.clear()


def copy_to_jax(model: nn.Module) -> nn.Module:
    mine = copy.deepcopy(model)
    mine.zero_grad(set_to_none=True)
    return mine.to("jax")


def test_transforms_go_through(always: list[Any]) -> None:
    model = nn.Conv2d(64, 64, 3, padding=1, groups=64)
    params, apply = isthmus.functional(model)
    x = jax.random.normal(jax.random.key(0), (2, 2, 64, 32, 32))

    def loss(p: Any, x: Any) -> Any:
        return apply(p, x).sum()

    each = [jax.grad(loss)(params, one)["weight"] for one in x]
    assert always
    mapped = jax.vmap(jax.grad(loss), (None, 0))(params, x)["weight"]
    np.testing.assert_allclose(mapped, jnp.stack(each), rtol=1e-4, atol=1e-3)
    _, tangent = jax.jvp(lambda x: loss(params, x), (x[0],), (x[1],))
    np.testing.assert_allclose(tangent, (jax.grad(loss, 1)(params, x[0]) * x[1]).sum(), rtol=1e-4)


def test_exported_they_are_whole_elsewhere() -> None:
    model = nn.Conv2d(64, 64, 3, padding=1, groups=64).eval()
    x = torch.randn(4, 64, 32, 32)
    artifact = isthmus.export(model, x, platforms=("cpu", "cuda"))
    torch.testing.assert_close(artifact.module()(x), model(x), rtol=1e-4, atol=1e-4)
    assert "stablehlo.convolution" in artifact.exported.mlir_module()
    assert "stablehlo.convolution" not in isthmus.export(model, x, platforms=("cpu",)).exported.mlir_module()


@pytest.mark.parametrize(
    ("device", "name", "taken", "for_weight"),
    [
        ("gpu", "depthwise", True, False),
        ("gpu", "depthwise, transposed", True, False),
        ("gpu", "groups", False, False),
        ("gpu", "a larger window", False, False),
        ("tpu", "depthwise", False, False),
        ("cpu", "groups", True, True),
    ],
)
def test_what_each_device_is_slow_at(
    device: str, name: str, taken: bool, for_weight: bool, monkeypatch: pytest.MonkeyPatch, always: list[Any]
) -> None:
    monkeypatch.setattr(convolution_apart.compiler, "platform", lambda: device)
    case = CASES[name]
    x, w = given(case)
    found = whole.plan(jnp.asarray(x.numpy()), jnp.asarray(w.numpy()), *case[2:], dtype=np.float32)
    assert (convolution_apart.takes(found), convolution_apart.takes_for_weight(found)) == (taken, for_weight)
