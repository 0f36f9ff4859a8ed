"""µs per op on small tensors: device "jax" beside bare jax.jit of the same math, CPU torch, and torchax.

    python benchmarks/dispatch.py --repeats 30 --calls 300

Every contender runs each op in every round, so that a noisy machine is noisy for all of them; the time of an
op is the fastest of its rounds, and the median stands beside it. Results are not waited for within a round,
because a program does not wait either; each round ends by waiting for the last one.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

SIZE = 8
TARGETS = {"add": 2.0, "layer_norm": 2.0}
Thunk = Callable[[], Any]


def torch_ops(device: Any) -> dict[str, Thunk]:
    """The five ops in plain PyTorch."""
    numbers = np.linspace(-1, 1, SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    x, y = torch.tensor(numbers).to(device), torch.tensor(numbers[::-1].copy()).to(device)
    weight, bias = torch.ones(SIZE).to(device), torch.zeros(SIZE).to(device)
    target, row = torch.zeros(SIZE, SIZE).to(device), torch.full((SIZE,), 1e-3).to(device)
    return {
        "add": lambda: torch.add(x, y),
        "mm": lambda: torch.mm(x, y),
        "layer_norm": lambda: F.layer_norm(x, (SIZE,), weight, bias),
        "softmax": lambda: torch.softmax(x, -1),
        "slice add_": lambda: target[1].add_(row),
    }


def jax_ops() -> dict[str, Thunk]:
    """The same math as bare jitted functions, called as a JAX program calls them."""
    numbers = np.linspace(-1, 1, SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    x, y = jnp.asarray(numbers), jnp.asarray(numbers[::-1].copy())
    weight, bias = jnp.ones(SIZE), jnp.zeros(SIZE)
    state, row = [jnp.zeros((SIZE, SIZE))], jnp.full((SIZE,), 1e-3)

    @jax.jit
    def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weight + bias

    add, mm, softmax = jax.jit(jnp.add), jax.jit(jnp.matmul), jax.jit(jax.nn.softmax)
    add_to_row = jax.jit(lambda target, row: target.at[1].add(row), donate_argnums=0)

    def slice_add() -> Any:
        state[0] = add_to_row(state[0], row)
        return state[0]

    return {
        "add": lambda: add(x, y),
        "mm": lambda: mm(x, y),
        "layer_norm": lambda: layer_norm(x, weight, bias),
        "softmax": lambda: softmax(x),
        "slice add_": slice_add,
    }


def torchax_ops() -> dict[str, Thunk] | None:
    """The five ops under torchax, or None where it is not installed."""
    if importlib.util.find_spec("torchax") is None:
        return None
    try:
        import torchax
    except (AttributeError, RuntimeError) as error:  # it and isthmus both call their device "jax"
        print(f"torchax does not run here: {error}")
        return None
    environment = torchax.default_env()
    with environment:
        ops = torch_ops("jax")

    def inside(op: Thunk) -> Thunk:
        def run() -> Any:
            with environment:
                return op()

        return run

    return {name: inside(op) for name, op in ops.items()}


def round_of(op: Thunk, calls: int, wait: Callable[[Any], None]) -> float:
    """Return the µs of one call, of ``calls`` in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        last = op()
    elapsed = time.perf_counter() - start
    wait(last)
    return elapsed / calls * 1e6


def wait_for(result: Any) -> None:
    """Wait until a result of any contender is there."""
    if isinstance(result, torch.Tensor):
        result.cpu()
    else:
        result.block_until_ready()


def measure(
    contenders: dict[str, dict[str, Thunk]], repeats: int, calls: int
) -> dict[tuple[str, str], list[float]]:
    """Return the µs of every op of every contender in every round."""
    times: dict[tuple[str, str], list[float]] = {}
    for ops in contenders.values():
        for op in ops.values():
            round_of(op, 20, wait_for)  # compiles
    for _ in range(repeats):
        for name in next(iter(contenders.values())):
            for contender, ops in contenders.items():
                times.setdefault((contender, name), []).append(round_of(ops[name], calls, wait_for))
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=30, help="rounds (30)")
    parser.add_argument("--calls", type=int, default=300, help="calls of each op in a round (300)")
    options = parser.parse_args()
    contenders = {"isthmus": torch_ops("jax"), "jax.jit": jax_ops(), "cpu torch": torch_ops("cpu")}
    with_torchax = torchax_ops()
    if with_torchax is not None:
        contenders["torchax"] = with_torchax
    with torch.no_grad():
        times = measure(contenders, options.repeats, options.calls)

    rounds = f"{options.repeats} rounds of {options.calls} calls"
    print(f"µs per op on float32[{SIZE}, {SIZE}], fastest (median) of {rounds}")
    print(f"torch {torch.__version__}, jax {jax.__version__}, {jax.local_devices()[0].device_kind}")
    print(f"{'op':12}" + "".join(f"{name:>18}" for name in contenders) + f"{'isthmus / jax.jit':>20}")
    missed = []
    for op in contenders["isthmus"]:
        cells = "".join(
            f"{min(times[c, op]):10.1f} ({statistics.median(times[c, op]):5.1f})" for c in contenders
        )
        ratio = min(times["isthmus", op]) / min(times["jax.jit", op])
        goal = f"  (target {TARGETS[op]:.1f})" if op in TARGETS else ""
        print(f"{op:12}{cells}{ratio:19.2f}x{goal}")
        if ratio > TARGETS.get(op, float("inf")):
            missed.append(op)
    if missed:
        print(f"over target: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
