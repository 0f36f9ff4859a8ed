"""Training on a mesh equals training in one process on the CPU, in every mode; what is split stays split."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.mesh_process import run
from tests.distributed.mesh_training import MODES, PARALLELISMS

SPLIT = {"fsdp": 8, "tp": 8, "fsdp tp": 2, "fsdp sp": 2, "ep": 4}
"""By how much at least a parameter that is split is smaller on one device."""


NOT_COMPARED = {"gpt": ["blocks.0.k.bias", "blocks.1.k.bias"], "resnet": ["0.bias"]}


def check(row: dict[str, Any], model: str, parallelism: str) -> None:
    """Check what a training said of itself."""
    assert row["not compared"] == NOT_COMPARED.get(model.split()[0], []), row
    assert max(row["losses"], row["parameters"]) < 1e-5, row
    assert row["compiled late"] == 0, row
    assert row["split otherwise"] == [], row
    for whole, parameter, state in row["bytes"]:
        assert parameter == state
        assert whole % parameter == 0
        assert whole // parameter >= SPLIT[parallelism], row
    if parallelism == "fsdp":  # exactly an eighth, of everything that eight devices can share
        assert row["whole"] == [], row
        assert all(whole == 8 * part for whole, part, _ in row["bytes"]), row
    if parallelism == "dp":
        assert row["bytes"] == []


def check_all(model: str, parallelism: str, modes: list[str], timeout: float) -> None:
    """Train in some modes, and check each."""
    rows = run("mesh_training", model, parallelism, ",".join(modes), timeout=timeout)
    assert [row["mode"] for row in rows] == modes
    for row in rows:
        check(row, model, parallelism)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "parallelism", "modes"),
    [("mlp", "fsdp tp", MODES), ("mlp", "fsdp", ["eager", "jit"]), ("experts", "ep", ["jit"])],
)
def test_a_small_model_trains_as_on_the_cpu(model: str, parallelism: str, modes: list[str]) -> None:
    check_all(model, parallelism, modes, 280)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("parallelism", PARALLELISMS)
@pytest.mark.parametrize("model", ["mlp", "gpt", "gpt with dropout", "resnet"])
def test_models_train_as_on_the_cpu(model: str, parallelism: str) -> None:
    check_all(model, parallelism, MODES, 1700)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "parallelism"), [("gpt", "fsdp sp"), ("experts", "ep")])
def test_sequences_and_experts_are_split(model: str, parallelism: str) -> None:
    check_all(model, parallelism, MODES, 880)
