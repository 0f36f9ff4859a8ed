"""``isthmus.generate``: the tokens of transformers' own loop on the CPU, from a loop on the device."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isthmus
from isthmus.errors import IsthmusError

transformers = pytest.importorskip("transformers", reason="isthmus.generate is for models of transformers")

VOCABULARY = 64
ENDS = [60, 61]
"""As many ending tokens in all tests, so that they share programs."""


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=VOCABULARY, n_positions=40, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config).eval()


@functools.cache
def pair(kind: Any) -> tuple[Any, Any]:
    """Return a model on the CPU and the same on the device."""
    model = kind()
    return model, copy.deepcopy(model).to("jax")


def prompt(rows: int, length: int) -> Tensor:
    tokens = torch.arange(rows * length).reshape(rows, length)
    return (tokens * 7 + 3) % (VOCABULARY - 10) + 1  # 0 is padding, which transformers masks by itself


def both(kind: Any, tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the tokens of transformers on the CPU and ours."""
    model, ours = pair(kind)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": ENDS} | options
    on_device = {n: v.to("jax") if isinstance(v, Tensor) else v for n, v in options.items()}
    expected = model.generate(tokens, **options)
    return expected, isthmus.generate(ours, tokens.to("jax"), **on_device).cpu()


def left_padded(tokens: Tensor) -> Tensor:
    """Return a mask that hides the first n tokens of row n."""
    return (torch.arange(tokens.shape[1]) >= torch.arange(len(tokens))[:, None]).long()


def compilations() -> int:
    return isthmus.metrics.counts()["compilations"]


@pytest.mark.parametrize("kind", [llama, gpt2])
def test_the_tokens_are_those_of_transformers(kind: Any) -> None:
    """Rows without and with padding, and rows that end early, in the same two programs; another length in them too."""
    tokens = prompt(3, 9)
    expected, made = both(kind, tokens)
    assert torch.equal(made, expected)
    assert made.shape == (3, 21)
    programs = compilations()

    mask = left_padded(tokens)
    padded, made = both(kind, tokens, attention_mask=mask)
    assert torch.equal(made, padded)

    # Tokens that are known to come end two of the rows, one of them at once.
    ends = [int(expected[0, 9]), int(expected[1, 14])]
    ended, made = both(kind, tokens, eos_token_id=ends)
    assert torch.equal(made, ended)
    assert (ended[0, 10:] == 0).all()

    other = prompt(3, 5)
    expected, made = both(kind, other, max_new_tokens=20, attention_mask=left_padded(other))
    assert torch.equal(made, expected)
    assert compilations() == programs


def test_a_loop_ends_when_every_row_has() -> None:
    tokens = prompt(3, 9)
    expected, _ = both(llama, tokens)
    ends = [int(token) for token in expected[:, 9 + 2].unique()]
    stopped, made = both(llama, tokens, eos_token_id=ends)
    assert torch.equal(made, stopped)
    assert made.shape[1] < expected.shape[1]


def test_one_row_and_a_longer_prompt() -> None:
    """A prompt of another padded size compiles its own program, and the loop's is shared."""
    expected, made = both(llama, prompt(1, 35))
    assert torch.equal(made, expected)
    programs = compilations()
    expected, made = both(llama, prompt(1, 20), max_new_tokens=28)
    assert torch.equal(made, expected)
    assert compilations() == programs + 1
    weights = pair(llama)[1].state_dict()
    changed = copy.deepcopy(pair(llama)[0])
    with torch.no_grad():
        for model in (changed, pair(llama)[1]):
            model.lm_head.weight.neg_()
    tokens = prompt(1, 20)
    made = isthmus.generate(
        pair(llama)[1], tokens, max_new_tokens=28, do_sample=False, eos_token_id=ENDS, pad_token_id=0
    )
    assert made.device.type == "cpu"  # where the prompt is
    expected = changed.generate(tokens, max_new_tokens=28, do_sample=False, eos_token_id=ENDS, pad_token_id=0)
    assert torch.equal(made, expected), "the weights are inputs of the program"
    assert compilations() <= programs + 2  # neg_ itself
    with torch.no_grad():
        weights["lm_head.weight"].neg_()


