"""Checks of every collective on "jax" tensors: what all ranks put in is known, so the answer is computed on the CPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import ReduceOp

import isthmus
from isthmus.errors import CollectiveError, JitError

warnings.simplefilter("ignore")
Tensor = torch.Tensor
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def data(rank: int, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what a rank puts in: small numbers, exact in every dtype."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def everyone(world: int, *args: Any) -> list[Tensor]:
    return [data(rank, *args) for rank in range(world)]


def same(got: Tensor, wanted: Tensor) -> None:
    assert got.device.type == "jax"
    torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=0)


FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def check_all_reduce_ops(rank: int, world: int) -> None:
    for op, fold in FOLDS.items():
        dtype = torch.int64 if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) else torch.float32
        x = data(rank, (2, 3), dtype).to("jax")
        dist.all_reduce(x, op)
        same(x, functools.reduce(fold, everyone(world, (2, 3), dtype)))
    x = data(rank).to("jax")
    dist.all_reduce(x, ReduceOp.AVG)
    same(x, sum(everyone(world)) / world)
    x = data(rank).to("jax")
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    same(x, sum(everyone(world)) * 0.5)


def check_all_reduce_dtypes(rank: int, world: int) -> None:
    for dtype in DTYPES:
        x = data(rank, (3,), dtype).to("jax")
        dist.all_reduce(x)
        same(x, functools.reduce(torch.add, everyone(world, (3,), dtype)))
    for op, wanted in ((ReduceOp.MIN, torch.logical_and), (ReduceOp.BXOR, torch.logical_xor)):
        x = data(rank, (5,), torch.bool).to("jax")
        dist.all_reduce(x, op)
        same(x, functools.reduce(wanted, everyone(world, (5,), torch.bool)))


def check_all_reduce_of_views(rank: int, world: int) -> None:
    base = data(rank, (4, 6)).to("jax")
    dist.all_reduce(base[1:3, ::2])
    wanted = data(rank, (4, 6))
    wanted[1:3, ::2] = sum(x[1:3, ::2] for x in everyone(world, (4, 6)))
    same(base, wanted)
    x = data(rank, (3, 4)).to("jax").t()
    dist.all_reduce(x)
    same(x, sum(everyone(world, (3, 4))).t())
    for shape in ((), (0, 3), (1,)):
        x = data(rank, shape).to("jax")
        dist.all_reduce(x)
        same(x, functools.reduce(torch.add, everyone(world, shape)))
    x = torch.tensor(5 + rank, device="jax")
    dist.all_reduce(x)
    same(x, torch.tensor(sum(5 + r for r in range(world))))


def check_async_and_coalesced(rank: int, world: int) -> None:
    x = data(rank).to("jax")
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert work.is_completed()
    same(x, sum(everyone(world)))
    x = data(rank).to("jax")
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    same(future.wait(), sum(everyone(world)) * 2)
    many = [data(rank, (n + 1,)).to("jax") for n in range(3)]
    dist.all_reduce_coalesced(many)
    for n, x in enumerate(many):
        same(x, sum(everyone(world, (n + 1,))))
    with dist._coalescing_manager():
        a, b = data(rank, (2,)).to("jax"), data(rank, (5,)).to("jax")
        dist.all_reduce(a)
        dist.all_reduce(b)
    same(a, sum(everyone(world, (2,))))
    same(b, sum(everyone(world, (5,))))
    parts = [torch.empty(n, device="jax") for n in (1, 3)]
    with dist._coalescing_manager():
        for part in parts:
            dist.reduce_scatter_tensor(part, data(rank, (world * part.numel(),)).to("jax"))
    for part in parts:
        same(part, sum(everyone(world, (world * part.numel(),))).chunk(world)[rank])
    lists = [[torch.empty(n, device="jax") for n in (2, 5)] for _ in range(world)]
    dist.all_gather_coalesced(lists, [data(rank, (n,)).to("jax") for n in (2, 5)])
    for r, outs in enumerate(lists):
        for out in outs:
            same(out, data(r, (out.numel(),)))
    with dist._coalescing_manager(async_ops=True) as pending:
        outs = [torch.empty(world * 2, device="jax") for _ in range(2)]
        for out in outs:
            dist.all_gather_into_tensor(out, data(rank, (2,)).to("jax"))
    pending.wait()
    for out in outs:
        same(out, torch.cat(everyone(world, (2,))))


def check_broadcast(rank: int, world: int) -> None:
    for dtype in DTYPES:
        for root in range(world):
            x = data(rank, (2, 2), dtype).to("jax")
            dist.broadcast(x, root)
            same(x, data(root, (2, 2), dtype))
    x = (
        torch.tensor([float("nan"), -0.0, float("inf")], device="jax")
        if rank == 0
        else torch.ones(3, device="jax")
    )
    dist.broadcast(x, 0)
    assert x.cpu().signbit().tolist()[1]
    assert x.isnan().tolist() == [True, False, False]


def check_all_gather(rank: int, world: int) -> None:
    for dtype in DTYPES:
        out = torch.empty(world * 2, 3, dtype=dtype, device="jax")
        dist.all_gather_into_tensor(out, data(rank, (2, 3), dtype).to("jax"))
        same(out, torch.cat(everyone(world, (2, 3), dtype)))
    out = torch.empty(world, 2, 3, device="jax")
    dist.all_gather_into_tensor(out, data(rank).to("jax"))
    same(out, torch.stack(everyone(world)))
    listed = [torch.empty(2, 3, device="jax") for _ in range(world)]
    dist.all_gather(listed, data(rank).to("jax"))
    for x, wanted in zip(listed, everyone(world), strict=True):
        same(x, wanted)
    uneven = [torch.empty(r + 1, 2, device="jax") for r in range(world)]
    dist.all_gather(uneven, data(rank, (rank + 1, 2)).to("jax"))
    for r, x in enumerate(uneven):
        same(x, data(r, (r + 1, 2)))
    base = torch.zeros(world * 2, 4, device="jax")
    dist.all_gather_into_tensor(base[:, 1:3], data(rank, (2, 2)).to("jax"))
    same(base[:, 1:3], torch.cat(everyone(world, (2, 2))))
    scalars = torch.empty(world, device="jax")
    dist.all_gather_into_tensor(scalars, torch.tensor(float(rank), device="jax"))
    same(scalars, torch.arange(float(world)))


def check_reduce_scatter(rank: int, world: int) -> None:
    wanted = sum(everyone(world, (2 * world, 3)))
    out = torch.empty(2, 3, device="jax")
    dist.reduce_scatter_tensor(out, data(rank, (2 * world, 3)).to("jax"))
    same(out, wanted.chunk(world)[rank])
    dist.reduce_scatter_tensor(out, data(rank, (2 * world, 3)).to("jax"), ReduceOp.AVG)
    same(out, wanted.chunk(world)[rank] / world)
    dist.reduce_scatter_tensor(out, data(rank, (2 * world, 3)).to("jax"), dist._make_nccl_premul_sum(2.0))
    same(out, wanted.chunk(world)[rank] * 2)
    dist.reduce_scatter_tensor(out, data(rank, (2 * world, 3)).to("jax"), ReduceOp.MAX)
    same(out, functools.reduce(torch.maximum, everyone(world, (2 * world, 3))).chunk(world)[rank])
    for dtype in (torch.bfloat16, torch.int64, torch.bool):
        part = torch.empty(2, dtype=dtype, device="jax")
        dist.reduce_scatter_tensor(part, data(rank, (2 * world,), dtype).to("jax"))
        same(part, functools.reduce(torch.add, everyone(world, (2 * world,), dtype)).chunk(world)[rank])
    dist.reduce_scatter(out, [data(rank * 10 + r).to("jax") for r in range(world)])
    same(out, sum(data(r * 10 + rank) for r in range(world)))
    uneven = torch.empty(rank + 1, device="jax")
    dist.reduce_scatter(uneven, [data(rank * 10 + r, (r + 1,)).to("jax") for r in range(world)])
    same(uneven, sum(data(r * 10 + rank, (rank + 1,)) for r in range(world)))


def check_all_to_all(rank: int, world: int) -> None:
    for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
        out = torch.empty(2 * world, 3, dtype=dtype, device="jax")
        dist.all_to_all_single(out, data(rank, (2 * world, 3), dtype).to("jax"))
        same(out, torch.cat([data(r, (2 * world, 3), dtype).chunk(world)[rank] for r in range(world)]))
    sizes = [[(sender + 2 * receiver) % 4 for receiver in range(world)] for sender in range(world)]
    receives = [sizes[sender][rank] for sender in range(world)]
    x = data(rank, (sum(sizes[rank]), 2))
    out = torch.empty(sum(receives), 2, device="jax")
    dist.all_to_all_single(out, x.to("jax"), receives, sizes[rank])
    inputs = [data(r, (sum(sizes[r]), 2)).split(sizes[r])[rank] for r in range(world)]
    same(out, torch.cat(inputs))
    # Everything goes from the first rank to the last, and the others have nothing to send.
    sends = [3 * (r == world - 1 and rank == 0) for r in range(world)]
    receives = [3 * (r == 0 and rank == world - 1) for r in range(world)]
    out = torch.empty(sum(receives), 2, device="jax")
    dist.all_to_all_single(out, data(rank, (sum(sends), 2)).to("jax"), receives, sends)
    same(out, data(0, (3, 2))[: sum(receives)])
    outs = [torch.empty(r + 1, rank + 1, device="jax") for r in range(world)]
    dist.all_to_all(outs, [data(rank * 10 + r, (rank + 1, r + 1)).to("jax") for r in range(world)])
    for r, x in enumerate(outs):
        same(x, data(r * 10 + rank, (r + 1, rank + 1)))


def check_rooted(rank: int, world: int) -> None:
    root = world - 1
    out = torch.empty(2, 3, device="jax")
    dist.scatter(out, [data(r).to("jax") for r in range(world)] if rank == root else None, src=root)
    same(out, data(rank))
    outs = [torch.empty(2, 3, device="jax") for _ in range(world)] if rank == root else None
    dist.gather(data(rank).to("jax"), outs, dst=root)
    for r, x in enumerate(outs or ()):
        same(x, data(r))
    x = data(rank).to("jax")
    dist.reduce(x, root)
    same(x, sum(everyone(world)) if rank == root else data(rank))


def check_messages(rank: int, world: int) -> None:
    after, before = (rank + 1) % world, (rank - 1) % world
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        got = torch.zeros(2, 3, dtype=dtype, device="jax")
        works = [dist.isend(data(rank, (2, 3), dtype).to("jax"), after), dist.irecv(got, before)]
        for work in works:
            work.wait()
        same(got, data(before, (2, 3), dtype))
    got = torch.zeros(4, 3, device="jax")
    operations = [
        dist.P2POp(dist.irecv, got[::2], before),
        dist.P2POp(dist.isend, data(rank).to("jax").t().contiguous().t(), after),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(got[::2], data(before))
    assert not got[1::2].any()
    if rank == 0:
        for work in [dist.isend(torch.full((3,), 8.0 - tag, device="jax"), 1, tag=tag) for tag in (7, 8)]:
            work.wait()
    if rank == 1:
        second, first = torch.empty(3, device="jax"), torch.empty(3, device="jax")
        dist.recv(second, 0, tag=8)
        assert dist.recv(first, tag=7) == 0
        same(first, torch.ones(3))
        same(second, torch.zeros(3))


def check_objects_and_cpu(rank: int, world: int) -> None:
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world)]
    gathered = [None] * world if rank == 1 else None
    dist.gather_object({"rank": rank}, gathered, dst=1)
    assert rank != 1 or gathered == objects
    one = [("from", rank)]
    dist.broadcast_object_list(one, 1)
    assert one == [("from", 1)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(world)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list([1, "two"], 1)
    if rank == 1:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, 0)
        assert received == [1, "two"]
    x = data(rank)
    dist.all_reduce(x)
    torch.testing.assert_close(x, sum(everyone(world)))
    gathered = functional.all_gather_tensor(data(rank), 0, dist.group.WORLD)
    torch.testing.assert_close(gathered + 0, torch.cat(everyone(world)))
    part = functional.reduce_scatter_tensor(data(rank, (2 * world,)), "sum", 0, dist.group.WORLD)
    torch.testing.assert_close(part + 0, sum(everyone(world, (2 * world,))).chunk(world)[rank])
    outs = [torch.empty(2, 3) for _ in range(world)]
    dist.all_gather(outs, data(rank))
    torch.testing.assert_close(outs, everyone(world))
    got = torch.zeros(2, 3)
    works = [dist.isend(data(rank), (rank + 1) % world), dist.irecv(got, (rank - 1) % world)]
    for work in works:
        work.wait()
    torch.testing.assert_close(got, data((rank - 1) % world))
    dist.barrier()


def check_functional(rank: int, world: int) -> None:
    x, group = data(rank, (2 * world, 3)).to("jax"), dist.group.WORLD
    every = everyone(world, (2 * world, 3))
    same(functional.all_reduce(x, "sum", group) + 0, sum(every))
    same(functional.all_reduce(x, "avg", group) + 0, sum(every) / world)
    same(functional.all_gather_tensor(x, 0, group) + 0, torch.cat(every))
    same(functional.all_gather_tensor(x, 1, group) + 0, torch.cat(every, 1))
    same(functional.reduce_scatter_tensor(x, "sum", 0, group) + 0, sum(every).chunk(world)[rank])
    parts = torch.cat([each.chunk(world)[rank] for each in every])
    same(functional.all_to_all_single(x, None, None, group) + 0, parts)
    same(functional.broadcast(x, 1, group) + 0, every[1])
    many = functional.all_reduce_coalesced([x, x[:1]], "sum", group)
    same(many[1] + 0, sum(every)[:1])


def check_groups(rank: int, world: int) -> None:
    half = [dist.new_group([r]) for r in range(world)][rank]
    x = data(rank).to("jax")
    dist.all_reduce(x, group=half)
    same(x, data(rank))
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x, group=pair)
        same(x, data(0) + data(1))
    split = dist.split_group(split_ranks=[list(range(world))])
    y = data(rank).to("jax")
    dist.broadcast(y, 1, group=split)
    same(y, data(1))
    assert dist.get_backend_config(split).startswith("jax:jax")
    dist.barrier(group=split)


def check_devices(rank: int, world: int) -> None:
    x = torch.ones(2, device=f"jax:{rank}")
    assert x.device == torch.device("jax:0")
    assert data(rank).to(f"jax:{rank}").device.type == "jax"
    torch.accelerator.set_device_index(rank)
    torch.jax.set_device(rank)
    with torch.jax.device(rank):
        assert torch.jax.current_device() == 0
    assert torch.nn.Linear(2, 2).to(torch.device("jax", rank)).weight.device.type == "jax"
    with pytest.raises(RuntimeError, match="jax:7"):
        torch.ones(2).to("jax:7")


def check_mismatches(rank: int, world: int) -> None:
    # gloo and XLA are not reached, so the group goes on afterwards.
    with pytest.raises(
        CollectiveError, match=rf"(?s)rank {rank}: .*rank 0 +all_reduce.*\[2\].*rank 1 +all_reduce.*\[3\]"
    ):
        dist.all_reduce(torch.ones(2 + min(rank, 1), device="jax"))
    with pytest.raises(CollectiveError, match=r"float64"):
        dist.all_reduce(torch.ones(2, device="jax", dtype=torch.float64 if rank else torch.float32))
    with pytest.raises(CollectiveError, match=r"(?s)broadcast.*all_reduce|all_reduce.*broadcast"):
        _ = (
            dist.broadcast(torch.ones(2, device="jax"), 0)
            if rank
            else dist.all_reduce(torch.ones(2, device="jax"))
        )
    with pytest.raises(CollectiveError, match=r"max.*\n.*sum|sum.*\n.*max"):
        dist.all_reduce(torch.ones(2, device="jax"), ReduceOp.MAX if rank else ReduceOp.SUM)
    with pytest.raises(CollectiveError, match=rf"rank {rank}: all_gather: 2 times"):
        dist.all_gather_into_tensor(torch.empty(3, device="jax"), torch.ones(2, device="jax"))
    x = data(rank).to("jax")
    dist.all_reduce(x)
    same(x, sum(everyone(world)))


def check_modes(rank: int, world: int) -> None:
    with isthmus.lazy():
        x = data(rank).to("jax") * 2
        dist.all_reduce(x)
        y = x + 1
    same(y, sum(everyone(world)) * 2 + 1)

    @isthmus.jit
    def step(x: Tensor) -> Tensor:
        x = x * 2
        dist.all_reduce(x)
        return x

    with pytest.raises(JitError, match=r"allreduce of torch\.distributed inside a function that is recorded"):
        step(data(rank).to("jax"))


def check_time_out(rank: int, world: int) -> None:
    """A rank that does not come: the last check, since the group is of no use afterwards."""
    late = dist.new_group(timeout=timedelta(seconds=2))
    x = torch.ones(2, device="jax")
    dist.all_reduce(x, group=late)
    if rank == 0:
        with pytest.raises(
            CollectiveError, match=r"rank 0: no answer from another rank in time, in all_reduce"
        ):
            dist.all_reduce(x, group=late)
    dist.barrier()
