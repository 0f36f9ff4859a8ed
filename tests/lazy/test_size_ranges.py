"""Lazy mode with sizes that change: few programs, results of the exact ones, and nothing overwritten that is held."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import isthmus
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.slack import Slack
from isthmus._program import ranges
from isthmus._runtime import background, counters
from tests.interpreters import fresh


@pytest.fixture(autouse=True)
def changing_sizes() -> Iterator[None]:
    """Count from nothing, with what users have who touch no setting."""
    assert isthmus.config.shapes == "auto"
    isthmus.clear_caches()
    try:
        yield
    finally:
        isthmus.config.shapes = "auto"
        isthmus.clear_caches()


class Compilations:
    def __init__(self) -> None:
        self.start = counters.counts["compilations"]

    @property
    def count(self) -> int:
        return counters.counts["compilations"] - self.start


def scores(x: torch.Tensor) -> torch.Tensor:
    """Attention of a sequence to itself, then a mean: masks, products and a size as a value."""
    weights = (x @ x.transpose(-1, -2)).masked_fill(
        torch.ones(x.shape[-2], x.shape[-2], device=x.device).triu(1).bool(), float("-inf")
    )
    return (weights.softmax(-1) @ x).mean(-2)


def agree(sizes: list[tuple[int, ...]], function=scores, most: int | None = None) -> int:  # type: ignore[no-untyped-def]
    """Check a function on tensors of these sizes against the CPU; return how many programs were compiled."""
    compilations = Compilations()
    for size in sizes:
        x = torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))
        with isthmus.lazy():
            found = function(x.to("jax")).cpu()
        torch.testing.assert_close(found, function(x), rtol=1e-5, atol=1e-5, equal_nan=True)
    if most is not None:
        assert compilations.count <= most
    return compilations.count


# The first exactly; then up to 16 and up to 32. Where padding is free one program serves all.
COUNTS = [((16, 64), 3), ((2, 8), 2)]


@pytest.mark.parametrize(("others", "count"), COUNTS)
def test_the_second_size_makes_a_program_for_a_range(others: tuple[int, int], count: int) -> None:
    rows, width = others
    assert agree([(rows, n, width) for n in (5, 9, 10, 16, 12, 11, 13, 17, 32, 31)]) == count
    assert counters.counts["padding added"]


def test_one_is_a_size_like_others() -> None:
    assert agree([(2, n, 8) for n in (5, 1, 9, 2, 31, 1)]) == 2


def test_exact_sizes_compile_each_time() -> None:
    isthmus.config.shapes = "exact"
    assert agree([(2, n, 8) for n in (9, 10, 11, 12)]) == 4


def test_sizes_at_the_edges() -> None:
    agree([(2, n, 8) for n in (5, 7, 0, 1, 2, 3, 15, 16, 17, 8, 9)])


def test_two_sizes() -> None:
    assert agree([(b, s, 8) for b, s in ((3, 5), (3, 9), (5, 9), (6, 13), (7, 10), (8, 16), (5, 12))], most=5)


def test_sizes_that_are_equal_at_first() -> None:
    agree([(n, m, 8) for n, m in ((5, 5), (7, 7), (7, 9), (6, 11), (12, 6))])


def test_a_guess_that_breaks() -> None:
    """A size whose square is a dim is no line through two points, so the third graph does not fit."""
    agree(
        [(n, n, 2) for n in (3, 5, 9, 6, 7)], lambda x: x.reshape(x.shape[0] * x.shape[1], -1).cumsum(0)[-1]
    )


def test_what_is_refused_is_compiled_exactly_and_counted() -> None:
    before = sum(ranges.refusals.values())
    agree([(4, n) for n in (6, 10, 14)], lambda x: torch.fft.fft(x).abs())
    assert sum(ranges.refusals.values()) > before


def test_an_index_past_the_true_size_raises() -> None:
    for n in (5, 9, 10):
        with isthmus.lazy():
            x = torch.arange(float(n)).to("jax")
            assert x[torch.tensor([n - 1]).to("jax")].item() == n - 1
    with isthmus.lazy():
        x = torch.arange(11.0).to("jax")[torch.tensor([11]).to("jax")]
        with pytest.raises(IndexError, match="out of"):
            x.item()


def test_random_numbers_are_those_of_the_exact_program() -> None:
    def draws(shapes: str) -> list[torch.Tensor]:
        isthmus.config.shapes = shapes
        torch.manual_seed(0)
        results = []
        for n in (5, 9, 10, 12):
            with isthmus.lazy():
                x = torch.ones(3, n).to("jax")
                results.append(F.dropout(x, 0.5).cpu())
        return results

    for exact, found in zip(draws("exact"), draws("auto"), strict=True):
        assert torch.equal(exact, found)


def grow(cache: torch.Tensor, n: int) -> torch.Tensor:
    return torch.cat([cache, torch.full((2, 1, cache.shape[2]), float(n), device=cache.device)], 1)


def pointer(cache: torch.Tensor) -> int | None:
    """Return where the array of a cache with slack is in memory."""
    held = buffer_of(cache).held
    return held.array.unsafe_buffer_pointer() if type(held) is Slack else None


def test_a_growing_cache_is_updated_in_place() -> None:
    compilations = Compilations()
    expected = torch.zeros(2, 5, 512)
    with isthmus.lazy():
        cache = expected.to("jax")
        total = cache.sum()
        pointers = []
        for n in range(40):
            cache, expected = grow(cache, n), grow(expected, n)
            total = total + cache[0, -1, 0]
            assert total.item() == sum(range(n + 1))
            pointers.append(pointer(cache))
        assert torch.equal(cache.cpu(), expected)
    # The first size and the first sum exactly, then up to 8, 16, 32 and 64 tokens.
    assert compilations.count <= 8
    assert pointers.count(None) <= 6, "an array without padding has no slack"
    assert len(set(pointers)) <= 8, "a token takes the memory of the cache before it"


def test_a_cache_that_is_held_is_not_overwritten() -> None:
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    expected = torch.zeros(2, 5, 4)
    with isthmus.lazy():
        cache = expected.to("jax")
        for n in range(12):
            cache, expected = grow(cache, n), grow(expected, n)
            (cache * 1).sum().item()
            if n % 3 == 0:
                held.append((cache, expected))
            if n % 4 == 0:
                held.append((copy.deepcopy(cache), expected))
                held.append((cache[:, -3:], expected[:, -3:]))
        for found, wanted in held:
            assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("last", [torch.neg, torch.cumsum, torch.abs, torch.sin])
def test_a_tensor_read_after_its_padding_was_recorded_is_not_overwritten(
    last: Callable[..., torch.Tensor],
) -> None:
    """A read puts the cut array into the buffer, and the trace alone has the padded one: both hold one memory."""
    with isthmus.lazy():
        for n in (5, 9, 12, 17):
            values = torch.arange(16.0 * n).reshape(16, n)
            x = values.to("jax")
            y = x * 2
            isthmus.sync()
            z = y + 1
            assert torch.equal(y.cpu(), values * 2)
            # The last turn has a graph of its own, which is compiled exactly and cuts what is padded.
            z = (last(z, 1) if last is torch.cumsum else last(z)) if n == 17 else z * 3
            z.sum().item()
            assert torch.equal(y.cpu(), values * 2)


class Block(nn.Module):
    """A layer of a language model."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(40, 16), nn.LayerNorm(16), nn.Dropout(dropout)
        self.qkv, self.mix, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 40)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(F.gelu(self.drop(x)))


