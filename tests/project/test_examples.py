"""The examples: each is short, is listed, runs on the device alone and computes what it says."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
DEMO = {"char_gpt", "demo"}  # what `make demo` runs: longer, and with options


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
EXAMPLES = sorted({path.stem for path in (ROOT / "examples").glob("*.py")} - DEMO - RANKS)


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


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The demo's names; it imports the model from the file beside it."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="demo")


def test_demo_compares_modes_by_their_steady_steps(demo: dict[str, Any]) -> None:
    # Reads every 10 steps: 4 s while compiling, then 1 s and 0.5 s a read.
    cpu = demo["Run"]("CPU torch", [4.0] * 20 + [2.0] * 20, [1.0, 2.0, 3.0, 4.0])
    fast = demo["Run"]("isthmus.jit", [4.0] * 20 + [2.0] * 20, [4.0, 4.5, 5.0, 5.5])
    lines = demo["table"]([cpu, fast]).splitlines()
    assert lines[1].split()[2:] == ["10,240", "1.00", "x", "2.0", "s", "2.00000"]
    assert lines[2].split()[1:] == ["20,480", "2.00", "x", "4.5", "s", "2.00000"]
    picture = demo["picture"]([cpu, fast])
    curves = re.findall(r'points="([^"]*)"', picture)
    assert len(curves) == 4
    assert curves[0] == curves[1]  # over steps they are one
    assert curves[2] != curves[3]  # over seconds they are not


@pytest.mark.slow
def test_demo_trains_alike_in_every_mode(
    demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--steps", "40", "--picture", str(tmp_path / "demo.svg")])
    assert demo["main"]() == 0
    said = capsys.readouterr().out
    (apart,) = re.findall(r"differ between modes by (\S+) at most", said)
    assert float(apart) < 1e-4
    assert "Ops of this device that ran on the CPU: none." in said
    assert (tmp_path / "demo.svg").read_text().startswith("<svg")
