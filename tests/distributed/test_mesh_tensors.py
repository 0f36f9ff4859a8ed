"""Split tensors: each check of ``mesh_tensors.py`` in a process with eight devices."""

from __future__ import annotations

import pytest

from tests.distributed.mesh_process import run

# Checks share a process, since starting one takes longer than most of them.
TOGETHER = [
    ["arrays", "placements", "random_numbers", "batches", "one_device_again"],
    ["followers", "redistributing", "gathered_again", "ops"],
    ["existing_tensors_move", "modules", "transforms", "checkpoints", "kept_on_disk"],
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checks", TOGETHER, ids=" ".join)
def test_split_tensors(checks: list[str]) -> None:
    run("mesh_tensors", *checks, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gradients_of_split_tensors() -> None:
    run("mesh_tensors", "op_gradients", timeout=880)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_live_bytes_are_constant() -> None:
    run("mesh_tensors", "memory", timeout=880)
