"""Checks of collectives inside compiled graphs: one XLA program, equal to eager, the group is not asked."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from isthmus._distributed.group import JaxGroup
from isthmus._dynamo import compile_log

warnings.simplefilter("ignore")
Tensor = torch.Tensor


class counting:
    """Counts the collectives that groups run."""

    def __enter__(self) -> list[str]:
        self.names: list[str] = []
        self.theirs = JaxGroup._run

        def run(group: JaxGroup, name: str, *args: Any) -> Any:
            self.names.append(name)
            return self.theirs(group, name, *args)

        JaxGroup._run = run
        return self.names

    def __exit__(self, *error: object) -> None:
        JaxGroup._run = self.theirs


def check_one_program(rank: int, world: int) -> None:
    group = dist.group.WORLD

    def f(x: Tensor, y: Tensor) -> Tensor:
        h = (x * 2 + y).relu()
        s = functional.all_reduce(h, "sum", group)
        g = functional.all_gather_tensor(s * 2, 0, group)
        q = functional.reduce_scatter_tensor(g.sin(), "avg", 0, group)
        t = functional.all_to_all_single(q, None, None, group)
        b = functional.broadcast(t, 1, group)
        m = functional.all_reduce(h.amax(), "max", group)
        return b + h + m

    x, y = torch.arange(8.0, device="jax") + rank, torch.ones(8, device="jax") * rank
    wanted = f(x, y).cpu()
    compiled = torch.compile(f, backend="isthmus", fullgraph=True)
    with counting() as asked, compile_log.recording() as record:
        got = compiled(x, y)
        again = compiled(x, y)
    assert asked == []
    (program,) = record.compilations
    text = program.executable.compiled.as_text()
    assert all(name in text for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"))
    torch.testing.assert_close(got.cpu(), wanted)
    torch.testing.assert_close(again.cpu(), wanted)


def check_scalars_and_writes(rank: int, world: int) -> None:
    group = dist.group.WORLD
    counter = torch.tensor(float(rank), device="jax")

    def f(x: Tensor, scale: Tensor) -> Tensor:
        counter.add_(functional.all_reduce(x.sum() * scale, "sum", group))
        return functional.all_reduce(scale, "sum", group) + counter

    compiled = torch.compile(f, backend="isthmus", fullgraph=True)
    total = float(rank)
    for step in range(3):
        x, scale = torch.ones(3, device="jax") * (rank + 1), torch.tensor(2.0 + rank + step, device="jax")
        got = compiled(x, scale)
        total += sum(3.0 * (r + 1) * (2.0 + r + step) for r in range(world))
        assert counter.item() == total
        assert got.item() == total + sum(2.0 + r + step for r in range(world))


def check_gradients(rank: int, world: int) -> None:
    group = dist.group.WORLD

    def f(x: Tensor, w: Tensor) -> Tensor:
        gathered = functional.all_gather_tensor_autograd(w, 0, group)
        return (x @ gathered).square().mean()

    torch.manual_seed(rank)
    x = torch.randn(4, 2 * world, device="jax")
    weights = [torch.randn(2, 3, device="jax").requires_grad_() for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    f(x, weights[0]).backward()
    with counting() as asked:
        torch.compile(f, backend="isthmus", fullgraph=True)(x, weights[1]).backward()
    assert asked == []
    torch.testing.assert_close(weights[1].grad.cpu(), weights[0].grad.cpu())


def check_other_ranks_stay_outside(rank: int, world: int) -> None:
    alone = [dist.new_group([r]) for r in range(world)][rank]

    def f(x: Tensor) -> Tensor:
        return (
            functional.all_reduce(functional.all_reduce(x * 2, "sum", alone) + 1, "sum", dist.group.WORLD) * 3
        )

    x = torch.ones(3, device="jax") * rank
    got = torch.compile(f, backend="isthmus")(x)
    torch.testing.assert_close(got.cpu(), torch.full((3,), 3.0 * sum(2 * r + 1 for r in range(world))))
