"""The examples: each is short, is listed, runs on the device alone and computes what it says."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
DEMO = "char_gpt"  # what `make demo` runs: longer, and with options


def falls(losses: list[float], below: float) -> None:
    """Check that losses fall below a part of the first."""
    assert losses[-1] < below * losses[0], losses


def check_torch_optimizer(losses: dict[str, list[float]]) -> None:
    falls(losses["cpu"], below=0.75)
    for way in ("jax", "train_step"):
        np.testing.assert_allclose(losses[way], losses["cpu"], rtol=1e-3)


def check_optax_training(losses: tuple[list[float], list[float]]) -> None:
    whole, resumed = losses
    falls(whole, below=0.1)
    np.testing.assert_allclose(resumed, whole, rtol=1e-3)


def check_per_sample_gradients(norms: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(*norms)
    assert norms[0].std() > 0.01


def check_pallas_kernel(losses: dict[str, list[float]]) -> None:
    falls(losses["torch"], below=0.5)
    for way in ("pallas", "compiled"):
        np.testing.assert_allclose(losses[way], losses["torch"], rtol=1e-4)


def check_flax_layer(found: tuple[list[float], float]) -> None:
    losses, difference = found
    falls(losses, below=0.2)
    assert difference < 1e-5


def check_vit_export(logits: tuple[np.ndarray, np.ndarray]) -> None:
    found, wanted = logits
    assert found.shape == (3, 5)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def check_lora_llama(found: tuple[list[float], dict[str, Any], dict[str, Any]]) -> None:
    losses, before, after = found
    falls(losses, below=0.5)
    assert {"lm_head.weight", "model.layers.0.self_attn.q_proj.base.weight"} <= before.keys()
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name


CHECKS: dict[str, Callable[[Any], None]] = {
    name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")
}
RANKS = {"ddp", "fsdp2"}  # run by several processes, in tests/distributed/test_examples.py
EXAMPLES = sorted({path.stem for path in (ROOT / "examples").glob("*.py")} - {DEMO} - RANKS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_computes_what_it_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    # In this process: to import torch and JAX anew for each would take longer than the examples do.
    CHECKS[name](runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]())
    assert capsys.readouterr().out.count("\n") >= 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_short_and_listed(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert len(text.splitlines()) < 80
    assert f"\npython examples/{name}.py" in text
    assert f"(../examples/{name}.py)" in (ROOT / "docs" / "examples.md").read_text()
