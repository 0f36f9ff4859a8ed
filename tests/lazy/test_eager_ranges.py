"""Eager ops with sizes that change: few programs, and the values, views, writes and gradients of the CPU."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import isthmus
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.slack import Slack
from isthmus._program import ranges
from isthmus._runtime import counters
from tests.lazy.test_size_ranges import TWENTY, Compilations, changing_sizes, grow, train  # noqa: F401

Function = Callable[[torch.Tensor], torch.Tensor]
# The first exactly, then up to 16, up to 32; the edges of both.
SIZES = (5, 9, 10, 16, 12, 17, 32, 31, 2, 1, 0)
FEW = (5, 9, 16, 12)


def random(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def agree(function: Function, sizes: tuple[int, ...] = SIZES, rows: int = 3) -> int:
    """Check a function of a matrix against the CPU at each width; return how many programs were compiled."""
    compilations = Compilations()
    for n in sizes:
        x = random(rows, n)
        torch.testing.assert_close(
            function(x.to("jax")).cpu(), function(x), rtol=1e-5, atol=1e-5, equal_nan=True
        )
    return compilations.count


# Each reads across padding, or has a size in its arguments or as a value.
FUNCTIONS: dict[str, Function] = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(),
    "amin": lambda x: x.amin(1) if x.shape[1] else x.sum(1),
    "all": lambda x: (x > -100).all(1),
    "var": lambda x: x.var(1),
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1).values,
    "argmax": lambda x: x.argmax(1) if x.shape[1] else x.sum(1),
    "matmul": lambda x: x @ x.t(),
    "cat": lambda x: torch.cat([x, x[:, :1], x], 1),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "pad": lambda x: F.pad(x, (1, 2), value=3.0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]) if x.shape[1] else x,
    "prod": lambda x: x.prod(1),
    "norm": lambda x: x.norm(dim=1),
    "logsumexp": lambda x: x.logsumexp(1),
    "gather": lambda x: x.gather(1, torch.zeros(3, 1, dtype=torch.long).to(x.device)) if x.shape[1] else x,
    "repeat": lambda x: x.repeat(2, 3),
    "where": lambda x: torch.where(x > 0, x, torch.zeros((), device=x.device)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    agree(FUNCTIONS[name], FEW)


# Views of the result of an op whose buffer has slack, and of a leaf.
VIEWS: dict[str, Function] = {
    "transpose": lambda x: (x + 1).t() * 2,
    "select": lambda x: (x + 1)[1] * 2,
    "slice": lambda x: (x + 1)[:, 1:] * 2,
    "last": lambda x: (x + 1)[:, -1:].sum(0),
    "step": lambda x: (x + 1)[:, ::2].sum(1),
    "split": lambda x: torch.stack([part.sum() for part in (x + 1).split(4, 1)] or [x.sum()]),
    "reshape": lambda x: (x + 1).reshape(-1).cumsum(0),
    "expand": lambda x: (x + 1)[:, None].expand(-1, 2, -1).sum(2),
    "as_strided": lambda x: (x + 1).as_strided((x.shape[1],), (1,), x.shape[1]).cumsum(0),
    "diagonal": lambda x: (x + 1).diagonal() * 2,
    "unfold": lambda x: (x + 1).unfold(1, 2, 1).sum(2) if x.shape[1] > 1 else x,
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    agree(VIEWS[name], FEW)


def written(x: torch.Tensor, write: Callable[[torch.Tensor], object]) -> torch.Tensor:
    y = x * 2
    before = y + 0  # has slack too, and must not change
    write(y)
    return torch.stack([y, before, y * 3])


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "whole": lambda y: y.add_(1),
    "column": lambda y: y[:, -1:].mul_(5),
    "row": lambda y: y[1].zero_(),
    "copy": lambda y: y.copy_(y.flip(1)),
    "mask": lambda y: y.masked_fill_(y > 0, 7.0),
    "item": lambda y: y.__setitem__((0, slice(None)), 4.0),
    "out": lambda y: torch.mul(y, y, out=y),
    "through a view": lambda y: y.t().sub_(1),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_to_a_tensor_with_slack(name: str) -> None:
    agree(lambda x: written(x, WRITES[name]), FEW)


@pytest.mark.slow
def test_values_views_and_writes_at_the_edges_of_ranges() -> None:
    for function in (*FUNCTIONS.values(), *VIEWS.values()):
        agree(function)
    for write in WRITES.values():
        agree(lambda x, write=write: written(x, write), SIZES[:-2])  # type: ignore[misc]


def test_few_programs() -> None:
    # 5 exactly; then one program up to 16, one up to 32.
    sizes = (5, 9, 10, 16, 12, 11, 13, 17, 32, 31)
    agree(lambda x: x.softmax(1), (4,), rows=2)  # what a process compiles once
    assert agree(lambda x: x.softmax(1), sizes, rows=1024) == 3
    isthmus.clear_caches()
    # Where padding is free one program serves all.
    assert agree(lambda x: x.softmax(1), (*sizes, 1)) == 2
    assert counters.counts["padding added"]


def images() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a network whose layers differ in one size, that of images, and what to train it on."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1)]
    layers += [nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1)]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 5))
    return model.to("jax"), torch.randn(2, 3, 24, 24).to("jax"), torch.tensor([1, 3]).to("jax")


def test_layers_of_other_sizes_are_compiled_exactly() -> None:
    """Nothing changes from step to step, so results are those of exact programs bit for bit, and nothing is padded."""

    def losses(shapes: str) -> tuple[list[float], int]:
        isthmus.config.shapes = shapes
        isthmus.clear_caches()
        compilations = Compilations()
        model, x, y = images()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found, compilations.count

    before = counters.counts["padding added"]
    assert losses("auto") == losses("exact")
    assert counters.counts["padding added"] == before


def turns(count: int) -> tuple[int, list[torch.Tensor]]:
    """Run an op on two sizes in turn, with a read between; return how often arrays were padded, and the results."""
    before, found = counters.counts["padding added"], []
    for _ in range(count):
        for n in (5, 9):
            found.append(random(512, n).to("jax").cumsum(0).sum(1).cpu())
    return counters.counts["padding added"] - before, found


def test_sizes_that_stay_get_programs_of_their_own() -> None:
    added, found = turns(20)
    assert added
    added, again = turns(4)
    assert not added
    for one, other in zip(found, again, strict=False):
        torch.testing.assert_close(one, other)


def test_deterministic_algorithms_keep_the_first_program() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        _, found = turns(40)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, found[n % 2]) for n, one in enumerate(found))


def test_exact_sizes_compile_each_time() -> None:
    isthmus.config.shapes = "exact"
    assert agree(lambda x: x.softmax(1), (9, 10, 11, 12)) == 4


def test_back_to_exact_sizes() -> None:
    """A plan that was made for a range runs, given padding or not, when the setting is exact again."""
    agree(lambda x: x.cumsum(1), (5, 9, 10))
    padded = random(3, 11).to("jax") * 2
    kept = [random(3, n).to("jax") * 2 for n in (9, 10)]
    isthmus.config.shapes = "exact"
    agree(lambda x: x.cumsum(1), (9, 10, 11))
    torch.testing.assert_close(padded.cumsum(1).cpu(), (random(3, 11) * 2).cumsum(1))
    torch.testing.assert_close(kept[0].cumsum(1).cpu(), (random(3, 9) * 2).cumsum(1))


def test_a_size_that_equals_another_by_chance() -> None:
    for rows in (16, 9):
        assert agree(lambda x: x @ x.t() + x.sum(), (5, 7, 9, 16, 12, 10, 17), rows) <= 16


def test_every_size_of_a_parameter_is_compiled_exactly() -> None:
    weights = [nn.Parameter(random(n, 4)).to("jax") for n in (5, 9, 10)]
    weights = [nn.Parameter(weight.detach()) for weight in weights]
    for weight in weights:
        (weight.detach().cpu(), weight * 2)
    assert not any(type(buffer_of(weight).held) is Slack for weight in weights)
    compilations = Compilations()
    for n in (6, 7, 11):
        weight = nn.Parameter(random(n, 4).to("jax"))
        assert type(buffer_of(weight * 2).held) is not Slack
    assert compilations.count == 3


def test_numbers_and_where_a_view_starts() -> None:
    for n in (5, 9, 10, 11, 12, 13):
        if n == 11:
            compilations = Compilations()
        x = random(3, n)
        y = x.to("jax")
        for number in (0.5, 2, True):
            torch.testing.assert_close((y * number).cpu(), x * number)
        torch.testing.assert_close(y[1].cumsum(0).cpu(), x[1].cumsum(0))
        torch.testing.assert_close(y[:, -1].sum(0).cpu(), x[:, -1].sum(0))
    assert compilations.count == 0


def test_views_that_start_at_many_places() -> None:
    for n in (5, 9, 10, 11):
        x = random(3, n)
        y = x.to("jax")
        for start in (0, 1, 2, 1):
            torch.testing.assert_close(y[start].cumsum(0).cpu(), x[start].cumsum(0))
            torch.testing.assert_close(y[:, start:].cumsum(1).cpu(), x[:, start:].cumsum(1))


def test_sizes_that_no_array_has() -> None:
    """What is computed from a scalar alone: an expanded gradient, a matrix of ones."""
    functions: list[Function] = [
        lambda x: torch.ones((), device=x.device).expand(3, x.shape[1]) / x.shape[1],
        lambda x: torch.eye(x.shape[1], device=x.device),
    ]
    for function in functions:
        agree(function, (5, 9))
        assert agree(function, (10, 11, 12, 13)) == 0


def test_random_numbers_are_those_of_the_exact_program() -> None:
    def draws(shapes: str) -> list[torch.Tensor]:
        isthmus.config.shapes = shapes
        torch.manual_seed(0)
        return [F.dropout(random(3, n).to("jax"), 0.5).cpu() for n in (5, 9, 10, 12, 10)]

    for exact, found in zip(draws("exact"), draws("auto"), strict=True):
        assert torch.equal(exact, found)


def test_an_index_past_the_true_size_raises() -> None:
    for n in (5, 9, 10, 11):
        x = torch.arange(float(n)).to("jax")
        assert x[torch.tensor([n - 1]).to("jax")].item() == n - 1
        with pytest.raises(IndexError, match=f"size {n}|out of"):
            x[torch.tensor([n]).to("jax")].item()


def test_what_is_refused_is_compiled_exactly_and_counted() -> None:
    before = sum(ranges.refusals.values())
    agree(lambda x: torch.fft.fft(x).abs(), (6, 10, 14))
    assert sum(ranges.refusals.values()) > before


def test_wrong_calls_raise_as_ever() -> None:
    for n in (5, 9, 10):
        x, y = torch.ones(3, n).to("jax"), torch.ones(3, n + 1).to("jax")
        with pytest.raises(RuntimeError, match=f"size of tensor a \\({n}\\) must match"):
            x + y
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            x @ y


def test_gradients() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = (x.softmax(1) * x.cumsum(1)).tanh()
        (torch.cat([y, y[:, :1]], 1) ** 2).mean().backward()
        assert x.grad is not None
        return x.grad

    assert agree(gradient, (*FEW, 10, 11)) <= 2 * 45


@pytest.mark.slow
def test_training_on_sentences_of_many_lengths() -> None:
    torch.testing.assert_close(
        train("jax", TWENTY[:8], 0.0), train("cpu", TWENTY[:8], 0.0), rtol=1e-5, atol=1e-5
    )
    compilations = Compilations()
    train("jax", [41, 33, 26, 18, 44], 0.0)
    # These lengths are new and in ranges that are there: of some 90 ops only those that write compile.
    assert compilations.count <= 5 * 6


def test_slack_that_is_cut_to_a_bucket_is_not_overwritten() -> None:
    """32 elements in an array of 64 are cut for a program up to 32, which overwrites what is padded for it."""
    agree(lambda x: x * 2, (5, 20, 21))
    values = random(3, 32)
    x = values.to("jax")
    padded = jnp.pad(buffer_of(x).value, ((0, 0), (0, 32)), constant_values=jnp.nan)
    buffer_of(x).held = Slack(padded, (3, 32))
    for _ in range(2):
        torch.testing.assert_close((x * 2).cpu(), values * 2)
    assert torch.equal(x.cpu(), values)


def test_a_cache_that_is_held_is_not_overwritten() -> None:
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    expected = torch.zeros(2, 5, 4)
    cache = expected.to("jax")
    for n in range(14):
        cache, expected = grow(cache, n), grow(expected, n)
        held.append((cache, expected))
        held.append((copy.deepcopy(cache), expected))
        held.append((cache[:, -3:], expected[:, -3:]))
    for found, wanted in held:
        assert torch.equal(found.cpu(), wanted)


def test_two_threads_with_new_sizes() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            agree(lambda x: x.cumsum(1).softmax(1), (5, 9, 10, 12, 17, 18))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
