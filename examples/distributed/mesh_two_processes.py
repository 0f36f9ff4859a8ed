"""One program over two processes with four devices each, as over two hosts; each process reads its own rows.

XLA_FLAGS=--xla_force_host_platform_device_count=4 NPROC=32 \
    torchrun --nproc-per-node=2 examples/distributed/mesh_two_processes.py

On two hosts: ``torchrun --nnodes=2 --nproc-per-node=1 --rdzv-endpoint=HOST:PORT ...`` on both, without the flags.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import isthmus
import isthmus.distributed as dist


def main() -> None:
    """Train a model that is fully sharded over the devices of all processes."""
    dist.initialize()  # before the first tensor
    import jax

    torch.manual_seed(0)  # the same parameters in every process
    mesh = dist.init_device_mesh((jax.device_count(),), ("dp",))
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8)).to("jax")
    dist.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)

    @isthmus.jit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(512, 32)
    rows = TensorDataset(x, x[:, :8].argmax(1))
    sampler = DistributedSampler(rows, jax.process_count(), jax.process_index())
    loader = DataLoader(rows, batch_size=32, sampler=sampler, drop_last=True)  # 32 rows a process
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses = [step(*batch) for batch in dist.shard_batches(loader, mesh)]
        if jax.process_index() == 0:  # the loss is replicated: reading it is no collective
            print(f"epoch {epoch}: loss {losses[-1].item():.3f}", flush=True)


if __name__ == "__main__":
    main()