def test_processors_run_in_the_loop() -> None:
    options = {"repetition_penalty": 1.6, "min_new_tokens": 8, "suppress_tokens": [7, 8, 9]}
    expected, _ = both(gpt2, prompt(3, 9))
    ends = [int(expected[0, 9]), int(expected[1, 11])]
    expected, made = both(gpt2, prompt(3, 9), eos_token_id=ends, **options)
    assert torch.equal(made, expected)


def test_sampling() -> None:
    """Draws come from the generator or the seed, temperature and top-p are inputs, top-k bounds what may come."""
    model, ours = pair(gpt2)
    tokens = prompt(3, 9)

    def sample(seed: int | None = None, **options: Any) -> Tensor:
        options = {"temperature": 1.5, "top_p": 0.95} | options
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return isthmus.generate(
            ours,
            tokens,
            max_new_tokens=12,
            do_sample=True,
            top_k=4,
            eos_token_id=ENDS,
            pad_token_id=0,
            generator=generator,
            **options,
        )

    first = sample(1)
    programs = compilations()
    assert torch.equal(sample(1), first)
    assert not torch.equal(sample(2), first)
    torch.manual_seed(3)
    seeded = sample()
    assert not torch.equal(sample(), seeded)
    torch.manual_seed(3)
    assert torch.equal(sample(), seeded)
    greedy, _ = both(gpt2, tokens)
    assert torch.equal(sample(1, temperature=1e-4), greedy)
    assert torch.equal(sample(1, top_p=1e-4), greedy)
    assert compilations() <= programs + 2  # those of the greedy call
    with torch.no_grad():
        logits = model(first).logits
    for row, ids in enumerate(first):
        ended = False
        for n in range(9, first.shape[1]):
            if not ended:
                assert ids[n] in logits[row, n - 1].topk(4).indices
            ended = ended or int(ids[n]) in ENDS


def test_one_line_before_model_generate() -> None:
    model, ours = pair(gpt2)
    tokens = prompt(3, 9)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": ENDS, "pad_token_id": 0}
    expected = model.generate(tokens, **options)
    ours.generate = functools.partial(isthmus.generate, ours)
    try:
        assert torch.equal(ours.generate(input_ids=tokens.to("jax"), **options).cpu(), expected)
        with isthmus.lazy():
            assert torch.equal(ours.generate(tokens.to("jax"), **options).cpu(), expected)
            assert isthmus.mode() == "lazy"
    finally:
        del ours.generate


def test_values_out_of_range_raise() -> None:
    """As on the CPU: a token outside the vocabulary, a position outside the table, in prompt and loop."""
    _, ours = pair(gpt2)
    options = {"do_sample": False, "eos_token_id": ENDS, "pad_token_id": 0}
    with pytest.raises(IndexError, match="out of range"):
        isthmus.generate(ours, torch.full((3, 9), VOCABULARY), max_new_tokens=12, **options)
    with pytest.raises(IndexError, match="out of range"):
        isthmus.generate(ours, prompt(3, 30), max_new_tokens=18, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "beam_search is model.generate's alone"),
        ({"no_repeat_ngram_size": 2}, "no NoRepeatNGramLogitsProcessor on the device"),
        ({"max_time": 1.0}, "no MaxTimeCriteria on the device"),
        ({"return_dict_in_generate": True}, "returns tokens alone"),
        ({"cache_implementation": "offloaded"}, "a cache of its own"),
        ({"streamer": object()}, "takes no streamer: the host sees no token before the last"),
        ({"past_key_values": object()}, "takes no past_key_values"),
    ],
)
def test_what_the_loop_cannot_do_is_refused(options: dict[str, Any], match: str) -> None:
    _, ours = pair(gpt2)
    with pytest.raises(IsthmusError, match=match):
        isthmus.generate(ours, prompt(1, 4), **{"max_new_tokens": 4, "pad_token_id": 0} | options)


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("mistral", {"sliding_window": 8}, "layers with StaticSlidingWindowLayer"),
        ("bloom", {}, "takes a cache, positions and a mask"),
    ],
)
def test_models_that_would_give_other_tokens_are_refused(name: str, options: Any, match: str) -> None:
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **HEADS, **options})
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to("jax")
    with pytest.raises(IsthmusError, match=match):
        isthmus.generate(model, prompt(1, 4), max_new_tokens=4)


