"""ms of an op's first call on tensors of a new size, where it is compiled: device "jax" beside bare jax.jit.

    python benchmarks/first_call.py --repeats 12

Every call meets a size that nobody has had before it. Contenders take turns; a time is the median of the calls.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

import isthmus  # noqa: F401  # the device

# The sides of squares.
SIDES = {"small": 24, "large": 160}
TORCH: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + x,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (x.shape[1],)),
    "mm": lambda x: x @ x.t(),
    "cat": lambda x: torch.cat([x, x]),
    "sum": lambda x: x.sum(0),
}


def normalised(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


JAX: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + x,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "softmax": jax.nn.softmax,
    "layer_norm": normalised,
    "mm": lambda x: x @ x.T,
    "cat": lambda x: jnp.concatenate([x, x]),
    "sum": lambda x: x.sum(0),
}


def seconds(call: Callable[[Any], Any], x: Any, wait: Callable[[Any], Any]) -> float:
    started = time.perf_counter()
    wait(call(x))
    return time.perf_counter() - started


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=12, help="sizes each op meets (12)")
    repeats = parser.parse_args().repeats
    jitted = {name: jax.jit(function) for name, function in JAX.items()}
    print(f"ms of a first call, median of {repeats} sizes: isthmus, jax.jit")
    print(f"{'op':12}" + "".join(f"{kind:>24}" for kind in SIDES))
    for name, function in TORCH.items():
        cells = ""
        for side in SIDES.values():
            ours, theirs = [], []
            for n in range(repeats + 1):
                shape = (side, side + n)
                x, y = torch.ones(shape, device="jax"), jnp.ones(shape)
                ours.append(seconds(function, x, lambda _: torch.jax.synchronize()))  # type: ignore[attr-defined]
                theirs.append(seconds(jitted[name], y, jax.block_until_ready))
            # The first of all meets other things for the first time too.
            a, b = (statistics.median(times[1:]) * 1e3 for times in (ours, theirs))
            cells += f"{a:10.1f}{b:7.1f}{a / b:6.2f}x"
        print(f"{name:12}{cells}")


if __name__ == "__main__":
    main()
