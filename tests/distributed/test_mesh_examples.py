"""The examples of the global view: short, listed, and right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "distributed"


def ran(*command: str, devices: int) -> str:
    """Run Python on that many devices and return what it printed."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "NPROC": "32", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-4000:]
    return result.stdout


@pytest.mark.timeout(300)
def test_fsdp_and_tp_in_one_process() -> None:
    out = ran(str(FOLDER / "mesh_fsdp_tp.py"), devices=8)
    assert "(Shard(dim=1), Shard(dim=0))" in out
    (mesh, cpu) = [[float(n) for n in re.findall(r"\d+\.\d+", line)] for line in out.splitlines()[-2:]]
    assert mesh == pytest.approx(cpu, abs=1e-5)
    assert mesh[1] < mesh[0]


@pytest.mark.timeout(300)
def test_two_processes_of_four_devices() -> None:
    out = ran(
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(FOLDER / "mesh_two_processes.py"),
        devices=4,
    )
    losses = [float(n) for n in re.findall(r"loss (\d+\.\d+)", out)]
    assert len(losses) == 3
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", ["mesh_fsdp_tp", "mesh_two_processes"])
def test_example_is_short_and_listed(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 80
    assert f"(../examples/distributed/{name}.py)" in (ROOT / "docs" / "examples.md").read_text()
