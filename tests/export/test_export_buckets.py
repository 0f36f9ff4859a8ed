"""Exported programs with padded executables: one serves every size up to its bucket, and nothing is compiled."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import isthmus
from isthmus._runtime.padding.interpreter import RULES
from isthmus._runtime.padding.program import PaddedProgram
from isthmus.errors import ExportError


class Reader(nn.Module):
    """Attention over a sequence, an index that is checked, and sizes as values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens) + torch.arange(tokens.shape[1], device=tokens.device)[None, :, None] / 10
        x = (x @ x.transpose(1, 2)).softmax(-1) @ x
        return {"logits": self.head(x), "mean": x.mean(1), "flat": x.flatten(0, 1).amax(0)}


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 20, (batch, length), generator=torch.Generator().manual_seed(batch + 10 * length))


class Compiled:
    """Counts what XLA compiles from now on, whoever asks for it."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, seconds: float, **_: object) -> None:
        self.count += "backend_compile" in event


SHAPES = {"tokens": {0: "batch", 1: "length"}}
BUCKETS = {"batch": [4], "length": [8, 32]}


def check(program: nn.Module, model: nn.Module, sizes: list[tuple[int, int]]) -> None:
    for size in sizes:
        expected = model(tokens(*size))
        for name, found in program(tokens(*size)).items():
            torch.testing.assert_close(found, expected[name].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["folder", "file.isthmus"])
def test_buckets_serve_all_sizes_up_to_theirs(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model, path = Reader().eval(), tmp_path / name
    isthmus.export(model, tokens(2, 5), dynamic_shapes=SHAPES, precompile=BUCKETS, path=path)
    loaded = isthmus.load(path, executables=True)
    check(loaded, model, [(4, 32)])
    compiled = Compiled()
    check(loaded, model, [(1, 1), (2, 5), (1, 7), (3, 8), (4, 9), (2, 31), (3, 20)])
    assert compiled.count == 0
    with pytest.raises(IndexError, match="out of range"):
        loaded(torch.full((2, 5), 20))["logits"].sum().item()
    check(loaded, model, [(5, 6), (2, 40)])  # larger than the buckets: compiled exactly


def test_padding_of_a_bucket_never_reaches_a_result(tmp_path: Path) -> None:
    """Embedding 0 is what padded tokens read; where it is NaN, every result that it reached would be."""
    torch.manual_seed(0)
    model = Reader().eval()
    with torch.no_grad():
        model.embed.weight[0] = float("nan")
    isthmus.export(model, tokens(2, 5), dynamic_shapes=SHAPES, precompile=BUCKETS, path=tmp_path / "out")
    loaded = isthmus.load(tmp_path / "out", executables=True)
    for size in ((2, 5), (3, 11)):
        given = tokens(*size).clamp(min=1)
        expected = model(given)
        for name, found in loaded(given).items():
            assert not found.isnan().any()
            torch.testing.assert_close(found, expected[name].detach(), rtol=1e-5, atol=1e-5)


def test_executables_of_buckets_name_no_files() -> None:
    artifact = isthmus.export(
        nn.Linear(3, 2), torch.ones(2, 3), dynamic_shapes={"input": {0: "n"}}, precompile={"n": [8]}
    )
    assert len(artifact.executables) == 1
    for content in artifact.executables.values():
        assert not re.findall(rb"/[\w./-]+\.py", content)


def test_buckets_run_without_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Reader().eval()
    isthmus.export(model, tokens(2, 5), dynamic_shapes=SHAPES, precompile=BUCKETS, path=tmp_path)
    np.save(tmp_path / "x.npy", tokens(3, 6).numpy())
    code = (
        "import numpy as np, run, precompiled, sys\n"
        "program = precompiled.attach(run.load('.'), '.')\n"
        "found = program(np.load('x.npy'))\n"
        "np.save('y.npy', np.asarray(found['logits']))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)
    expected = model(tokens(3, 6))["logits"].detach().numpy()
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "buckets", [{"length": [8]}, {"batch": [4], "lengths": [8]}, {"batch": [], "length": [8]}]
)
def test_buckets_are_named_for_every_dynamic_dim(buckets: dict[str, list[int]]) -> None:
    with pytest.raises(ExportError, match="buckets are for"):
        isthmus.export(Reader().eval(), tokens(2, 5), dynamic_shapes=SHAPES, precompile=buckets)


def test_what_has_no_padding_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PaddedProgram  # whose module files the rules
    monkeypatch.delitem(RULES, "dot_general")
    with pytest.raises(ExportError, match="cannot run on padded arrays: dot_general"):
        isthmus.export(
            nn.Linear(3, 2), torch.ones(2, 3), dynamic_shapes={"input": {0: "n"}}, precompile={"n": [8]}
        )
