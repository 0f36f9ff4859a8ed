"""Checks that need four ranks: groups of some of them, meshes of two dims, pipelines."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from tests.distributed.models import make, part, same_training, train
from tests.distributed.training import parallel, shard

warnings.simplefilter("ignore")


def check_groups_of_some(rank: int, world: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = torch.tensor([float(rank)], device="jax")
    dist.all_reduce(x, group=pairs[rank % 2])
    assert x.item() == rank % 2 + rank % 2 + 2
    y = torch.tensor([float(rank)], device="jax")
    dist.broadcast(y, 2 + rank % 2, group=pairs[rank % 2])  # the root by its rank in the world
    assert y.item() == 2 + rank % 2
    split = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    out = torch.empty(2, device="jax")
    dist.all_gather_into_tensor(out, torch.tensor([float(rank)], device="jax"), group=split)
    assert out.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]


def check_hsdp(rank: int, world: int) -> None:
    mesh = init_device_mesh("jax", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = shard(make("mlp").to("jax"), mesh=mesh)
    assert module.up.weight.to_local().shape == (8, 8)
    same_training("mlp", module, train(module, "mlp", part(rank, world)))


def check_fsdp_and_tensor_parallel(rank: int, world: int) -> None:
    mesh = init_device_mesh("jax", (2, 2), mesh_dim_names=("dp", "tp"))
    module = parallel(make("llama").to("jax"), mesh["tp"])
    for block in module.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    same_training(
        "llama", module, train(module, "llama", part(mesh["dp"].get_local_rank(), 2), foreach=False)
    )


def check_compiled_hsdp(rank: int, world: int) -> None:
    mesh = init_device_mesh("jax", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = shard(make("mlp").to("jax"), mesh=mesh)
    compiled = torch.compile(module, backend="isthmus")
    same_training("mlp", module, train(compiled, "mlp", part(rank, world)))


def check_compiled_groups_of_some(rank: int, world: int) -> None:
    import torch.distributed._functional_collectives as functional

    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]

    def f(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", pair) + 1

    got = torch.compile(f, backend="isthmus", fullgraph=True)(torch.full((3,), float(rank), device="jax"))
    assert got.tolist() == [2.0 * (rank // 2 * 4 + 1) + 1] * 3


def check_pipelines(rank: int, world: int) -> None:
    """Every schedule, with one stage a rank or two, gives the gradients of the whole batch, twice."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
    for schedule_of, stages_each in (
        (ScheduleGPipe, 1),
        (Schedule1F1B, 1),
        (ScheduleInterleaved1F1B, 2),
        (ScheduleLoopedBFS, 2),
        (ScheduleInterleavedZeroBubble, 2),
        (ScheduleZBVZeroBubble, 2),
    ):
        count = world * stages_each
        own = [rank + world * n for n in range(stages_each)]
        if schedule_of is ScheduleZBVZeroBubble:  # the last stages go back the way of the first
            own = [rank, count - 1 - rank]
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)]
        model = nn.Sequential(*copy.deepcopy(layers))
        stages = [PipelineStage(layers[n].to("jax"), n, count, torch.device("jax")) for n in own]
        schedule = schedule_of(
            stages[0] if stages_each == 1 else stages, n_microbatches=4, loss_fn=F.mse_loss
        )
        losses: list[torch.Tensor] = []
        for _ in range(2):
            losses.clear()
            for layer in layers:
                layer.zero_grad()
            is_last = count - 1 in own
            schedule.step(
                *([x.to("jax")] if 0 in own else []),
                **({"target": y.to("jax"), "losses": losses} if is_last else {}),
            )
        loss = F.mse_loss(model(x), y)
        if is_last:
            mean = torch.stack([each.detach() for each in losses]).mean()
            torch.testing.assert_close(mean.cpu(), loss.detach())
        # Gradients of a mean over microbatches, as the schedule scales them.
        loss.backward()
        for n in own:
            torch.testing.assert_close(
                layers[n][0].weight.grad.cpu(), model[n][0].weight.grad, rtol=1e-5, atol=1e-6
            )
