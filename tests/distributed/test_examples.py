"""The examples that several processes run, as their first lines say: by ``torchrun``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import launch


def torchrun(script: str) -> str:
    """Return what an example prints, run by two processes."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={launch.free_port()}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(launch.ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, f"examples/{script}.py"],
        cwd=launch.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_ddp() -> None:
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", torchrun("ddp"))]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]


def test_fsdp2() -> None:
    text = torchrun("fsdp2")
    losses = [float(each) for each in re.findall(r"step \d: loss ([\d.]+)", text)]
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0]
    assert text.count("loaded as saved: True") == 2


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_example_is_short_and_listed(name: str) -> None:
    text = Path(launch.ROOT, "examples", f"{name}.py").read_text()
    assert len(text.splitlines()) < 80
    assert f"\ntorchrun --nproc-per-node=2 examples/{name}.py" in text
    assert f"(../examples/{name}.py)" in Path(launch.ROOT, "docs", "examples.md").read_text()
