"""Starts the ranks of a job and collects, per check, what went wrong.

A module with checks is run by every rank: ``python -m tests.distributed.launch MODULE FILE``. Its functions whose names
begin with ``check_`` take (rank, world) and raise where something is wrong. All checks of a module share one job, since
starting one takes seconds; ``failures`` returns the traceback of each rank and check that failed.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return what ``torchrun`` would tell a rank."""
    return {
        "PYTHONPATH": str(ROOT),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run(command: Sequence[str], world: int, timeout: float, **variables: str) -> list[tuple[int, str]]:
    """Run a command as every rank; return exit status and output of each. All are killed when the time is over."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **environment(rank, world, port), **variables},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + timeout
    outputs = []
    try:
        for process in ranks:
            outputs.append(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
    except subprocess.TimeoutExpired as expired:
        for process in ranks:
            process.kill()
        texts = [process.communicate()[0] for process in ranks]
        raise AssertionError(f"{command} took over {timeout} s:\n" + "\n".join(texts)[-8000:]) from expired
    return [(process.returncode, output) for process, output in zip(ranks, outputs, strict=True)]


def failures(
    module: str, folder: Path, world: int = 2, timeout: float = 200, only: str = "", **variables: str
) -> dict[str, Any]:
    """Run the checks of a module; return what failed by rank and check, and under "passed" how many did not.

    ``only`` names the checks to run, by parts of their names with commas between; "" is all of them.
    """
    ended = run(["-m", "tests.distributed.launch", module, str(folder), only], world, timeout, **variables)
    failed: dict[str, Any] = {}
    passed: set[str] = set()
    for rank, (status, output) in enumerate(ended):
        file = folder / f"{rank}.json"
        if status != 0 or not file.exists():
            failed[f"rank {rank}"] = f"status {status}: {output[-6000:]}"
            continue
        for name, text in json.loads(file.read_text()).items():
            if text:
                failed[f"rank {rank}, {name}"] = text
            else:
                passed.add(name)
    for name, text in failed.items():
        print(f"{name}\n{text}")  # whole: pytest shortens what an assertion compares
    return {**failed, "passed": len(passed)}


def main(module: str, folder: str, only: str = "") -> None:
    """Run the checks of a module as one rank."""
    import torch.distributed as dist

    checks = {
        name: function
        for name, function in vars(importlib.import_module(module)).items()
        if name.startswith("check_") and any(part in name for part in only.split(","))
    }
    dist.init_process_group(timeout=datetime.timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    said: dict[str, str] = {}
    for name, function in checks.items():
        began = time.monotonic()
        try:
            function(rank, world)
            said[name] = ""
        except Exception:
            said[name] = traceback.format_exc()
        if os.environ.get("SHOW"):
            print(rank, name, f"{time.monotonic() - began:.1f} s", said[name], flush=True)
        Path(folder, f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
