"""Models and functions that nobody tuned for, at many sizes in each mode: results and gradients of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import models
from tests.changing_sizes import FUNCTIONS, MODELS, MODES, Program, check
from tests.lazy.test_generate import generate, llama, on_device, prompts, same
from tests.lazy.test_size_ranges import changing_sizes  # noqa: F401

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
QUICK = [("lazy", "resnet"), ("lazy", "decoder"), ("jit", "convolutions"), ("compile", "masked pooling")]


@pytest.mark.parametrize(("mode", "name"), QUICK)
def test_quick_models(mode: str, name: str) -> None:
    check(MODELS[name], mode)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_models(mode: str, name: str) -> None:
    if mode == "compile" and name in ("lstm", "gru"):
        torch._dynamo.config.allow_rnn = True
    try:
        check(MODELS[name], mode)
    finally:
        torch._dynamo.config.allow_rnn = False


QUICK_FUNCTIONS = [
    "topk_gather", "windows_of_four", "paddings", "shifted_cross_entropy", "halves", "slices_of_fixed_tables",
]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "name"), [*[("lazy", name) for name in QUICK_FUNCTIONS], ("compile", "slices_of_many_kinds")]
)
def test_quick_functions(mode: str, name: str) -> None:
    check(FUNCTIONS[name], mode)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_functions(mode: str, name: str) -> None:
    check(FUNCTIONS[name], mode)


# Models of other tests, with batches of other numbers of rows than theirs.


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", models.MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_batches_of_other_numbers_of_rows(mode: str, kind: Any) -> None:

    def rows(n: int) -> list[torch.Tensor]:
        batch = kind.batch(torch.Generator().manual_seed(0))
        return [torch.cat([part] * 8)[:n] for part in batch]

    check(Program(kind, rows, [(4,), (7,), (3,), (9,)]), mode)


def test_quick_generation() -> None:
    model = llama(1)
    device = on_device(model, "lazy")
    for prompt in prompts(7, 12):
        expected = generate(model, prompt, "eager", max_new_tokens=8)
        same(generate(device, prompt.to("jax"), "lazy", max_new_tokens=8), expected)
