"""CUDA's attention kernels in compiled graphs: the ops torch picks for CUDA tensors, run on any device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from isthmus._dynamo import attention, compile_log, decompositions

aten = torch.ops.aten
BATCH, HEADS, LENGTH, WIDTH = 2, 4, 37, 8


def flash(q: Any, k: Any, v: Any) -> Any:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def efficient(q: Any, k: Any, v: Any, bias: Any) -> Any:
    # Its result lies as one row of heads after another: no copy is needed to join them.
    out = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)[0]
    joined = out.transpose(1, 2).view(q.shape[0], q.shape[2], -1)
    return joined.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)


def cudnn(q: Any, k: Any, v: Any) -> Any:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, scale=0.3)[0]


KERNELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "flash": (flash, {"is_causal": True}),
    "efficient": (efficient, {}),
    "cudnn": (cudnn, {"scale": 0.3}),
}


@pytest.fixture(autouse=True)
def fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def gradients(function: Callable[..., Any], tensors: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    given = [t.to(device).requires_grad_() for t in tensors]
    out = function(*given)
    out.sin().sum().backward()
    return [out.detach().cpu(), *[t.grad.cpu() for t in given]]  # type: ignore[union-attr]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_become_the_one_op(name: str, dynamic: bool) -> None:
    kernel, how = KERNELS[name]
    tensors = [torch.randn(BATCH, HEADS, LENGTH, WIDTH) for _ in range(3)]
    bias = [torch.randn(BATCH, HEADS, LENGTH, LENGTH)] if name == "efficient" else []

    def plain(q: Any, k: Any, v: Any, *bias: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, *bias, **how)

    compiled = torch.compile(kernel, backend="isthmus", fullgraph=True, dynamic=dynamic)
    with compile_log.recording() as found:
        got = gradients(compiled, [*tensors, *bias], "jax")
    for each, wanted in zip(got, gradients(plain, [*tensors, *bias], "cpu"), strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-5)
    assert [graph.outside for graph in found.graphs] == [[], []]


def test_sums_nobody_asked_for_are_empty() -> None:
    tensors = [torch.randn(BATCH, HEADS, LENGTH, WIDTH, device="jax") for _ in range(3)]
    kernel = aten._scaled_dot_product_efficient_attention

    def both(*given: Any) -> Any:
        return kernel(*given, None, False)[1], kernel(*given, None, True)[1]

    with torch.no_grad():
        empty, sums = torch.compile(both, backend="isthmus")(*tensors)
    assert empty.shape == (BATCH, HEADS, 0)
    assert sums.shape == (BATCH, HEADS, 64), "whole groups of 32 rows"


def test_dropout_stays_with_cuda() -> None:
    kernel = aten._scaled_dot_product_flash_attention.default
    q = torch.randn(1, 1, 4, 8, device="jax")

    def targets(dropout: float) -> set[Any]:
        traced = make_fx(lambda q: kernel(q, q, q, dropout)[0], decompositions.table(), "fake")(q)
        return {node.target for node in traced.graph.nodes}

    assert kernel in targets(0.5)
    assert kernel not in targets(0.0)


@pytest.mark.parametrize("needed", [False, True])
def test_a_bias_has_a_gradient_where_it_is_asked_for(needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    one_op = attention._BACKWARD

    def backward(*args: Any, **kwargs: Any) -> Any:
        asked.append(args[5])
        return one_op(*args, **kwargs)

    monkeypatch.setattr(attention, "_BACKWARD", backward)
    q = torch.randn(BATCH, HEADS, LENGTH, WIDTH, device="jax", requires_grad=True)
    bias = torch.randn(BATCH, 1, LENGTH, LENGTH, device="jax", requires_grad=needed)
    bias = bias.expand(-1, HEADS, -1, -1)
    torch.compile(efficient, backend="isthmus")(q, q, q, bias).sum().backward()
    assert asked == [[True, True, True, needed]]
