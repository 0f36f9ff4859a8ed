"""One program over two processes with four devices each, started by torchrun: each says what it saw."""

from __future__ import annotations

import torch
from torch import nn

import isthmus
import isthmus.distributed as dist
from tests.distributed.mesh_process import say
from tests.distributed.mesh_training import adam, data, facts, in_mode, make, reference


def main() -> None:
    """Train in two modes on rows of this process, read values, and hold different parameters at last."""
    dist.initialize(timeout=120)
    import jax

    rank, count = jax.process_index(), jax.process_count()
    losses, parameters = reference("mlp", 3)
    mesh = dist.init_device_mesh((8,), ("dp",))
    rows = [(x.chunk(count)[rank], y.chunk(count)[rank]) for x, y in data("mlp", 3)]
    for mode in ("eager", "jit"):
        model = dist.fully_shard(make("mlp").to("jax"), mesh=mesh)
        optimizer = adam(model, mode)
        step = in_mode(mode, model, optimizer)
        found = [step(x, y) for x, y in dist.shard_batches(rows, mesh)]
        if rank == 0:
            assert found[-1].item() > 0  # replicated: nobody else need ask
        errors = [abs(loss.item() - want) for loss, want in zip(found, losses, strict=True)]
        said = facts(model, optimizer, parameters)
        say({"rank": rank, "devices": jax.device_count(), "mode": mode, "losses": max(errors), **said})
    torch.manual_seed(rank)
    nn.Linear(4, 4).to("jax")
    try:
        dist.check_replicas()
    except isthmus.errors.IsthmusError as error:
        say({"rank": rank, "refused": str(error)})


if __name__ == "__main__":
    main()
