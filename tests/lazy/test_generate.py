"""``generate()`` with a growing cache: the tokens of the CPU in each mode, and by few programs for a small Llama."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import isthmus
from tests.lazy.test_size_ranges import changing_sizes  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
# Compilations for a prompt and 64 tokens; a second prompt of another length may take two more.
MOST = {"lazy": 12, "compile": 20, "eager": 40}


@pytest.fixture(autouse=True)
def small_ops_on_the_host(fresh_dynamo: None) -> Iterator[None]:
    """Run with the default, which the other tests change."""
    isthmus.config.small_ops = "host"
    yield
    isthmus.config.small_ops = "device"


def llama(layers: int = 2) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(layers)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=256, eos_token_id=None, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=256, vocab_size=256, eos_token_id=None, pad_token_id=0,
        bos_token_id=1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def t5() -> Any:
    """A decoder that looks at an encoder's result beside its own cache."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=256, decoder_start_token_id=0,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def on_device(model: nn.Module, mode: str) -> nn.Module:
    model = copy.deepcopy(model).to("jax")
    if mode == "compile":
        model.forward = torch.compile(model.forward, backend="isthmus")  # type: ignore[method-assign]
    return model


def generate(model: Any, prompt: torch.Tensor, mode: str, **options: Any) -> torch.Tensor:
    with torch.no_grad(), isthmus.lazy() if mode == "lazy" else contextlib.nullcontext():
        options = {"max_new_tokens": 64, "do_sample": False, **options}
        return model.generate(prompt, **options).cpu()  # type: ignore[no-any-return]


def compilations(run: Callable[[], object]) -> int:
    before = isthmus.metrics.as_dict()["compilations"]["count"]
    run()
    return isthmus.metrics.as_dict()["compilations"]["count"] - before  # type: ignore[no-any-return]


def prompts(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(2, 256, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]


@pytest.mark.parametrize("mode", MOST)
def test_greedy(mode: str) -> None:
    model = llama()
    device = on_device(model, mode)
    counts = []
    for prompt in prompts(7, 12, 14, 30):
        expected = generate(model, prompt, "eager")
        counts.append(
            compilations(lambda: same(generate(device, prompt.to("jax"), mode), expected))  # noqa: B023
        )
    assert counts[0] <= MOST[mode], counts
    assert counts[1] <= 2, counts


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found, expected)


# Samples are drawn from the device's generator, so they are those of exact programs, not of the CPU.
@pytest.mark.parametrize("mode", MOST)
def test_sampling_draws_what_exact_programs_draw(mode: str) -> None:
    def sample(shapes: str) -> list[torch.Tensor]:
        isthmus.config.shapes = shapes
        isthmus.clear_caches()
        torch._dynamo.reset()
        device = on_device(llama(), mode)
        found = []
        for prompt in prompts(7, 12):
            torch.manual_seed(3)
            found.append(
                generate(device, prompt.to("jax"), mode, do_sample=True, top_k=20, max_new_tokens=12)
            )
        return found

    for exact, found in zip(sample("exact"), sample("auto"), strict=True):
        same(found, exact)


@pytest.mark.parametrize("mode", MOST)
def test_beams(mode: str) -> None:
    """The cache is reordered, and beams hold parts of the same one."""
    model = llama()
    device = on_device(model, mode)
    for prompt in prompts(7, 12):
        expected = generate(model, prompt, "eager", num_beams=3, max_new_tokens=16)
        same(generate(device, prompt.to("jax"), mode, num_beams=3, max_new_tokens=16), expected)


@pytest.mark.parametrize("mode", MOST)
def test_batches_padded_at_the_left(mode: str) -> None:
    model = llama()
    device = on_device(model, mode)
    for longest in (9, 13):
        ids = torch.zeros(3, longest, dtype=torch.long)
        for row, prompt in enumerate(prompts(longest, longest - 4, longest - 2)):
            ids[row, longest - prompt.shape[1] :] = prompt[0]
        mask = (ids != 0).long()
        expected = generate(model, ids, "eager", attention_mask=mask, max_new_tokens=24)
        found = generate(device, ids.to("jax"), mode, attention_mask=mask.to("jax"), max_new_tokens=24)
        same(found, expected)


@pytest.mark.parametrize("mode", MOST)
def test_assisted_decoding(mode: str) -> None:
    """The assistant's cache is cut back to the tokens that the model accepts."""
    model, assistant = llama(), llama(1)
    device, helper = on_device(model, mode), on_device(assistant, mode)
    for prompt in prompts(7, 12):
        expected = generate(model, prompt, "eager", assistant_model=assistant, max_new_tokens=24)
        same(generate(device, prompt.to("jax"), mode, assistant_model=helper, max_new_tokens=24), expected)


# Nobody tuned for these.
@pytest.mark.parametrize("make", [gpt2, t5])
@pytest.mark.parametrize("mode", MOST)
def test_other_models(mode: str, make: Callable[[], Any]) -> None:
    model = make()
    device = on_device(model, mode)
    for prompt in prompts(7, 12, 9):
        expected = generate(model, prompt, "eager", max_new_tokens=24)
        same(generate(device, prompt.to("jax"), mode, max_new_tokens=24), expected)
    beams = {"num_beams": 3, "max_new_tokens": 10}
    expected = generate(model, prompts(9)[0], "eager", **beams)
    same(generate(device, prompts(9)[0].to("jax"), mode, **beams), expected)
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), *prompts(9)], 1)
    mask = (ids != 0).long()
    expected = generate(model, ids, "eager", attention_mask=mask, max_new_tokens=10)
    found = generate(device, ids.to("jax"), mode, attention_mask=mask.to("jax"), max_new_tokens=10)
    same(found, expected)


@pytest.mark.parametrize("mode", MOST)
def test_a_copy_of_a_cache_is_continued_twice(mode: str) -> None:
    """What is written into the slack of one cache is not in its copy, whichever is continued first."""
    model = llama()
    prompt, token, other = *prompts(7), torch.tensor([[5]]), torch.tensor([[9]])

    def run(model: Any, device: str) -> list[torch.Tensor]:
        found = []
        with torch.no_grad(), isthmus.lazy() if mode == "lazy" else contextlib.nullcontext():
            cache = model(prompt.to(device), use_cache=True).past_key_values
            for _ in range(4):  # past the first sizes, until the cache has slack
                cache = model(token.to(device), past_key_values=cache, use_cache=True).past_key_values
            branch = copy.deepcopy(cache)
            for ids in (other, token, other):
                found.append(model(ids.to(device), past_key_values=cache, use_cache=True).logits.cpu())
                found.append(model(token.to(device), past_key_values=branch, use_cache=True).logits.cpu())
        return found

    found = run(on_device(model, mode), "jax")
    for ours, theirs in zip(found, run(model, "cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
