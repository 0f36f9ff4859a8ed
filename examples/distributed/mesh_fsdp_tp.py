"""FSDP and tensor parallelism in one process: a model split over four devices by batch and two by features.

XLA_FLAGS=--xla_force_host_platform_device_count=8 NPROC=32 python examples/distributed/mesh_fsdp_tp.py

The flags make eight devices of one CPU; on a machine with eight GPUs or TPU cores leave them out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import isthmus
import isthmus.distributed as dist


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def train(model: nn.Module, mesh: dist.DeviceMesh | None, steps: int = 10) -> list[float]:
    """Return the losses of a training, as one program a step."""
    device = "cpu" if mesh is None else "jax"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, capturable=mesh is not None)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(1)
    batches = [(x, x.flip(1)) for x in torch.randn(steps, 16, 32)]
    if mesh is None:
        return [step(x.to(device), y.to(device)).item() for x, y in batches]
    compiled = isthmus.jit(step)
    return [compiled(x, y).item() for x, y in dist.shard_batches(batches, mesh["dp"])]


def make() -> nn.Module:
    """Return the model with its first parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block(32) for _ in range(2)])


def main() -> tuple[list[float], list[float]]:
    """Train on the CPU and on the mesh, and return both losses."""
    mesh = dist.init_device_mesh((4, 2), ("dp", "tp"))
    model = make().to("jax")
    dist.parallelize_module(model, mesh["tp"], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
    dist.fully_shard(model, mesh=mesh["dp"])
    print("0.up.weight", tuple(model[0].up.weight.shape), dist.sharding_of(model[0].up.weight))
    split, whole = train(model, mesh), train(make(), None)
    print("loss on the mesh", split[0], "to", split[-1])
    print("loss on the CPU ", whole[0], "to", whole[-1])
    return split, whole


if __name__ == "__main__":
    main()
