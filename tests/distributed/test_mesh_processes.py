"""One global program over two processes of four devices each; what ``initialize`` reads from the environment."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus._distributed import hosts
from tests.distributed.mesh_process import run


@pytest.mark.timeout(400)
def test_two_processes_train_one_model() -> None:
    said = run("mesh_processes", devices=4, processes=2, timeout=380)
    for rank in (0, 1):
        eager, jit, refused = [row for row in said if row["rank"] == rank]
        for row in (eager, jit):
            assert row["devices"] == 8
            assert row["losses"] < 1e-5
            assert row["parameters"] < 1e-5
            assert row["split otherwise"] == []
        assert "processes moved different values" in refused["refused"]


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
