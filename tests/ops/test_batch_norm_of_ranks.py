"""The ops that SyncBatchNorm calls: a batch cut into the parts of several ranks gives what the whole batch gives."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import isthmus

EPS, MOMENTUM = 1e-3, 0.3


def of_ranks(xs, grads, weight, bias, running_mean, running_var):
    """Return the parts' results and gradients, those of weight and bias, as torch's SyncBatchNorm computes them."""
    ones = [torch.batch_norm_stats(x, EPS) for x in xs]
    counts = torch.tensor([x.numel() / x.shape[1] for x in xs], dtype=ones[0][0].dtype).to(xs[0].device)
    means, invstds = torch.stack([m for m, _ in ones]), torch.stack([r for _, r in ones])
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        xs[0], means, invstds, running_mean, running_var, MOMENTUM, EPS, counts
    )
    outs = [torch.batch_norm_elemt(x, weight, bias, mean, invstd, EPS) for x in xs]
    affine = weight is not None
    sums = [
        torch.batch_norm_backward_reduce(g, x, mean, invstd, weight, True, affine, affine)
        for g, x in zip(grads, xs, strict=True)
    ]
    dy, along = sum(s[0] for s in sums), sum(s[1] for s in sums)
    number = counts.to(torch.int32)
    dxs = [
        torch.batch_norm_backward_elemt(g, x, mean, invstd, weight, dy, along, number)
        for g, x in zip(grads, xs, strict=True)
    ]
    parameters = [sum(s[2] for s in sums), sum(s[3] for s in sums)] if affine else []
    return [torch.cat(outs), torch.cat(dxs), *parameters]


def cases():
    """The parts of three ranks, uneven ones too, and CPU batch norm's results for the whole in float64."""
    for shape, parts, dtype, affine in (
        ((9, 3), (4, 5), torch.float32, True),
        ((8, 4, 5), (1, 5, 2), torch.float64, True),
        ((6, 2, 3, 3), (2, 2, 2), torch.float32, False),
        ((6, 2, 3, 3), (5, 1), torch.bfloat16, True),
        ((4, 2, 2, 3, 2), (3, 1), torch.float16, True),
    ):
        yield pytest.param(
            shape, parts, dtype, affine, id=f"{len(shape)}d-{dtype}-{affine}".replace("torch.", "")
        )


@pytest.mark.parametrize("mode", ["eager", "lazy", "compiled"])
@pytest.mark.parametrize(("shape", "parts", "dtype", "affine"), cases())
def test_parts_give_what_the_whole_gives(shape, parts, dtype, affine, mode):
    torch.manual_seed(0)
    channels, wide = shape[1], torch.float64 if dtype == torch.float64 else torch.float32
    x, grad = (torch.randn(shape, dtype=torch.float64).mul(3).add(5).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(channels, dtype=wide) if affine else None for _ in range(2))
    running = [torch.randn(channels, dtype=wide), torch.rand(channels, dtype=wide)]

    exact = [t if t is None else t.double().clone().requires_grad_() for t in (x, weight, bias)]
    moved = [t.double().clone() for t in running]
    y = F.batch_norm(exact[0], *moved, *exact[1:], True, MOMENTUM, EPS)
    y.backward(grad.double())
    want = [y.detach(), *(t.grad for t in exact if t is not None), *moved]

    on_device = [None if t is None else t.to("jax") for t in (weight, bias, *running)]
    xs, grads = (list(t.to("jax").split(parts)) for t in (x, grad))
    run = torch.compile(of_ranks, backend="isthmus") if mode == "compiled" else of_ranks
    isthmus.metrics.clear()
    with isthmus.lazy() if mode == "lazy" else contextlib.nullcontext():
        found = [t.cpu() for t in (*run(xs, grads, *on_device), *on_device[2:])]
    assert not isthmus.metrics.fallbacks()
    assert [t.dtype for t in found] == [dtype, dtype, *[wide] * (4 if affine else 2)]
    # A sum of n products rounds at most n times at their size; a half type rounds once more, when a result is written.
    products = (x.double().abs().max() * grad.double().abs().max()).item()
    summed = x.numel() // channels * torch.finfo(wide).eps * products
    for got, expected in zip(found, want, strict=True):
        written = torch.finfo(dtype).eps if got.dtype == dtype != wide else 0
        torch.testing.assert_close(got.double(), expected, rtol=written, atol=summed)


def test_equal_counts_and_gradients_that_are_not_asked_for():
    x = torch.randn(6, 2, 4, device="jax")
    first, second = (torch.batch_norm_stats(part, EPS) for part in x.split(3))
    means, invstds = torch.stack([first[0], second[0]]), torch.stack([first[1], second[1]])
    mean, invstd = torch.batch_norm_gather_stats(x, means, invstds, None, None, MOMENTUM, EPS, 12)
    whole = torch.batch_norm_stats(x, EPS)
    torch.testing.assert_close(mean.cpu(), whole[0].cpu())
    torch.testing.assert_close(invstd.cpu(), whole[1].cpu())
    sums = torch.batch_norm_backward_reduce(x, x, mean, invstd, None, True, False, False)
    assert [s is None for s in sums] == [False, False, True, True]
    torch.testing.assert_close(sums[0].cpu(), x.sum((0, 2)).cpu())
