"""One global program over two processes of four devices each; what ``initialize`` reads from the environment."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import isthmus
from isthmus._distributed import hosts
from tests.distributed.mesh_process import ROOT, ended, run


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
        ({"SLURM_STEP_NODELIST": "a"}, {}),
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


STARTS = """
import isthmus.distributed as dist
dist.initialize(timeout=60)
import jax, torch
from torch.distributed.tensor import Shard
mesh = dist.init_device_mesh((jax.device_count(),), ("dp",))
x = dist.distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
print("said:", jax.process_count(), x.sum().item())
"""


def started(**variables: str) -> subprocess.Popen[str]:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.Popen(
        [sys.executable, "-c", STARTS],
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_job() -> int:
    """Return the number of a SLURM job of whose number JAX makes a port that nothing listens on."""
    for job in range(os.getpid() % 4096, 1 << 14):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", job % 4096 + 61440))
            return job
    raise AssertionError("every port is taken")


def test_processes_that_srun_starts_find_each_other() -> None:
    job = {"SLURM_JOB_ID": str(free_job()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    both = [started(**job, SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_STEP_NUM_NODES="1") for rank in "01"]
    for process in both:
        try:
            assert "said: 2 28.0" in process.communicate(timeout=150)[0]
        finally:
            process.kill()


def test_one_process_of_a_batch_script_is_alone() -> None:
    assert "said: 1 28.0" in started(SLURM_JOB_ID="7", SLURM_NTASKS="4").communicate(timeout=150)[0]


def test_an_environment_that_says_too_little_is_named() -> None:
    said = started(TPU_WORKER_HOSTNAMES="a,b").communicate(timeout=150)[0]
    assert "TPU_WORKER_HOSTNAMES in the environment names a launcher" in said
    assert "coordinator_address='host:port'" in said
