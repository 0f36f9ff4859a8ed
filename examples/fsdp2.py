"""Shard a transformer with FSDP2, train it, and save and load a checkpoint: torch's own code on device "jax".

torchrun --nproc-per-node=2 examples/fsdp2.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, VOCABULARY, STEPS = 32, 32, 8


class Model(nn.Module):
    """Tokens in, the logits of the next token out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        layer = nn.TransformerEncoderLayer
        self.blocks = nn.ModuleList([layer(WIDTH, 4, 64, 0.0, batch_first=True) for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def main() -> tuple[list[float], bool]:
    """Train; return the losses, and whether the loaded parameters are those that were saved."""
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("jax", (world,))
    torch.manual_seed(0)
    model = Model().to("jax")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)  # each process holds a part of every parameter of the block
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)  # every process has its own batches
    losses = []
    for step in range(STEPS):
        start = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
        tokens = ((start + torch.arange(9)) % VOCABULARY).to("jax")  # counting, from a random number on
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        average = loss.detach().clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        losses.append(average.item())
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    saved = model.head.weight.full_tensor()
    dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])  # each process writes its part
    with torch.no_grad():
        model.head.weight.zero_()
    dcp.load(state := get_model_state_dict(model), checkpoint_id=folder[0])
    set_model_state_dict(model, state)
    same = torch.equal(model.head.weight.full_tensor(), saved)
    dist.destroy_process_group()
    return losses, same


if __name__ == "__main__":
    print(f"loaded as saved: {main()[1]}", flush=True)
