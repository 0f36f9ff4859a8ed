"""Checks of training by ranks: DDP, FSDP2, tensor parallelism, checkpoints, against one process on the CPU."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.distributed.models import batches, loss_by, make, on_cpu, part, same_training, train

warnings.simplefilter("ignore")
Tensor = torch.Tensor


def shard(module: Any, **options: Any) -> Any:
    for block in getattr(module, "blocks", [getattr(module, "up", module)]):
        fully_shard(block, **options)
    return fully_shard(module, **options)


def parallel(module: Any, mesh: Any) -> Any:
    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in module.blocks:
        own = plan | ({"gate": ColwiseParallel()} if block.llama else {})
        parallelize_module(block, mesh, own)
    return module


def check_ddp(rank: int, world: int) -> None:
    module = DDP(make("mlp").to("jax"), bucket_cap_mb=0.0005)
    same_training("mlp", module, train(module, "mlp", part(rank, world)))


def check_ddp_static_graph_and_views(rank: int, world: int) -> None:
    module = DDP(make("gpt").to("jax"), static_graph=True, gradient_as_bucket_view=True)
    same_training("gpt", module, train(module, "gpt", part(rank, world)))


def check_ddp_no_sync(rank: int, world: int) -> None:
    module = DDP(make("mlp").to("jax"))
    first, second, _ = batches("mlp")
    take = part(rank, world)
    with module.no_sync():
        loss_by(module, "mlp", (take(first[0]), take(first[1]))).backward()
    own = module.module.up.weight.grad.clone()
    loss_by(module, "mlp", (take(second[0]), take(second[1]))).backward()
    model = make("mlp")
    (model.loss(first) + model.loss(second)).backward()
    torch.testing.assert_close(module.module.up.weight.grad.cpu(), model.up.weight.grad, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(own.cpu(), model.up.weight.grad)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.used(x) + (self.unused(x) if both else 0)


def check_ddp_unused_parameters(rank: int, world: int) -> None:
    module = DDP(Branches().to("jax"), find_unused_parameters=True)
    model = Branches()
    x, y = batches("mlp")[0]
    take = part(rank, world)
    for both in (False, True, False):
        module.zero_grad()
        model.zero_grad()
        F.mse_loss(module(take(x), both), take(y)).backward()
        assert (module.module.unused.weight.grad is None) == (not both)
        F.mse_loss(model(x, both), y).backward()
        torch.testing.assert_close(module.module.used.weight.grad.cpu(), model.used.weight.grad)
        if both:
            torch.testing.assert_close(module.module.unused.weight.grad.cpu(), model.unused.weight.grad)


def check_ddp_unused_on_one_rank(rank: int, world: int) -> None:
    module = DDP(Branches().to("jax"), find_unused_parameters=True)
    models = [Branches() for _ in range(world)]
    x, y = batches("mlp")[0]
    take = part(rank, world)
    F.mse_loss(module(take(x), rank == 0), take(y)).backward()
    for r, model in enumerate(models):
        F.mse_loss(model(x.chunk(world)[r], r == 0), y.chunk(world)[r]).backward()
    wanted = models[0].unused.weight.grad / world
    torch.testing.assert_close(module.module.unused.weight.grad.cpu(), wanted)


def check_ddp_comm_hooks(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

    for hook, tolerance in ((allreduce_hook, 1e-5), (fp16_compress_hook, 2e-2)):
        module = DDP(make("mlp").to("jax"))
        module.register_comm_hook(None, hook)
        same_training("mlp", module, train(module, "mlp", part(rank, world)), tolerance)


def check_fsdp(rank: int, world: int) -> None:
    module = shard(make("mlp").to("jax"), mesh=init_device_mesh("jax", (world,)))
    assert module.up.weight.to_local().shape == (16 // world, 8)
    same_training("mlp", module, train(module, "mlp", part(rank, world)))
    optimizer_free = [p for p in module.parameters() if p.to_local().numel() * world != p.numel()]
    assert not optimizer_free


def check_fsdp_gpt_without_reshard(rank: int, world: int) -> None:
    module = shard(make("gpt").to("jax"), reshard_after_forward=False)
    same_training("gpt", module, train(module, "gpt", part(rank, world)))


def check_fsdp_mixed_precision(rank: int, world: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = shard(make("mlp").to("jax"), mp_policy=policy)
    losses = train(
        module, "mlp", part(rank, world), lambda module, data: F.mse_loss(module(data[0]).float(), data[1])
    )
    wanted, _ = on_cpu("mlp")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=0, atol=3e-2)
    assert module.up.weight.dtype == torch.float32


def check_fsdp_cpu_offload(rank: int, world: int) -> None:
    module = shard(
        make("mlp"), mesh=init_device_mesh("jax", (world,)), offload_policy=CPUOffloadPolicy(pin_memory=False)
    )
    losses = train(module, "mlp", part(rank, world))
    assert module.up.weight.to_local().device.type == "cpu"
    wanted, model = on_cpu("mlp")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        module.up.weight.to_local(), model.up.weight.detach().chunk(world)[rank], rtol=0, atol=1e-4
    )


def check_tensor_parallel(rank: int, world: int) -> None:
    for name in ("gpt", "llama"):
        module = parallel(make(name).to("jax"), init_device_mesh("jax", (world,)))
        losses = train(module, name, lambda x: x.to("jax"), foreach=False)
        same_training(name, module, losses)


def check_checkpoints(rank: int, world: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    module = shard(make("mlp").to("jax"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    train(module, "mlp", part(rank, world), optimizer=optimizer)
    model_state, optimizer_state = get_state_dict(module, optimizer)
    wanted = {name: value.full_tensor().cpu() for name, value in model_state.items()}
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
    dcp.async_save({"model": model_state}, checkpoint_id=f"{folder[0]}/later").result()
    # Loaded into another sharding (none), and into the one it came from.
    whole = make("mlp").to("jax")
    with torch.no_grad():
        for parameter in [*whole.parameters(), *module.parameters()]:
            parameter.zero_()
    state = {"model": whole.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder[0]}/later")
    whole.load_state_dict(state["model"])
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(value.cpu(), wanted[name], rtol=0, atol=0)
    model_state, optimizer_state = get_state_dict(module, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
    set_state_dict(module, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value.full_tensor().cpu(), wanted[name], rtol=0, atol=0)


def check_sampler(rank: int, world: int) -> None:
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(torch.arange(10.0))
    sampler = DistributedSampler(data, shuffle=True)
    sampler.set_epoch(1)
    seen = torch.cat([batch[0].to("jax") for batch in DataLoader(data, batch_size=2, sampler=sampler)])
    every = [torch.empty_like(seen) for _ in range(world)]
    dist.all_gather(every, seen)
    assert sorted(torch.cat(every).tolist()) == list(range(10))


def check_compile_ddp(rank: int, world: int) -> None:
    module = DDP(make("gpt").to("jax"))
    compiled = torch.compile(module, backend="isthmus")
    same_training("gpt", module, train(compiled, "gpt", part(rank, world)))


def check_compile_fsdp(rank: int, world: int) -> None:
    module = shard(make("gpt").to("jax"))
    compiled = torch.compile(module, backend="isthmus")
    same_training("gpt", module, train(compiled, "gpt", part(rank, world)))


def check_compile_tensor_parallel(rank: int, world: int) -> None:
    module = parallel(make("gpt").to("jax"), init_device_mesh("jax", (world,)))
    compiled = torch.compile(module, backend="isthmus")
    same_training("gpt", module, train(compiled, "gpt", lambda x: x.to("jax"), foreach=False))
