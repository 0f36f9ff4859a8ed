"""Checks of training by ranks: DDP, FSDP2, tensor parallelism, checkpoints, against one process on the CPU."""

from __future__ import annotations

import contextlib
import copy
import gc
import tempfile
import warnings
from typing import Any

import jax
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP

import isthmus
from tests.distributed.models import (
    batches,
    close_to,
    loss_by,
    make,
    on_cpu,
    optimizer_of,
    part,
    same_training,
    train,
)

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
    compiled = isthmus.metrics.counts()["compilations"]
    train(module, "mlp", part(rank, world))
    assert isthmus.metrics.counts()["compilations"] == compiled


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


def check_sync_batch_norm(rank: int, world: int) -> None:
    """Uneven parts of a batch train as the whole batch does, running statistics included, in eager and lazy mode."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    x, y = torch.randn(2 * world + 1, 2, 6, 6), torch.randn(2 * world + 1, 3)
    rows = slice(0, 3) if rank == 0 else slice(2 * rank + 1, 2 * rank + 3)
    for context in (contextlib.nullcontext, isthmus.lazy):
        model = copy.deepcopy(whole)
        module = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole)).to("jax"))
        here, there = torch.optim.SGD(model.parameters(), 1e-3), torch.optim.SGD(module.parameters(), 1e-3)
        for _ in range(3):
            here.zero_grad()
            (model(x) - y).square().sum().backward()
            here.step()
            with context():
                there.zero_grad()
                # Ranks average their gradients.
                ((module(x[rows].to("jax")) - y[rows].to("jax")).square().sum() * world).backward()
                there.step()
        for got, want in zip(module.module.state_dict().values(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-6)


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
    left_alone = Branches().to("jax")
    DDP._set_params_and_buffers_to_ignore_for_model(left_alone, ["unused.weight", "unused.bias"])
    module = DDP(left_alone, find_unused_parameters=True)
    F.mse_loss(module(take(x), rank == 0), take(y)).backward()
    assert (left_alone.unused.weight.grad is None) == (rank != 0)
    wanted = sum(model.used.weight.grad for model in models) / world
    torch.testing.assert_close(left_alone.used.weight.grad.cpu(), wanted)


def check_ddp_comm_hooks(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hooks = {
        default_hooks.allreduce_hook: 1e-5,
        default_hooks.fp16_compress_hook: 2e-2,
        default_hooks.bf16_compress_hook: 5e-2,
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook): 5e-2,
        # Of full rank, so that nothing is lost.
        powerSGD_hook.powerSGD_hook: 1e-4,
    }
    for hook, tolerance in hooks.items():
        module = DDP(make("mlp").to("jax"))
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2)
        is_power = hook is powerSGD_hook.powerSGD_hook
        module.register_comm_hook(state if is_power else None, hook)
        # PowerSGD sends gradients as they are until its iteration 2, which is the third step.
        losses = train(module, "mlp", part(rank, world), settled=3 if is_power else 2)
        same_training("mlp", module, losses, tolerance)


def check_fsdp(rank: int, world: int) -> None:
    module = shard(make("mlp").to("jax"), mesh=init_device_mesh("jax", (world,)))
    assert module.up.weight.to_local().shape == (16 // world, 8)
    optimizer = optimizer_of(module, "mlp")
    same_training("mlp", module, train(module, "mlp", part(rank, world), optimizer=optimizer))
    for parameter in module.parameters():
        for each in (parameter, parameter.grad, optimizer.state[parameter]["exp_avg"]):
            assert each.to_local().numel() * world == each.numel()


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
    exact = on_cpu("mlp", torch.float64)[1].up.weight
    parts = [weight.chunk(world)[rank] for weight in (exact, model.up.weight)]
    close_to(parts[0], module.up.weight.to_local(), parts[1])


def check_tensor_parallel(rank: int, world: int) -> None:
    for name in ("gpt", "llama"):
        module = parallel(make(name).to("jax"), init_device_mesh("jax", (world,)))
        losses = train(module, name, lambda x: x.to("jax"), foreach=False)
        same_training(name, module, losses)


def check_sequence_parallel(rank: int, world: int) -> None:
    """Norms on parts of a sequence, an embedding and a head split by tokens, and a loss of split logits."""
    mesh = init_device_mesh("jax", (world,))
    whole, split = PrepareModuleInput, Shard(1)
    for name in ("gpt", "llama"):
        module, model = make(name).to("jax"), make(name)
        plan: dict[str, Any] = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": whole(input_layouts=split, desired_input_layouts=Replicate()),
            **{f"attention.{each}": ColwiseParallel() for each in "qkv"},
            "attention.o": RowwiseParallel(output_layouts=split),
            "up": ColwiseParallel(input_layouts=split),
            "down": RowwiseParallel(output_layouts=split),
        }
        for block in module.blocks:
            own = plan | ({"gate": ColwiseParallel(input_layouts=split)} if block.llama else {})
            parallelize_module(block, mesh, own)
        logits = ColwiseParallel(input_layouts=split, output_layouts=Shard(-1), use_local_output=False)
        embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=split)
        parallelize_module(module, mesh, {"embed": embed, "head": logits})
        optimizers = [optimizer_of(each, name, foreach=False) for each in (module, model)]
        for data in batches(name):
            for each, optimizer in zip((module, model), optimizers, strict=True):
                device = next(each.parameters()).device
                optimizer.zero_grad()
                with loss_parallel() if each is module else contextlib.nullcontext():
                    loss = loss_by(each, name, tuple([x.to(device) for x in data]))
                    loss.backward()
                optimizer.step()
        for got, want in zip(module.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(got.full_tensor().cpu(), want.detach(), rtol=1e-5, atol=1e-5)


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


def check_live_bytes(rank: int, world: int) -> None:
    for wrapped in (shard, DDP):
        module = wrapped(make("mlp").to("jax"))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        sizes = []
        for _ in range(9):
            for _ in range(4):
                train(module, "mlp", part(rank, world), optimizer=optimizer)
            gc.collect()
            # Without numbers such as Adam's step size, of which a bounded cache keeps the last.
            sizes.append(sum(array.nbytes for array in jax.live_arrays() if array.ndim))
        assert len(set(sizes[1:])) == 1, sizes


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
