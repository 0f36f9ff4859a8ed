"""One global program over two processes of four devices each; what ``initialize`` reads from the environment."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import isthmus
from isthmus._distributed import hosts
from tests.distributed.mesh_process import ended, run


@pytest.mark.timeout(400)
def test_two_processes_train_one_model(tmp_path: Path) -> None:
    said = run("mesh_processes", str(tmp_path / "saved"), devices=4, processes=2, timeout=380)
    written = [path.stat().st_size for path in (tmp_path / "saved").glob("*.distcp")]
    assert len(written) == 2
    assert max(written) < 1.2 * min(written)  # each process its own parts
    for rank in (0, 1):
        eager, jit, alone, late, orbax, refused = [row for row in said if row["rank"] == rank]
        for row in (eager, jit):
            assert row["devices"] == 8
            assert row["losses"] < 1e-5
            assert row["parameters"] < 1e-5
            assert row["split otherwise"] == []
        assert 'init_process_group("gloo")' in alone["refused"]
        assert "before tensors are split" in late["refused"]
        there, full = orbax["refused"]
        assert "already exists; force=True replaces a checkpoint" in there
        assert "no space left" in full
        assert "processes moved different values" in refused["refused"]


@pytest.mark.timeout(200)
def test_a_process_that_fails_ends_the_others(tmp_path: Path) -> None:
    ran = ended("mesh_failing", "raises", "1", str(tmp_path), timeout=180, devices=4, processes=2)
    assert time.time() - float(ran.stdout.split("said: ")[1].split()[0]) < 30
    assert ran.returncode != 0
    assert "ValueError: no such word" in ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("how", "rank"), [("writing", "1"), ("finishing", "0")])
def test_a_process_killed_in_a_save_leaves_the_old_checkpoint(how: str, rank: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    ran = ended("mesh_failing", how, rank, str(path), timeout=180, devices=4, processes=2)
    assert ran.returncode != 0
    assert "no such word" not in ran.stderr
    saved = isthmus.checkpoint.load(path)
    assert saved["model"]["weight"].sum().item() == 16 * 64
    isthmus.checkpoint.save(path, {"x": torch.ones(1)}, force=True)
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize(
    ("environment", "plan"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"}, None),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            {"coordinator_address": "a:1", "num_processes": 2, "process_id": 1},
        ),
        ({"SLURM_JOB_ID": "7"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, {}),
    ],
)
def test_initialize_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], plan: dict[str, Any] | None
) -> None:
    monkeypatch.setattr(hosts, "_agreed", lambda host, rank, timeout: f"{host}:1")
    assert hosts.joining(environment, None, None, None, 1) == plan
    given = {"coordinator_address": "h:2", "num_processes": 3, "process_id": 1}
    assert hosts.joining(environment, "h:2", 3, 1, 1) == given


def test_a_group_without_an_address_is_refused() -> None:
    with pytest.raises(ValueError, match="coordinator_address"):
        hosts.joining({}, None, 2, 0, 1)
