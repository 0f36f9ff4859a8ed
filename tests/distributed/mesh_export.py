"""Exports a split model and runs the program: ``python -m tests.distributed.mesh_export write|read FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import isthmus
import isthmus.distributed as dist
from isthmus._export import loader
from isthmus.errors import ExportError
from tests.distributed.mesh_process import say


class Model(nn.Module):
    """Weights split by both dims of a mesh, a tied one, and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)
        self.again = nn.Linear(16, 64)
        self.again.weight = self.up.weight
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a block's output plus how often it was called."""
        self.calls.add_(1)
        return self.down(torch.relu(self.up(x) + self.again(x))) + self.calls[0]


def write(folder: Path) -> None:
    """Export a model with FSDP x TP, and one that nothing splits."""
    torch.manual_seed(0)
    mesh = dist.init_device_mesh((4, 2), ("dp", "tp"))
    model, whole = Model(), nn.Linear(16, 4).to("jax")
    x = torch.randn(8, 16)
    batch = torch.export.Dim("batch", max=64)
    expected = [model(x).detach().numpy() for _ in range(2)]
    model.calls.zero_()
    model.to("jax")
    dist.parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    dist.fully_shard(model, mesh=mesh["dp"])
    isthmus.export(model, x.to("jax"), path=folder / "split.isthmus")
    isthmus.export(
        model.down, torch.randn(4, 64).to("jax"), dynamic_shapes=({0: batch},), path=folder / "any"
    )
    isthmus.export(whole, x.to("jax"), path=folder / "whole")
    try:
        isthmus.export(model, x.to("jax"), precompile=True)
    except ExportError as error:
        say(str(error))
    np.savez(folder / "expected.npz", x=x.numpy(), first=expected[0], second=expected[1])
    np.savez(folder / "down.npz", weight=model.down.weight.detach().cpu().numpy())


def read(folder: Path) -> None:
    """Run the programs on a mesh whose devices are in another order, and without torch."""
    import jax

    mesh = dist.init_device_mesh((4, 2), ("dp", "tp"), devices=jax.devices()[::-1])
    known, down = np.load(folder / "expected.npz"), np.load(folder / "down.npz")["weight"]
    split, bare = isthmus.load(folder / "split.isthmus"), loader.load(folder / "split.isthmus")
    for expected in (known["first"], known["second"]):
        on_mesh = split(torch.from_numpy(known["x"]).to("jax"))
        np.testing.assert_allclose(on_mesh.cpu().numpy(), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(bare(known["x"]), expected, rtol=1e-5, atol=1e-5)
    assert split.again.weight is split.up.weight
    weights = {name: isthmus.to_jax(tensor) for name, tensor in split.state_dict().items()}
    del weights["again.weight"]
    assert weights.keys() == bare.weights.keys()
    text = split.program.run.lower(weights, {"x": known["x"]}).compile().as_text()
    sizes = {name: array.addressable_shards[0].data.size for name, array in weights.items()}
    say({"gathers": "all-gather" in text, "moves": "all-to-all" in text, "sizes": sizes})
    any_batch = isthmus.load(folder / "any")
    for rows in (2, 8):
        x = torch.randn(rows, 64)
        shown = any_batch(x.to("jax")).cpu().numpy()
        np.testing.assert_allclose(shown, x.numpy() @ down.T, rtol=1e-5, atol=1e-5)
    assert mesh.size() == 8


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
