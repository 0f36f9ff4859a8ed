"""Models of many families, exported, compute what eager ones do; some of them in sizes they were not exported for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isthmus
from tests.families import FAMILIES
from tests.families.family import Batch, tokens

QUICK = ("ResNet", "U-Net", "LSTM", "MLP-Mixer", "T5", "ViT", "ConvNeXt", "Llama")
NAMES = {family.name: family for family in FAMILIES}
LIMIT = 32
"""As many positions as the models of the families have."""


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, dict):
        result = tuple(result.values())
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in _tensors(item)]
    return [result] if isinstance(result, Tensor) else []


def _check(model: nn.Module, loaded: nn.Module, batch: Batch) -> None:
    """Compare every tensor of a model's result with those of the exported program."""
    with torch.no_grad():
        wanted = _tensors(model(**batch))
    found = _tensors(loaded(**{name: value for name, value in batch.items() if isinstance(value, Tensor)}))
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NAMES[name].model().eval()


def _export(model: nn.Module, batch: Batch, path: Path, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of what it does while it is traced
        isthmus.export(model, (), batch, path=path, **options)
    return isthmus.load(path)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in NAMES],
)
def test_a_family_computes_what_eager_does(name: str, tmp_path: Path) -> None:
    isthmus.metrics.clear()  # of what other tests ran on the CPU
    model, batch = _model(name), NAMES[name].batch(torch.Generator().manual_seed(1))
    _check(model, _export(model, batch, tmp_path), batch)
    assert isthmus.metrics.fallbacks() == {}


@dataclass(frozen=True)
class Dynamic:
    """How a family is called with a batch of some size, and which of its dims are dynamic."""

    name: str
    batch: Callable[[int, int], Batch]
    shapes: dict[str, dict[int, str]]
    quick: bool = False


def _text(batch: int, length: int) -> Batch:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length // 2 + 1 :] = 0
    text = tokens((batch, length), torch.Generator().manual_seed(1))
    return {"input_ids": text, "attention_mask": mask}


def _translation(batch: int, length: int) -> Batch:
    g = torch.Generator().manual_seed(1)
    return {"input_ids": tokens((batch, length), g), "decoder_input_ids": tokens((batch, length // 2 + 1), g)}


def _photos(batch: int, length: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))}


TEXT = {"input_ids": {0: "batch", 1: "length"}, "attention_mask": {0: "batch", 1: "length"}}
PAIR = {"input_ids": {0: "batch", 1: "length"}, "decoder_input_ids": {0: "batch", 1: "target"}}
PHOTOS = {"pixel_values": {0: "batch"}}
DYNAMIC = [
    *(Dynamic(name, _text, TEXT, quick=True) for name in ("BERT", "GPT-2", "GPT-NeoX")),
    *(Dynamic(name, _text, TEXT) for name in ("DistilBERT", "ALBERT", "Llama", "Mistral", "Qwen2", "Gemma")),
    *(Dynamic(name, _translation, PAIR) for name in ("T5", "BART")),
    *(Dynamic(name, _photos, PHOTOS) for name in ("ViT", "ConvNeXt", "Swin")),
]


SHARED_HEADS = ("Llama", "Mistral", "Qwen2")


@pytest.mark.parametrize(
    "case", [pytest.param(d, id=d.name, marks=[] if d.quick else [pytest.mark.slow]) for d in DYNAMIC]
)
def test_batch_and_length_may_vary(case: Dynamic, tmp_path: Path) -> None:
    if case.name in SHARED_HEADS and torch.__version__ < "2.13":
        pytest.skip("torch.export of this version fixes the length of attention whose heads share keys")
    model = _model(case.name)
    dims = {"length": torch.export.Dim("length", max=LIMIT), "target": torch.export.Dim("target", max=LIMIT)}
    shapes = {
        name: {dim: dims.get(label, label) for dim, label in each.items()}
        for name, each in case.shapes.items()
    }
    loaded = _export(model, case.batch(3, 8), tmp_path, dynamic_shapes=shapes)
    for batch, length in [(1, 1), (2, 5), (4, LIMIT)]:
        _check(model, loaded, case.batch(batch, length))
