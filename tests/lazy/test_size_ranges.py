"""Lazy mode with sizes that change: few programs, results of the exact ones, and nothing overwritten that is held."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import isthmus
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.slack import Slack
from isthmus._program import ranges
from isthmus._runtime import counters


@pytest.fixture(autouse=True)
def changing_sizes() -> Iterator[None]:
    before = isthmus.config.shapes
    isthmus.config.shapes = "auto"
    isthmus.clear_caches()
    try:
        yield
    finally:
        isthmus.config.shapes = before
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


def test_the_second_size_makes_a_program_for_a_range() -> None:
    # 5 exactly; then one program up to 16, one up to 32.
    assert agree([(2, n, 8) for n in (5, 9, 10, 16, 12, 11, 13, 17, 32, 31)]) == 3
    assert counters.counts["padding added"]


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
    return torch.cat([cache, torch.full((2, 1, 4), float(n), device=cache.device)], 1)


def pointer(cache: torch.Tensor) -> int | None:
    """Return where the array of a cache with slack is in memory."""
    held = buffer_of(cache).held
    return held.array.unsafe_buffer_pointer() if type(held) is Slack else None


def test_a_growing_cache_is_updated_in_place() -> None:
    compilations = Compilations()
    expected = torch.zeros(2, 5, 4)
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


def test_training_on_sentences_of_many_lengths() -> None:
    compilations = Compilations()
    with isthmus.lazy():
        found = train("jax", TWENTY, 0.0)
    assert compilations.count <= 8
    torch.testing.assert_close(found, train("cpu", TWENTY, 0.0), rtol=1e-5, atol=1e-5)


def test_training_with_dropout_has_the_losses_of_exact_programs() -> None:
    lengths = TWENTY[:5]
    with isthmus.lazy():
        found = train("jax", lengths, 0.3)
    isthmus.config.shapes = "exact"
    with isthmus.lazy():
        expected = train("jax", lengths, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def generate(model: nn.Module, prompt: torch.Tensor, count: int, **options: object) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(prompt, max_new_tokens=count, do_sample=False, **options).cpu()  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_language_model_generates_with_its_growing_cache(options: dict[str, object]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=256, eos_token_id=None, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    count = 64 if not options else 16
    prompts = [torch.randint(2, 256, (1, n)) for n in (7, 12)]
    expected = [generate(model, prompt, count, **options) for prompt in prompts]
    model.to("jax")
    with isthmus.lazy():
        compilations = Compilations()
        assert torch.equal(generate(model, prompts[0].to("jax"), count, **options), expected[0])
        if not options:
            assert compilations.count <= 12
        assert torch.equal(generate(model, prompts[1].to("jax"), count, **options), expected[1])
