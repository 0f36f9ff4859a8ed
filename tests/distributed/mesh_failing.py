"""Two processes of one program, of which one fails: ``python -m tests.distributed.mesh_failing HOW RANK FOLDER``.

HOW is "raises" (in the middle of a training), or where a process dies in a save that replaces another: "writing",
"finishing".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

import isthmus
import isthmus.distributed as dist
from isthmus._interop import checkpoints
from isthmus._runtime import checksums
from tests.distributed.mesh_process import say


def die(*args: Any) -> None:
    """End this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(how: str, rank: int, folder: Path) -> None:
    """Fail in one process; the other goes on as if nothing would happen."""
    dist.initialize(timeout=120)
    import jax

    mesh = dist.init_device_mesh((8,), ("dp",))
    model = dist.fully_shard(nn.Linear(16, 64).to("jax"), mesh=mesh)
    x = dist.distribute_tensor(torch.ones(16, 16), mesh, [Shard(0)])
    model(x).sum().item()
    fails = jax.process_index() == rank
    if how != "raises":
        nn.init.ones_(model.weight)
        isthmus.checkpoint.save(folder, {"model": model})
        nn.init.zeros_(model.weight)
        if fails and how == "writing":
            checkpoints._write = die
        if fails and how == "finishing":
            checksums.seal = die
        isthmus.checkpoint.save(folder, {"model": model}, force=True)
    if fails:
        say(time.time())
        raise ValueError("no such word")
    for _ in range(3):
        model(x).sum().item()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
