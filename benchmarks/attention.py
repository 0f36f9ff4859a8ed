"""Attention, forward and backward: the device's, torch's own on CUDA or the CPU, and hand-written JAX.

    python benchmarks/attention.py            # causal attention, timed
    python benchmarks/attention.py --grid     # masks, lengths, widths and groups of heads, checked in every mode

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


Case = dict[str, Any]
GRID: dict[str, Case] = {
    "no mask": {},
    "causal": {"causal": True},
    "causal, 2 key heads": {"causal": True, "key_heads": 2},
    "causal, lengths differ": {"causal": True, "keys": 97},
    "padding": {"mask": (3, 1, 1, -1)},
    "padding, 2 key heads": {"mask": (3, 1, 1, -1), "key_heads": 2},
    "padding, odd lengths": {"mask": (3, 1, 1, -1), "queries": 129, "keys": 131},
    "bool": {"mask": (3, 1, 130, -1)},
    "bool, per head": {"mask": (3, 4, 130, -1)},
    "bool, one for all": {"mask": (130, -1)},
    "bool and causal": {"mask": (3, 1, 130, -1), "causal": True},
    "bool, rows see nothing": {"mask": (3, 1, 130, -1), "empty": True},
    "float": {"mask": (3, 1, 130, -1), "number": True},
    "float, rows see nothing": {"mask": (3, 4, 130, -1), "number": True, "empty": True},
    "float with gradient": {"mask": (1, 4, 130, -1), "number": True, "learn": True},
    "float with gradient, no heads": {"mask": (130, -1), "number": True, "learn": True},
    "float with gradient, batch": {"mask": (3, 1, 130, -1), "number": True, "learn": True},
    "width 20": {"width": 20},
    "width 20, padding": {"width": 20, "mask": (3, 1, 1, -1)},
    "width 80, causal": {"width": 80, "causal": True},
    "width 128, padding": {"width": 128, "mask": (3, 1, 1, -1)},
    "width 256, padding": {"width": 256, "mask": (3, 1, 1, -1)},
    "width 256, causal": {"width": 256, "causal": True},
    "one query": {"queries": 1},
    "one query, padding": {"queries": 1, "mask": (3, 1, 1, -1)},
    "16 queries, padding": {"queries": 16, "mask": (3, 1, 1, -1)},
}


def operands(case: Case, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return query, key, value and, where there is one, a floating mask; and the other arguments."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, width = case.get("queries", 130), case.get("keys", 130), case.get("width", 64)
    shapes = [(3, 4, queries, width), *[(3, case.get("key_heads", 4), keys, width)] * 2]
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    arguments: dict[str, Any] = {"is_causal": case.get("causal", False), "enable_gqa": "key_heads" in case}
    if "mask" not in case:
        return given, arguments
    mask = torch.rand([*case["mask"][:-1], keys], generator=generator) < 0.7
    mask[..., 0] = True
    if case.get("empty"):
        mask[..., 5:9, :] = False
    if not case.get("number"):
        return given, arguments | {"attn_mask": mask}
    bias = torch.randn(mask.shape, generator=generator).masked_fill(~mask, -torch.inf)
    return [*given, bias.to(dtype)], arguments


def results(
    given: list[torch.Tensor], arguments: dict[str, Any], learn: bool, mode: str
) -> list[torch.Tensor]:
    """Return attention and its gradients in one of the modes."""
    import isthmus

    leaves = [x.clone().detach().requires_grad_(n < 3 or learn) for n, x in enumerate(given)]
    weights = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1)).to(leaves[0])

    def both(*tensors: torch.Tensor) -> Any:
        mask = {} if len(tensors) == 3 else {"attn_mask": tensors[3]}
        if (
            arguments["is_causal"] and {**mask, **arguments}.get("attn_mask") is not None
        ):  # torch wants one of them
            tril = torch.ones(*tensors[0].shape[2:3], tensors[1].shape[2], dtype=torch.bool).tril()
            mask = {"attn_mask": arguments["attn_mask"] & tril.to(tensors[0].device)}
        out = F.scaled_dot_product_attention(
            *tensors[:3], **{**arguments, **mask, "is_causal": arguments["is_causal"] and not mask}
        )
        wanted = [t for t in tensors if t.requires_grad]
        return (out.detach(), *torch.autograd.grad((out * weights).sum(), wanted))

    if mode == "lazy":
        with isthmus.lazy():
            return list(both(*leaves))
    if mode == "jit":
        return list(isthmus.jit(both)(*leaves))
    if mode == "compiled":
        out = torch.compile(lambda *t: both(*t)[0], backend="isthmus")(*leaves)
        return [out, *both(*leaves)[1:]]
    return list(both(*leaves))


def grid(modes: list[str]) -> None:
    """Print the error of every case in half types, and whether it is more than rounding."""
    import isthmus

    worst = 0.0
    for dtype in (torch.bfloat16, torch.float16):
        for title, case in GRID.items():
            given, arguments = operands(case, dtype)
            learn = case.get("learn", False)
            truth = results([x.double() for x in given], arguments, learn, "eager")
            moved = {k: v.to("jax") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
            rows = []
            for mode in modes:
                torch._dynamo.reset()
                try:
                    found = results([x.to("jax") for x in given], moved, learn, mode)
                except Exception as error:
                    rows.append(f"{mode} {type(error).__name__}: {str(error)[:300]}")
                    worst = float("inf")
                    continue
                pairs = zip([x.cpu().double() for x in found], truth, strict=True)
                errors = [float((f - t).abs().max() / t.abs().max()) for f, t in pairs]
                worst = max(worst, *errors)
                rows.append(f"{mode} {max(errors):.1e}")
            print(f"{str(dtype)[6:]:10}{title:32}{'  '.join(rows)}", flush=True)
    # bfloat16 keeps 8 bits; the gradients of keys are sums of as many rounded terms as there are queries.
    print(f"{'ok' if worst < 2e-2 else 'MISSED'}: the largest error is {worst:.1e}, at most 2e-2")
    print(f"fallbacks to the CPU: {isthmus.metrics.fallbacks() or 'none'}")


def main() -> None:
    """Print one line for each implementation this machine has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=4, default=[8, 12, 1024, 64], metavar=("B", "H", "T", "D"))
    parser.add_argument(
        "--grid", action="store_true", help="check masks, lengths, widths and groups of heads"
    )
    modes = ["eager", "lazy", "jit", "compiled"]
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = options.shape
    if options.peer:
        return peer(shape)
    import isthmus  # noqa: F401

    if options.grid:
        return grid(options.modes)
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
