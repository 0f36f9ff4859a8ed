"""torch.compile with sizes that change: few programs, results of the exact ones, forward and training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import isthmus
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.slack import Slack
from isthmus._program import ranges
from isthmus._runtime import counters
from tests.lazy.test_size_ranges import COUNTS, TWENTY, Block, Compilations, scores


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    isthmus.clear_caches()
    torch.ones(1).to("jax")  # the device's own first program
    yield
    torch._dynamo.reset()
    isthmus.clear_caches()


def compiled(function: Callable[..., Any], shapes: str = "auto", **others: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="isthmus", options={"shapes": shapes}, **others)


def agree(sizes: list[tuple[int, ...]], function: Callable[..., Any] = scores, **others: Any) -> int:
    """Check a compiled function on tensors of these sizes against the CPU; return how many programs were compiled."""
    compilations, run = Compilations(), compiled(function, **others)
    for size in sizes:
        x = torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))
        found = run(x.to("jax")).cpu()
        torch.testing.assert_close(found, function(x), rtol=1e-5, atol=1e-5, equal_nan=True)
    return compilations.count


LENGTHS = (5, 9, 10, 16, 12, 11, 13, 17, 32, 31)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("others", "count"), COUNTS)
def test_the_second_size_makes_a_program_for_a_range(
    others: tuple[int, int], count: int, dynamic: bool | None
) -> None:
    rows, width = others
    assert agree([(rows, n, width) for n in LENGTHS], dynamic=dynamic) == count


def test_exact_sizes_compile_each_time() -> None:
    assert agree([(2, n, 8) for n in (9, 10, 11, 12)], shapes="exact") == 4


def test_the_setting_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(2, n, 8) for n in (9, 10, 11, 12)]
    assert isthmus.config.shapes == "auto"
    assert agree(sizes, shapes="config") == 2
    torch._dynamo.reset()
    isthmus.config.shapes = "exact"
    try:
        assert agree(sizes, shapes="config") == 4
    finally:
        isthmus.config.shapes = "auto"


@pytest.mark.parametrize("dynamic", [False, None])
def test_layers_of_other_widths_are_compiled_exactly(dynamic: bool | None) -> None:
    """Sizes that Dynamo fixes do not change: those of parameters, and all where ``dynamic`` is false."""
    before = counters.counts["padding added"]
    compilations = Compilations()
    for width in (8, 12, 20):
        torch._dynamo.reset()
        layer = nn.Linear(width, width)
        run = torch.compile(copy.deepcopy(layer).to("jax"), backend="isthmus", dynamic=dynamic)
        x = torch.randn(4, width)
        torch.testing.assert_close(run(x.to("jax")).cpu(), layer(x))
    assert compilations.count == 3
    if dynamic is False:
        compilations = Compilations()
        for n in (5, 6, 7):
            torch.testing.assert_close(run(torch.ones(n, width).to("jax")).cpu(), layer(torch.ones(n, width)))
        assert compilations.count == 3
    assert counters.counts["padding added"] == before


def test_sizes_at_the_edges() -> None:
    agree([(2, n, 8) for n in (5, 7, 0, 1, 2, 3, 15, 16, 17, 8, 9)])


def test_two_sizes() -> None:
    sizes = [(b, s, 8) for b, s in ((3, 5), (3, 9), (5, 9), (6, 13), (7, 10), (8, 16), (5, 12))]
    assert agree(sizes) <= 5


def test_what_is_refused_is_compiled_exactly_and_counted() -> None:
    before = sum(ranges.refusals.values())
    agree([(4, n) for n in (6, 10, 14)], lambda x: torch.fft.fft(x).abs())
    assert sum(ranges.refusals.values()) > before


def test_results_stay_padded_until_they_are_read() -> None:
    run = compiled(lambda x: x * 2)
    for n in (5, 9, 10):
        y = run(torch.arange(float(n)).to("jax"))
    assert type(buffer_of(y).held) is Slack
    assert run(y).tolist() == [4.0 * n for n in range(10)]
    assert (y + 1).tolist() == [2.0 * n + 1 for n in range(10)]
    assert type(buffer_of(y).held) is not Slack


def test_arguments_are_written() -> None:
    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        total.add_(x.sum())
        return x[1:] + total

    run, total, expected = compiled(step), torch.zeros(()).to("jax"), torch.zeros(())
    compilations = Compilations()
    for n in (5, 9, 10, 16, 12, 2):
        x = torch.arange(float(n))
        y = x.to("jax")
        for _ in range(2):  # the second call is given what the first has written
            torch.testing.assert_close(run(y, total).cpu(), step(x, expected))
        torch.testing.assert_close(y.cpu(), x)
        torch.testing.assert_close(total.cpu(), expected)
    assert compilations.count <= 4


def test_an_index_past_the_true_size_raises() -> None:
    run = compiled(lambda x, at: x[at])
    for n in (5, 9, 10):
        x = torch.arange(float(n)).to("jax")
        assert run(x, torch.tensor([n - 1]).to("jax")).item() == n - 1
    with pytest.raises(IndexError, match="out of"):
        run(torch.arange(11.0).to("jax"), torch.tensor([11]).to("jax")).item()


def test_random_numbers_are_those_of_the_exact_program() -> None:
    def draws(shapes: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        run = compiled(lambda x: F.dropout(x, 0.5) + torch.rand_like(x), shapes)
        return [run(torch.ones(3, n).to("jax")).cpu() for n in (5, 9, 10, 12)]

    for exact, found in zip(draws("exact"), draws("auto"), strict=True):
        assert torch.equal(exact, found)


def train(device: str, lengths: list[int], dropout: float, shapes: str | None) -> tuple[list[float], int]:
    """Train on a batch of each length, compiled if ``shapes`` are given; return losses and graphs compiled."""
    isthmus.clear_caches()  # the count is that of a new process, whatever ran before
    torch.manual_seed(0)
    model: Any = Block(dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    function = loss_of if shapes is None else compiled(loss_of, shapes)
    losses, count = [], 0
    for n in lengths:
        tokens = torch.randint(0, 40, (4, n), generator=torch.Generator().manual_seed(n)).to(device)
        compilations = Compilations()
        loss = function(tokens)
        loss.backward()
        count += compilations.count
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, count


def test_training_on_sentences_of_many_lengths() -> None:
    found, count = train("jax", TWENTY, 0.0, "auto")
    assert count <= 8
    torch.testing.assert_close(found, train("cpu", TWENTY, 0.0, None)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_training_with_dropout_has_the_losses_of_exact_programs(number: int) -> None:
    lengths = TWENTY[:number]
    found, count = train("jax", lengths, 0.3, "auto")
    assert count <= 8
    torch._dynamo.reset()
    torch.testing.assert_close(found, train("jax", lengths, 0.3, "exact")[0], rtol=1e-5, atol=1e-5)


class LearnedPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.out = nn.Embedding(32, 16), nn.Embedding(64, 16), nn.Linear(16, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.out(x)  # type: ignore[no-any-return]


def test_a_table_of_which_a_size_says_how_much() -> None:
    """A slice of fixed length ends where a size says, which is a symbol in the range and no number."""
    torch.manual_seed(0)
    model = LearnedPositions()
    ours = copy.deepcopy(model).to("jax")
    compiled = torch.compile(ours, backend="isthmus")
    refused = sum(ranges.refusals.values())
    for n in (9, 13, 20, 31, 17, 5, 64):
        tokens = torch.arange(2 * n).reshape(2, n) * 7 % 32
        known = counters.counts["compilations"]
        compiled(tokens.to("jax")).square().sum().backward()
        # One range up to 32, forward and backward; the first size has its own, 64 another.
        if n in (20, 31, 17, 5):
            assert counters.counts["compilations"] == known
        model(tokens).square().sum().backward()
    for parameter, expected in zip(ours.parameters(), model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-4)
    assert sum(ranges.refusals.values()) == refused


def test_a_view_may_start_elsewhere() -> None:
    """Runs are found by sizes and whether there is an offset, programs by the offset itself."""
    run = compiled(lambda x: x * 2)
    x = torch.arange(40.0).to("jax")
    for n in (5, 9, 10):
        for start in (0, 1, 2, 7):
            assert run(x[start : start + n]).tolist() == [2.0 * k for k in range(start, start + n)]


def test_one_storage_given_twice_is_not_overwritten() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 3

    run = compiled(step)
    for n in (5, 9, 10, 12):
        x = torch.arange(2.0 * n).to("jax")
        expected = torch.arange(2.0 * n)
        for _ in range(2):
            kept = x.clone()
            torch.testing.assert_close(run(x[:n], x[n:]).cpu(), step(expected[:n], expected[n:]))
            torch.testing.assert_close(x.cpu(), expected)
            assert not torch.equal(kept.cpu(), expected)


def marked(size: tuple[int, ...], dims: dict[int, int | None]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor and its copy on the device, whose dims are marked as changing, up to a largest size."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))
    y = x.to("jax")
    for dim, most in dims.items():
        torch._dynamo.mark_dynamic(y, dim, **({} if most is None else {"min": 2, "max": most}))
    return x, y


def agree_marked(
    sizes: list[tuple[int, ...]],
    dims: dict[int, int | None],
    function: Callable[..., Any] = scores,
    **others: Any,
) -> int:
    compilations, run = Compilations(), compiled(function, **others)
    for size in sizes:
        x, y = marked(size, dims)
        torch.testing.assert_close(run(y).cpu(), function(x), rtol=1e-5, atol=1e-5)
    return compilations.count


def positions(x: torch.Tensor) -> torch.Tensor:
    """Sizes in the places of numbers."""
    n = x.shape[1]
    counted = torch.arange(n, device=x.device)[None, :, None] / n
    return torch.cat([x, (x * counted).sum(1, keepdim=True)], 1) * n


SIZES: list[tuple[int, ...]] = [(2, n, 8) for n in LENGTHS]


@pytest.mark.parametrize("function", [scores, positions])
def test_a_marked_largest_size_is_one_program(function: Callable[..., Any]) -> None:
    assert agree_marked(SIZES, {1: 40}, function, shapes="ranges") == 1


def test_a_size_past_the_marked_one_is_another_graph() -> None:
    compilations, run = Compilations(), compiled(scores, "ranges")
    for n in (5, 30, 17):
        x, y = marked((2, n, 8), {1: 30})
        torch.testing.assert_close(run(y).cpu(), scores(x), rtol=1e-5, atol=1e-5)
    assert compilations.count == 1
    x = torch.randn(2, 50, 8)
    torch.testing.assert_close(run(x.to("jax")).cpu(), scores(x), rtol=1e-5, atol=1e-5)


def test_ranges_begin_with_the_first_size_that_is_marked() -> None:
    # No size exactly; padding is free for arrays as small as these, so one range is enough.
    assert agree_marked(SIZES, {1: None}, shapes="ranges") == 1
    torch._dynamo.reset()
    isthmus.clear_caches()
    assert agree_marked(SIZES, {1: 40}, shapes="auto") == 2


def test_ranges_begin_with_the_first_size_that_is_dynamic() -> None:
    # The number of rows varies too, for all that torch knows: what is free for one size leaves less for the other.
    assert agree(SIZES, shapes="ranges", dynamic=True) == 2


def test_ranges_of_two_sizes_that_are_equal_by_chance() -> None:
    sizes: list[tuple[int, ...]] = [(b, s, 8) for b, s in ((5, 5), (7, 7), (3, 5), (6, 13), (4, 16))]
    assert agree_marked(sizes, {0: 8, 1: 16}, shapes="ranges") == 1


def test_ranges_without_marks_are_found_by_the_second_size() -> None:
    # The first size exactly, and a range for the others.
    assert agree(SIZES, shapes="ranges") == 2


def test_training_on_marked_lengths_compiles_once() -> None:
    run = compiled(lambda x, w: (scores(x * w) ** 2).sum(), "ranges")
    compilations, counts = Compilations(), []
    for n in LENGTHS:
        x, y = marked((2, n, 8), {1: 40})
        w, v = torch.ones(8, requires_grad=True), torch.ones(8, device="jax", requires_grad=True)
        (scores(x * w) ** 2).sum().backward()
        run(y, v).backward()
        torch.testing.assert_close(v.grad.cpu(), w.grad, rtol=1e-4, atol=1e-5)
        counts.append(compilations.count)
    assert counts[-1] - counts[0] == 0, "forward and backward are compiled by the first call"


def test_frozen_parameters() -> None:
    """Ranges take parameters as they are; what depends on them alone is computed at each call."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).eval()
    expected = [model(torch.ones(2, n, 8)).detach() for n in LENGTHS]
    model.to("jax")
    run = torch.compile(model, backend="isthmus", options={"shapes": "auto", "freeze": True})
    compilations = Compilations()
    with torch.no_grad():
        for n, wanted in zip(LENGTHS, expected, strict=True):
            torch.testing.assert_close(run(torch.ones(2, n, 8).to("jax")).cpu(), wanted, rtol=1e-5, atol=1e-5)
    # The first size in two stages, of which one runs once; then up to 16 and 32.
    assert compilations.count <= 4