def train(device: str, lengths: list[int], dropout: float) -> list[float]:
    """Train on a batch of each length; return the losses."""
    torch.manual_seed(0)
    model = Block(dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for n in lengths:
        tokens = torch.randint(0, 40, (4, n), generator=torch.Generator().manual_seed(n)).to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


TWENTY = [54, 34, 23, 40, 42, 13, 14, 25, 52, 39, 27, 20, 19, 30, 36, 29, 37, 47, 45, 55]


@pytest.mark.parametrize("exactly", [True, False], ids=["an exact program", "a program for a range"])
def test_what_a_read_has_cut_is_not_overwritten(exactly: bool) -> None:
    """Between recording and running, a read takes the padding of a leaf away: then a tensor holds what was cut."""
    with isthmus.lazy():
        for n in (5000, 5100, 5200):
            x = torch.ones(n).to("jax") * 2 + 1
            isthmus.sync()
            y = x.neg()  # has a program for a range from the second size on
            isthmus.sync()
        padded = torch.ones(5300).to("jax") * 2 + 1
        isthmus.sync()
        assert type(buffer_of(padded).held) is Slack
        y = padded * 3 - 7 if exactly else padded.neg()
        assert padded.tolist() == [3.0] * 5300
        assert y.tolist() == [2.0 if exactly else -3.0] * 5300
        assert padded.tolist() == [3.0] * 5300


def test_training_on_sentences_of_many_lengths() -> None:
    compilations = Compilations()
    with isthmus.lazy():
        found = train("jax", TWENTY, 0.0)
    assert compilations.count <= 8
    torch.testing.assert_close(found, train("cpu", TWENTY, 0.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_training_with_dropout_has_the_losses_of_exact_programs(count: int) -> None:
    lengths = TWENTY[:count]
    compilations = Compilations()
    with isthmus.lazy():
        found = train("jax", lengths, 0.3)
    assert compilations.count <= 8
    isthmus.config.shapes = "exact"
    with isthmus.lazy():
        expected = train("jax", lengths, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_last_batch_of_an_epoch_is_one_program_more() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    batches = [torch.randn(n, 16) for n in (32, 32, 32, 7)] * 2

    def losses(device: str) -> list[float]:
        own = copy.deepcopy(model).to(device)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
        found = []
        for batch in batches:
            loss = own(batch.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    with isthmus.lazy():
        losses("jax")  # the first step of an optimizer is another graph, and so is the second
        isthmus.clear_caches()
        compilations = Compilations()
        found = losses("jax")
    torch.testing.assert_close(found, losses("cpu"), rtol=1e-5, atol=1e-5)
    # The first step, steps with momentum, and the short batch.
    assert compilations.count <= 3


@pytest.mark.parametrize("jitted", [False, True])
def test_gradients_of_slices_of_a_table(jitted: bool) -> None:
    """Where such a gradient starts and ends is an input of a recorded program, and a size of one for a range."""

    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        positions = nn.Parameter(torch.randn(64, 96, device="cpu").to(device))
        optimizer = torch.optim.SGD([positions], lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            n = x.shape[1]
            loss = (x + positions[:n] + positions[64 - n :]).square().mean() + positions[3].sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = isthmus.jit(step) if jitted and device == "jax" else step
        found = []
        for n in (50, 41, 33, 64, 60, 37, 50, 41):
            x = torch.randn(2, n, 96, generator=torch.Generator().manual_seed(n))
            found.append(run(x.to(device)).item())
        return found

    compilations = Compilations()
    refused = counters.counts["sizes refused"]
    with contextlib.nullcontext() if jitted else isthmus.lazy():
        found = losses("jax")
    torch.testing.assert_close(found, losses("cpu"), rtol=1e-5, atol=1e-5)
    assert counters.counts["sizes refused"] == refused
    assert compilations.count <= 4


def test_a_size_that_comes_often_gets_its_exact_program() -> None:
    agree([(16, n, 64) for n in (5, 9, *[12] * 70)])
    # Compiled on another thread.
    for _ in range(600):
        if counters.counts["compiled in the background"]:
            break
        time.sleep(0.05)
    before = counters.counts["padding added"]
    agree([(16, 12, 64)])
    assert counters.counts["compiled in the background"] == 1
    assert counters.counts["padding added"] == before


def test_deterministic_algorithms_keep_the_first_program() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        agree([(16, n, 64) for n in (5, 9, *[12] * 70)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert not background.is_busy()
    assert counters.counts["compiled in the background"] == 0


@pytest.fixture(autouse=True)
def counted_from_zero() -> None:
    counters.counts["compiled in the background"] = 0


LENGTHS = """
import sys, torch, isthmus
isthmus.config.shapes = "auto"
isthmus.config.cache = sys.argv[1]
for n in map(int, sys.argv[2].split(",")):
    with isthmus.lazy():
        x = torch.ones(16, n, 64).to("jax")
        (x.cumsum(1) @ x.transpose(1, 2)).sum().item()
counts = isthmus.metrics.counts()
print(counts["compilations"], counts.get("loaded from disk", 0))
"""


def test_another_process_finds_the_programs_of_padded_sizes(tmp_path: Path) -> None:
    first = fresh(LENGTHS, str(tmp_path), "5,9,12")
    assert first.stdout.split() == ["2", "0"], first
    # Other sizes of the same range: only the first one, which is exact, is new.
    second = fresh(LENGTHS, str(tmp_path), "6,10,15")
    assert second.stdout.split() == ["2", "1"], second
