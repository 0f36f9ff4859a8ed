"""Small ops that run on the host: the bits that the device computes, errors of the CPU, programs when called often."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

import isthmus
from isthmus._device.core import small_ops
from isthmus._lazy import small_graphs
from isthmus._runtime import counters


@pytest.fixture(autouse=True)
def on_the_host() -> Iterator[None]:
    isthmus.config.small_ops = "host"
    isthmus.clear_caches()
    yield
    isthmus.config.small_ops = "device"
    isthmus.clear_caches()


def compilations(run: Callable[[], object]) -> int:
    before = counters.counts["compilations"]
    run()
    return counters.counts["compilations"] - before


X = torch.arange(-12, 12).reshape(4, 6)
F = X / 7
FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cat": lambda x, f: torch.cat([x, x[:, -1:]], 1),
    "cumsum": lambda x, f: x.cumsum(1) - 1,
    "mask": lambda x, f: (x != 3).long().masked_fill(x == 2, 1),
    "any": lambda x, f: (x > 100).any(),
    "float": lambda x, f: (f * f.t().t() + f / 3).neg(),
    "transposed": lambda x, f: f.t().neg(),
    "expanded": lambda x, f: x[:, :1].expand(4, 5) + 1,
    "step": lambda x, f: f[::2, 1::2] * 2.5,
    "argmax": lambda x, f: f.argmax(-1),
    "cast": lambda x, f: x.float() + f.double(),
    "rows": lambda x, f: f.index_select(0, x[2:, 3].clamp(0, 3)),
    "factories": lambda x, f: (
        torch.ones(3, dtype=torch.long, device=x.device) + torch.full((3,), 4, device=x.device)
    ),
    "divide": lambda x, f: x // 5 + x % 3,
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_the_device(name: str, lazy: bool) -> None:
    function = FUNCTIONS[name]
    x, f = X.to("jax"), F.to("jax")
    with isthmus.lazy() if lazy else contextlib.nullcontext():
        before = counters.counts["small ops on the host"]
        host = function(x, f)
        found, stride = host.cpu(), host.stride()
        assert counters.counts["small ops on the host"] > before
    isthmus.config.small_ops = "device"
    isthmus.clear_caches()
    device = function(x, f)
    assert torch.equal(found, device.cpu())
    assert (found.dtype, stride) == (device.dtype, device.stride())
    assert torch.equal(found, function(X, F))


ACCEPTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "histc": lambda x: torch.histc(x, 4, 0, 8),
    "histc of a sum": lambda x: torch.histc(x + 1, 4, 0, 8).cumsum(0),
    "histc of bytes": lambda x: torch.histc(x.clamp(0).to(torch.uint8), 4),
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_cpu_has_no_kernel_for_runs_on_the_device(name: str, lazy: bool) -> None:
    with pytest.raises((NotImplementedError, RuntimeError)):
        ACCEPTED[name](X)
    with isthmus.lazy() if lazy else contextlib.nullcontext():
        for _ in range(2):
            counts = ACCEPTED[name](X.to("jax")).tolist()
            assert sum(counts) > 0
            isthmus.config.small_ops = "device"
            assert counts == ACCEPTED[name](X.to("jax")).tolist()
            isthmus.config.small_ops = "host"


def test_a_growing_list_compiles_nothing() -> None:
    def grow() -> None:
        ids, expected = X[:1].to("jax"), X[:1]
        for n in range(12):
            ids = torch.cat([ids, ids[:, -1:] + n], 1)
            expected = torch.cat([expected, expected[:, -1:] + n], 1)
            assert bool((ids == expected.to("jax")).all())

    assert compilations(grow) == 0


def test_what_is_called_often_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_ops, "OFTEN", 5)
    monkeypatch.setattr(small_graphs, "OFTEN", 5)
    x = X.to("jax")
    assert compilations(lambda: [x * 2 for _ in range(5)]) == 0
    assert compilations(lambda: [x * 2 for _ in range(5)]) == 1

    def recorded() -> None:
        with isthmus.lazy():
            (x - 3).cpu()

    assert compilations(lambda: [recorded() for _ in range(5)]) == 0
    assert compilations(lambda: [recorded() for _ in range(5)]) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.float().exp(),  # another machine may round otherwise
        lambda x: x.float().sum(),
        lambda x: x.repeat(40, 10).clone(),  # a large result
        lambda x: torch.ones(5000, dtype=torch.long, device=x.device) + 1,
        lambda x: x.float().bfloat16() * 3,
    ],
)
def test_other_ops_are_compiled(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = X.to("jax")
    assert compilations(lambda: torch.testing.assert_close(function(x).cpu(), function(X))) > 0


def test_exact_shapes_compile_everything() -> None:
    isthmus.config.shapes = "exact"
    x = X.to("jax")
    assert compilations(lambda: x * 2) == 1


def test_errors_are_those_of_the_cpu() -> None:
    x = X.to("jax")
    with pytest.raises(IndexError, match="out of range"):
        x.index_select(0, torch.tensor([7]).to("jax"))
    with pytest.raises(RuntimeError, match="must match"):
        x + torch.ones(5, dtype=torch.long).to("jax")


def test_writes_and_gradients() -> None:
    f = F.clone().to("jax").requires_grad_()
    (f * f + f).neg().sum().backward()
    expected = F.clone().requires_grad_()
    (expected * expected + expected).neg().sum().backward()
    assert f.grad is not None
    torch.testing.assert_close(f.grad.cpu(), expected.grad)
    y = f.detach() * 2
    z = y.t()
    y.add_(1)
    assert torch.equal((z + 0).cpu(), (F * 2 + 1).t())


@pytest.mark.parametrize("lazy", [False, True])
def test_the_host_does_not_wait_for_the_device(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op on an array that is still being computed is compiled, and stays so."""

    def added() -> tuple[list[int], int]:
        before = counters.counts["small ops on the host"]
        with isthmus.lazy() if lazy else contextlib.nullcontext():
            found = (X.to("jax")[0] + 5).cpu().tolist()
        return found, counters.counts["small ops on the host"] - before

    expected = (X[0] + 5).tolist()
    monkeypatch.setattr(small_graphs if lazy else small_ops, "is_there", lambda held: False)
    assert added() == (expected, 0)
    assert compilations(lambda: added()) == 0
