"""One program over two processes with four devices each, started by torchrun: each says what it saw."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import isthmus
import isthmus.distributed as dist
from isthmus._runtime import checksums
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
    checkpoint(model, optimizer, mesh, Path(sys.argv[1]))
    orbax(model, mesh, Path(sys.argv[1]).with_name("orbax"))
    torch.manual_seed(rank)
    nn.Linear(4, 4).to("jax")
    try:
        dist.check_replicas()
    except isthmus.errors.IsthmusError as error:
        say({"rank": rank, "refused": str(error)})


def checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: dist.DeviceMesh, folder: Path
) -> None:
    """Save by torch.distributed.checkpoint, each process its parts, and load into tensors split along other dims."""
    import jax

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    try:
        dcp.save(state, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        say({"rank": jax.process_index(), "refused": str(error)})
    torch.distributed.init_process_group("gloo")
    for _ in range(2):
        dcp.save(state, checkpoint_id=folder)
    want = [parameter.detach().cpu() for parameter in model.parameters()]
    moments = [each["exp_avg"].cpu() for each in state["optimizer"].values()]
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder / "later").result()
    try:
        dist.init_device_mesh((2, 4), ("dp", "tp"))
    except isthmus.errors.IsthmusError as error:
        say({"rank": jax.process_index(), "refused": str(error)})
    torch.manual_seed(5)
    other = make("mlp").to("jax")
    for parameter in other.parameters():  # along other dims than fully_shard chose
        last = parameter.dim() - 1
        fits = parameter.shape[last] % 8 == 0 and dist.sharding_of(parameter) != (Shard(last),)
        dist.shard_(parameter, mesh, [Shard(last) if fits else Replicate()])
    splits = [dist.sharding_of(parameter) for parameter in other.parameters()]
    assert splits != [dist.sharding_of(parameter) for parameter in model.parameters()]
    found = [torch.zeros_like(parameter) for parameter in other.parameters()]
    loaded = {
        "model": other.state_dict(),
        "optimizer": {n: {"exp_avg": zero} for n, zero in enumerate(found)},
    }
    dcp.load(loaded, checkpoint_id=folder)
    assert [dist.sharding_of(tensor) for tensor in [*other.parameters(), *found]] == splits * 2
    assert all(torch.equal(a.cpu(), b) for a, b in zip(other.parameters(), want, strict=True))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, moments, strict=True))
    nn.init.zeros_(other[0].weight)
    dcp.load({"model": other.state_dict()}, checkpoint_id=folder / "later")
    assert torch.equal(other[0].weight.detach().cpu(), want[0])
    dist.check_replicas()


def orbax(model: nn.Module, mesh: dist.DeviceMesh, folder: Path) -> None:
    """Save by isthmus.checkpoint, fail in the first process, and load the old one split otherwise."""
    import jax

    isthmus.checkpoint.save(folder, {"model": model, "step": 1})
    want = [parameter.detach().cpu() for parameter in model.parameters()]
    nn.init.zeros_(model[0].weight)
    seal, checksums.seal = checksums.seal, full_disk
    refusals = []
    for force in (False, True):
        try:
            isthmus.checkpoint.save(folder, {"model": model, "step": 2}, force=force)
        except (OSError, ValueError, isthmus.errors.IsthmusError) as error:
            refusals.append(str(error))
    checksums.seal = seal
    say({"rank": jax.process_index(), "refused": refusals})
    rest = isthmus.checkpoint.load(folder, {"model": model})
    assert rest == {"step": 1}
    assert all(torch.equal(a.detach().cpu(), b) for a, b in zip(model.parameters(), want, strict=True))
    isthmus.checkpoint.save(folder, {"model": model, "step": 2}, force=True)
    other = make("mlp").to("jax")
    dist.shard_(other[2].weight, mesh, [Shard(1)])
    assert isthmus.checkpoint.load(folder, {"model": other}) == {"step": 2}
    assert all(torch.equal(a.detach().cpu(), b) for a, b in zip(other.parameters(), want, strict=True))
    assert dist.sharding_of(other[2].weight) == (Shard(1),)


def full_disk(folder: Path) -> None:
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, "no space left")


if __name__ == "__main__":
    main()
