"""What XLA makes of split programs: says the collectives of a forward and its backward.

``python -m tests.distributed.mesh_programs fsdp|tp|block``
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import isthmus
import isthmus.distributed as dist
from tests.distributed.mesh_process import say
from tests.distributed.mesh_training import Block


def main(parallelism: str) -> None:
    """Say the collectives that ``isthmus.explain`` lists, forward and backward, and the text it prints."""
    mesh = dist.init_device_mesh((4, 2), ("dp", "tp"))
    x = torch.randn(16, 16)
    layers = [
        nn.Linear(16, 64),
        nn.GELU(),
        nn.Linear(64, 16),
        nn.Linear(16, 64),
        nn.GELU(),
        nn.Linear(64, 16),
    ]
    model: nn.Module = nn.Sequential(*layers).to("jax")
    if parallelism == "tp":
        plan = {
            "0": ColwiseParallel(),
            "2": RowwiseParallel(),
            "3": ColwiseParallel(),
            "5": RowwiseParallel(),
        }
        dist.parallelize_module(model, mesh["tp"], plan)
    elif parallelism == "block":  # attention and a feed-forward network
        model, x = Block(16, 8, 0.0).to("jax"), torch.randn(16, 8, 16)
        plan = {
            **{name: ColwiseParallel() for name in ("q", "k", "v", "up")},
            **{name: RowwiseParallel() for name in ("o", "down")},
        }
        dist.parallelize_module(model, mesh["tp"], plan)
    else:
        dist.fully_shard(model, mesh=mesh["dp"])
    x = dist.distribute_tensor(x, mesh["dp"], [Shard(0)])

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    with torch.no_grad():
        alone = isthmus.explain(forward)(x).collectives()
    both = isthmus.explain(forward, backward=True)(x)
    rows = [[(c.kind, c.count, c.bytes, c.line) for c in found] for found in (alone, both.collectives())]
    say({"forward": rows[0], "both": rows[1], "text": str(both)})


if __name__ == "__main__":
    main(*sys.argv[1:])
