"""ms per training step on a mesh: isthmus.jit and the other modes beside hand-written JAX with the same shardings.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 NPROC=32 python benchmarks/distributed.py --parallel fsdp

Both train the same residual MLP with SGD and momentum, from the same parameters and on the same batch; their losses are
compared first. Contenders take turns, round after round; a time is the fastest of its rounds, and ratios are to the
faster of the hand-written programs.

With parameters split there are two of those. One gathers each weight where it is used, as FSDP does. The other says how
parameters, momenta and the batch are split and leaves the rest to XLA, which then moves activations where they are
smaller than weights (``--batch 64``): that is tensor parallelism, and no FSDP.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import isthmus
import isthmus.distributed as dist

WIDTH, HIDDEN, LAYERS = 128, 512, 4
Run = Callable[[], Any]


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def hand_written(model: nn.Module, x: Tensor, y: Tensor, mesh: Any, split: bool, gathers: bool) -> Run:
    """Return a step of hand-written JAX on the same parameters, split as ``fully_shard`` splits them.

    ``gathers`` says that weights are gathered and activations stay, which XLA is otherwise free to choose.
    """

    def place(array: np.ndarray) -> NamedSharding:
        dims = [d for d in range(array.ndim) if array.shape[d] % mesh.size == 0] if split else []
        best = max(dims, key=lambda d: (array.shape[d], -d), default=None)
        return NamedSharding(mesh, P() if best is None else P(*[None] * best, "dp"))

    params = {k: v.detach().numpy() for k, v in model.named_parameters()}
    places = {k: place(v) for k, v in params.items()}
    state = [{k: jax.device_put(v, places[k]) for k, v in params.items()}]
    state.append({k: jax.device_put(np.zeros_like(v), places[k]) for k, v in params.items()})
    rows = NamedSharding(mesh, P("dp"))
    batch = [jax.device_put(t.numpy(), rows) for t in (x, y)]

    def loss(p: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        if gathers:
            p = {k: jax.lax.with_sharding_constraint(v, NamedSharding(mesh, P())) for k, v in p.items()}
        for n in range(LAYERS):
            centred = x - x.mean(-1, keepdims=True)
            h = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
            h = h * p[f"{n}.norm.weight"] + p[f"{n}.norm.bias"]
            h = jax.nn.relu(h @ p[f"{n}.up.weight"].T + p[f"{n}.up.bias"])
            x = x + h @ p[f"{n}.down.weight"].T + p[f"{n}.down.bias"]
            x = jax.lax.with_sharding_constraint(x, rows) if gathers else x
        return ((x - y) ** 2).mean()

    def step(p: Any, m: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x, y)
        m = {k: jax.lax.with_sharding_constraint(0.9 * m[k] + grads[k], places[k]) for k in p}
        return {k: p[k] - 0.01 * m[k] for k in p}, m, value

    compiled = (
        jax.jit(step, donate_argnums=(0, 1), out_shardings=(places, places, None))
        .lower(*state, *batch)
        .compile()
    )

    def run() -> Any:
        state[0], state[1], value = compiled(*state, *batch)
        return value

    return run


def in_torch(model: nn.Module, x: Tensor, y: Tensor, mesh: Any, split: bool, mode: str) -> Run:
    """Return a step of torch code in a mode."""
    model = copy.deepcopy(model).to("jax")
    if split:
        dist.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    forward = torch.compile(model, backend="isthmus") if mode == "compile" else model
    x, y = [dist.distribute_tensor(t, mesh, [Shard(0)]) for t in (x, y)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(forward(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if mode == "jit":
        compiled = isthmus.jit(step)
        return lambda: compiled(x, y)
    if mode == "lazy":

        def recorded() -> Tensor:
            with isthmus.lazy():
                return step(x, y)

        return recorded
    return lambda: step(x, y)


def value(result: Any) -> float:
    """Wait for a loss and return it."""
    return result.item() if isinstance(result, Tensor) else float(jnp.asarray(result))


def main() -> None:
    """Compare losses, then times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parallel", choices=["dp", "fsdp"], default="fsdp")
    parser.add_argument("--modes", default="jit", help="of jit, lazy, compile, eager")
    parser.add_argument("--batch", type=int, default=4096, help="rows, over all devices")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(LAYERS)])
    x, y = torch.randn(options.batch, WIDTH), torch.randn(options.batch, WIDTH)
    mesh, split = dist.init_device_mesh((-1,), ("dp",)), options.parallel == "fsdp"
    runs = {"JAX": hand_written(model, x, y, mesh.jax_mesh, split, gathers=split)}
    if split:
        runs["JAX, XLA chooses"] = hand_written(model, x, y, mesh.jax_mesh, split, gathers=False)
    by_hand = list(runs)
    runs |= {mode: in_torch(model, x, y, mesh, split, mode) for mode in options.modes.split(",")}
    losses = {name: [value(run()) for _ in range(5)] for name, run in runs.items()}
    want = losses["JAX"]
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(options.rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            for _ in range(options.steps):
                value(run())
            best[name] = min(best[name], (time.perf_counter() - started) / options.steps * 1e3)
    print(f"{options.parallel}, {mesh.size()} devices, {jax.devices()[0].platform}, batch {options.batch}")
    for name, milliseconds in best.items():
        error = max(abs(a - b) for a, b in zip(losses[name], want, strict=True))
        ratio = milliseconds / min(best[each] for each in by_hand)
        print(f"{name:18} {milliseconds:8.2f} ms   {ratio:5.2f} x   losses differ by {error:.1e}")


if __name__ == "__main__":
    main()
