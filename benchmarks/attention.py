"""Causal attention, forward and backward: the device's, torch's own on CUDA or the CPU, and hand-written JAX.

Every number is a median of repeats in one run, in milliseconds; "error" is the largest difference from
attention computed in float64 over the largest value.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F


def median_ms(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int = 20) -> float:
    """Return the median time of a call whose result is waited for."""
    wait(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        wait(call())
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def in_torch(device: str, inputs: list[np.ndarray], dtype: torch.dtype) -> tuple[float, list[torch.Tensor]]:
    """Return the time of a forward and backward pass in torch, and what they give."""
    q, k, v = (torch.from_numpy(x).to(device, dtype).requires_grad_() for x in inputs)

    def call() -> list[torch.Tensor]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    wait: dict[str, Callable[[Any], Any]] = {
        "cpu": lambda _: None,
        "cuda": lambda _: torch.cuda.synchronize(),
    }
    spent = median_ms(call, wait.get(device, lambda _: torch.jax.synchronize()))
    return spent, [t.cpu().double() for t in call()]


def in_jax(inputs: list[np.ndarray], dtype: Any, implementation: str) -> tuple[float, list[torch.Tensor]]:
    """Return the same for ``jax.nn.dot_product_attention`` under one ``jax.jit``."""
    q, k, v = (jnp.asarray(x.swapaxes(1, 2), dtype) for x in inputs)

    def both(*qkv: Any) -> Any:
        def attend(*qkv: Any) -> Any:
            return jax.nn.dot_product_attention(*qkv, is_causal=True, implementation=implementation)

        out, transpose = jax.vjp(attend, *qkv)
        return out, *transpose(jnp.ones_like(out))

    step = jax.jit(both)
    spent = median_ms(lambda: step(q, k, v), jax.block_until_ready)
    wide = [np.asarray(x.astype(jnp.float32)).swapaxes(1, 2) for x in step(q, k, v)]
    return spent, [torch.from_numpy(x.copy()).double() for x in wide]


def main() -> None:
    """Print one line for each implementation this machine has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=4, default=[8, 12, 1024, 64], metavar=("B", "H", "T", "D"))
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = options.shape
    if options.peer:
        return peer(shape)
    import isthmus  # noqa: F401

    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape, np.float32) for _ in range(3)]
    _, truth = in_torch("cpu", [x[:1] for x in inputs], torch.float64)
    rows: dict[str, Callable[[], tuple[float, list[torch.Tensor]]]] = {
        "isthmus bfloat16": lambda: in_torch("jax", inputs, torch.bfloat16),
        "isthmus float32": lambda: in_torch("jax", inputs, torch.float32),
        "jax xla bfloat16": lambda: in_jax(inputs, jnp.bfloat16, "xla"),
    }
    if jax.default_backend() == "gpu":
        rows["jax cudnn bfloat16"] = lambda: in_jax(inputs, jnp.bfloat16, "cudnn")
    print(f"causal attention, forward and backward, (B, H, T, D) = {tuple(shape)}, on {jax.devices()[0]}")
    for name, run in rows.items():
        spent, found = run()
        errors = [float((f[:1] - t).abs().max() / t.abs().max()) for f, t in zip(found, truth, strict=True)]
        print(f"{name:22} {spent:9.3f} ms   error {max(errors):.1e}", flush=True)
    # torch's own devices run where the device "jax" is not: see _isthmus_autoload.py.
    sizes = [str(n) for n in shape]
    subprocess.run([sys.executable, __file__, "--peer", "--shape", *sizes], check=True)


def peer(shape: list[int]) -> None:
    """Print the line of torch's own device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = np.random.default_rng(0)
    spent, _ = in_torch(device, [rng.standard_normal(shape, np.float32) for _ in range(3)], torch.bfloat16)
    print(f"torch {device} bfloat16{'':{7 - len(device)}} {spent:9.3f} ms")


if __name__ == "__main__":
    main()
