"""Train with DistributedDataParallel, a process for each device: a script for CUDA with "jax" in place of "cuda".

torchrun --nproc-per-node=2 examples/ddp.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, SAMPLES = 4, 256


def data() -> TensorDataset:
    """Return points and the quadrant each is in, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(SAMPLES, 2, generator=generator)
    return TensorDataset(points, (points > 0).long() @ torch.tensor([1, 2]))


def main() -> list[float]:
    """Train; return the loss of each epoch, averaged over the processes."""
    dist.init_process_group()  # before the first tensor on "jax"
    device = torch.device(f"jax:{os.environ['LOCAL_RANK']}")
    torch.manual_seed(dist.get_rank())  # DDP sends the parameters of rank 0 to the others
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    samples = data()
    sampler = DistributedSampler(samples, seed=0)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        loader = DataLoader(samples, batch_size=16, sampler=sampler)
        for points, quadrants in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(points.to(device)), quadrants.to(device))
            loss.backward()  # gradients are averaged over the processes meanwhile
            optimizer.step()
            total += loss.detach() / len(loader)
        dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}", flush=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