def test_a_model_elsewhere_or_in_train_mode_is_refused() -> None:
    model, ours = pair(gpt2)
    with pytest.raises(IsthmusError, match=r'on cpu; move it, model.to\("jax"\)'):
        isthmus.generate(model, prompt(1, 4))
    with pytest.raises(IsthmusError, match="has no generate"):
        isthmus.generate(nn.Linear(2, 2), prompt(1, 4))
    try:
        with pytest.raises(IsthmusError, match="in train mode"):
            isthmus.generate(ours.train(), prompt(1, 4))
    finally:
        ours.eval()


def test_what_a_model_reads_beside_its_tensors_may_change() -> None:
    """Programs have numbers of modules, settings and methods compiled in; a model where one changed has others."""
    tokens = prompt(2, 6)
    model = llama()
    ours = copy.deepcopy(model).to("jax")
    before = isthmus.generate(ours, tokens.to("jax"), max_new_tokens=6, do_sample=False).cpu()

    def changed(of: Any) -> list[Any]:
        def scaling() -> None:
            for layer in of.model.layers:
                layer.self_attn.scaling = 8.0

        def eps() -> None:
            of.model.norm.variance_epsilon = 1e3

        def forward() -> None:
            of.lm_head.forward = lambda x: nn.functional.linear(x, -of.lm_head.weight)

        return [scaling, eps, forward]

    for change, same in zip(changed(model), changed(ours), strict=True):
        change()
        same()
        expected = model.generate(tokens, max_new_tokens=6, do_sample=False)
        assert (
            isthmus.generate(ours, tokens.to("jax"), max_new_tokens=6, do_sample=False).tolist()
            == expected.tolist()
        )
    assert before.tolist() != expected.tolist()


def test_hooks_are_refused() -> None:
    model = copy.deepcopy(llama()).to("jax")
    for register in (nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook):
        handle = register(model.model.layers[1], lambda *args: None)
        with pytest.raises(IsthmusError, match=r"model\.layers\.1 has a forward hook"):
            isthmus.generate(model, prompt(1, 4).to("jax"), max_new_tokens=2)
        handle.remove()


def test_programs_leave_with_their_model() -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=40)
    model = transformers.GPT2LMHeadModel(config).eval().to("jax")
    isthmus.generate(model, torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False, eos_token_id=None)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


FAMILIES = [
    "qwen2",
    "qwen3",
    "phi",
    "gemma",
    "gpt_neox",
    "opt",
    "falcon",
    "mixtral",
    "olmo2",
    "stablelm",
    "starcoder2",
]
FAMILIES += ["cohere", "gptj", "codegen", "gpt_bigcode", "granite", "glm", "phi3", "gemma2", "mamba", "mpt"]

REFUSED = {"gemma2", "mamba", "mpt", "mixtral"}  # a window, a state, no positions, values that choose experts


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_families_are_right_or_refused(name: str, attention: str) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **HEADS}, rotary_dim=8, pad_token_id=0)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    except ValueError as error:
        pytest.skip(f"transformers has no such attention for it: {error}")
    tokens = prompt(3, 9)
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "attention_mask": left_padded(tokens),
        "eos_token_id": ENDS,
    }
    options["pad_token_id"] = 0
    expected = model.generate(tokens, **options)
    if name in REFUSED:
        with pytest.raises(IsthmusError, match=r"call\s+model\.generate"):
            isthmus.generate(model.to("jax"), tokens, **options)
    else:
        assert torch.equal(isthmus.generate(model.to("jax"), tokens, **options), expected)
