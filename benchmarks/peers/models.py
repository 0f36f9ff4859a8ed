"""Models as their libraries have them, with random weights and one batch each: for ``benchmarks/gpu.py``.

Dropout is off, so that the losses of contenders can be compared. ``tiny`` makes each so small that a CPU trains it, to
try the benchmark without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers import gpt

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Subject:
    """A model, its batch, and the loss of the model on a batch."""

    model: nn.Module
    batch: Batch
    loss: Callable[..., Tensor]
    images: bool = False


def _tokens(vocabulary: int, *size: int) -> Tensor:
    return torch.randint(vocabulary, size)


def _gpt2(tiny: bool) -> Subject:
    large = gpt.Size(layers=12, width=768, heads=12, context=1024, vocabulary=50304, batch=8)
    size = gpt.Size(layers=2, width=32, heads=2, context=16, vocabulary=64, batch=2) if tiny else large
    tokens = _tokens(size.vocabulary, size.batch, size.context)

    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return Subject(gpt.GPT(size), (tokens, tokens.roll(-1, 1)), loss)


def _transformers(kind: str, **options: Any) -> nn.Module:
    import transformers

    cls = getattr(transformers, kind)
    return cls(cls.config_class(**options))  # type: ignore[no-any-return]


def _labelled(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=labels, use_cache=False).loss  # type: ignore[no-any-return]


def _llama(tiny: bool) -> Subject:
    size: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048}
    size |= {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
    if tiny:
        size |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        size |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = _tokens(size["vocab_size"], 2, 16) if tiny else _tokens(size["vocab_size"], 8, 1024)
    return Subject(_transformers("LlamaForCausalLM", **size), (tokens, tokens), _labelled)


def _bert(tiny: bool) -> Subject:
    size: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if tiny:
        size |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        size |= {"num_attention_heads": 4}
    rows, length = (2, 16) if tiny else (32, 384)
    model = _transformers("BertForMaskedLM", **size)
    tokens = _tokens(model.config.vocab_size, rows, length)
    mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (rows, 1))).long()
    labels = tokens.masked_fill(mask == 0, -100)

    def loss(model: nn.Module, tokens: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=tokens, attention_mask=mask, labels=labels).loss  # type: ignore[no-any-return]

    return Subject(model, (tokens, mask, labels), loss)


def _t5(tiny: bool) -> Subject:
    size: dict[str, Any] = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    if tiny:
        size |= {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = _transformers("T5ForConditionalGeneration", **size)
    rows, source, target = (2, 16, 8) if tiny else (32, 512, 128)
    vocabulary = model.config.vocab_size
    return Subject(model, (_tokens(vocabulary, rows, source), _tokens(vocabulary, rows, target)), _labelled)


def _vision(kind: str, rows: int, **options: Any) -> Callable[[bool], Subject]:
    def build(tiny: bool) -> Subject:
        import torchvision

        model = getattr(torchvision.models, kind)(**options)
        count, side = (2, 224) if tiny else (rows, 224)
        batch = (torch.randn(count, 3, side, side), _tokens(1000, count))

        def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(model(images), labels)

        return Subject(model, batch, loss, images=True)

    return build


class _Recurrent(nn.Module):
    """Tokens in, logits of the next token out: two layers of an LSTM."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.layers(self.token(tokens))
        return self.head(out)  # type: ignore[no-any-return]


def _lstm(tiny: bool) -> Subject:
    vocabulary, width, rows, length = (64, 32, 2, 16) if tiny else (10000, 650, 64, 128)
    tokens = _tokens(vocabulary, rows, length)

    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return Subject(_Recurrent(vocabulary, width), (tokens, tokens.roll(-1, 1)), loss)


MODELS: dict[str, Callable[[bool], Subject]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "vit": _vision("vit_b_16", 64),
    "resnet50": _vision("resnet50", 128),
    # Models that nothing in the package was tuned for.
    "t5": _t5,
    "convnext": _vision("convnext_tiny", 64, stochastic_depth_prob=0.0),
    "lstm": _lstm,
}


def build(name: str, tiny: bool) -> Subject:
    """Return a model by name, with the same weights and the same batch in every process; bfloat16 throughout."""
    torch.manual_seed(0)
    subject = MODELS[name](tiny)
    model = subject.model.to(torch.bfloat16)
    batch = tuple(t.to(torch.bfloat16) if t.is_floating_point() else t for t in subject.batch)
    return Subject(model, batch, subject.loss, subject.images)
