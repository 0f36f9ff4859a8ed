"""FLOP counters and policies of selective checkpointing see on the device what they see on the CPU."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tests.models import GPT, MLP, SmallResNet

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default}


class Biasless(nn.Module):
    """Batches of rows through linear layers with and without a bias, also from inputs that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.transpose(0, 1)).transpose(0, 1)).square().mean()


def _of(model: type[Any]) -> tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]:
    return model, lambda: model.batch(torch.Generator().manual_seed(0))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "mlp": _of(MLP),
    "resnet": _of(SmallResNet),
    "gpt": _of(GPT),
    "biasless": (Biasless, lambda: (torch.randn(3, 4, 6),)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
        lambda: (torch.randn(2, 10, 32),),
    ),
}


def _counts(name: str, device: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the operations of forward, and of forward and backward, by the kind of product."""
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model, inputs = make().to(device), [each.to(device) for each in batch()]
    found = []
    # The CPU counts attention where it is made of products alone.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = model(*inputs).square().mean()
        found.append(counter.get_total_flops())
        loss.backward()
        found.append(counter.get_total_flops())
    kinds = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    matrices = sum(kinds.pop(kind, 0) for kind in ("aten.mm", "aten.bmm"))
    return {"forward": found[0], "both": found[1]}, kinds | {"mm and bmm": matrices}


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_of_the_cpu(name: str) -> None:
    totals, kinds = _counts(name, "jax")
    assert totals["forward"] > 0
    assert totals["both"] > totals["forward"]
    assert (totals, kinds) == _counts(name, "cpu")


@pytest.mark.parametrize("shared", [1, 2])
def test_attention_is_counted_as_on_cuda(shared: int) -> None:
    query = torch.randn(2, 4, 6, 8, device="jax", requires_grad=True)
    key = torch.randn(2, 4 // shared, 7, 8, device="jax", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = F.scaled_dot_product_attention(query, key, key, enable_gqa=shared > 1)
        assert counter.get_total_flops() == 2 * (2 * 2 * 4 * 6 * 7 * 8)  # two products
        out.sum().backward()
    assert counter.get_total_flops() == 7 * (2 * 2 * 4 * 6 * 7 * 8)  # and five, one of them once more


class Block(nn.Module):
    """Attention and a feed-forward part, with a bias and without."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32, bias=False)
        self.rest = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.0), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 10, 3, 4, 8).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(2, 10, 32))
        return x + self.rest(x)


def _checkpointed(device: str, saved: set[Any], compiled: bool) -> tuple[Counter[str], list[torch.Tensor]]:
    """Return what a policy is asked about, and the gradients."""
    torch.manual_seed(0)
    block, x = Block().to(device), torch.randn(2, 10, 32).to(device).requires_grad_()
    asked = Counter[str]()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in PRODUCTS and not ctx.is_recompute:
            asked[str(op)] += 1
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts).square().sum()

    torch.compiler.reset()  # Dynamo does not guard on a policy
    run = torch.compile(loss, backend="isthmus" if device == "jax" else "aot_eager") if compiled else loss
    run(x).backward()
    return asked, [x.grad.cpu(), *[p.grad.cpu() for p in block.parameters()]]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "saved", [set(), PRODUCTS, {aten._scaled_dot_product_fused_attention_overrideable.default}]
)
def test_policies_are_asked_about_the_ops_of_the_cpu(saved: set[Any], compiled: bool) -> None:
    asked, grads = _checkpointed("jax", saved, compiled)
    theirs, expected = _checkpointed("cpu", saved, compiled)
    assert asked == theirs
    assert asked["aten.addmm.default"] >= 3
    assert asked["aten.mm.default"] >= 1
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_saved_product_is_not_computed_again() -> None:
    x = torch.randn(4, 8, device="jax", requires_grad=True)
    layer = nn.Linear(8, 8).to("jax")

    def products(saved: set[Any]) -> int:
        contexts = functools.partial(create_selective_checkpoint_contexts, list(saved))
        with FlopCounterMode(display=False) as counter:
            out = checkpoint(lambda x: layer(x).relu(), x, use_reentrant=False, context_fn=contexts)
            out.sum().backward()
        return counter.get_total_flops() // (2 * 4 * 8 * 8)

    assert products(set()) - products({aten.addmm.default}) == 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_compiled_checkpoints_draw_the_same_numbers_again(dropout: float) -> None:
    """Attention is tagged as random; what backward computes again must be what forward computed."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 8, device="jax", requires_grad=True)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.scaled_dot_product_attention(x, x, x).sin(), dropout, training=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(attend, x, use_reentrant=False).sum()

    compiled = torch.compile(loss, backend="isthmus")
    state = torch.jax.get_rng_state()
    (got,) = torch.autograd.grad(compiled(x), x)
    torch.jax.set_rng_state(state)
    (want,) = torch.autograd.grad(attend(x).sum(), x)
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-4, atol=1e-5)
