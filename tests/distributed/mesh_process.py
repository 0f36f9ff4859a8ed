"""A process with eight devices, made of one CPU: what the tests of the global view run in.

XLA's thread pool has as many threads as the machine has cores, and a collective needs one for each device: with fewer,
programs now and then wait for each other and XLA ends the process after 40 seconds. ``NPROC`` is the size of the pool.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import UNOPTIMIZED

ROOT = Path(__file__).resolve().parents[2]


def run(
    module: str, *arguments: str, timeout: float = 300, devices: int = 8, processes: int = 1
) -> list[Any]:
    """Run a module of the tests on that many devices a process; return what it printed with ``say``."""
    ran = ended(module, *arguments, timeout=timeout, devices=devices, processes=processes)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    # Two processes may write on one line.
    return [json.JSONDecoder().raw_decode(said)[0] for said in ran.stdout.split(_MARK)[1:]]


def ended(
    module: str, *arguments: str, timeout: float, devices: int, processes: int
) -> subprocess.CompletedProcess[str]:
    """Run a module as ``run`` does, and return how it ended."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={_free_port()}"]
    flags = f"{UNOPTIMIZED} --xla_force_host_platform_device_count={devices}"
    return subprocess.run(
        [sys.executable, *(launch if processes > 1 else []), "-m", f"tests.distributed.{module}", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": flags,
            "NPROC": "32",
            "OMP_NUM_THREADS": "1",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


_MARK = "said: "


def say(value: Any) -> None:
    """Print a value for the test that started this process."""
    print(_MARK + json.dumps(value) + "\n", end="", flush=True)
