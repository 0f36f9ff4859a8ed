"""Contenders taking turns, and their times beside a peer's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import torch

Thunk = Callable[[], Any]


def wait(result: Any) -> None:
    """Wait until a result is computed, and what else was begun: a step's loss is there before its last program ends."""
    if not isinstance(result, torch.Tensor) or result.device.type == "jax":
        jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])
    elif result.device.type == "cuda":
        torch.cuda.synchronize()


def race(contenders: dict[str, Thunk], rounds: int, calls: int = 1) -> dict[str, float]:
    """Return the median seconds of a call of each contender; each is run twice before."""
    first = {}
    for name, run in contenders.items():
        started = time.perf_counter()
        wait(run())
        first[name] = time.perf_counter() - started
        wait(run())
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            started = time.perf_counter()
            for _ in range(calls):
                result = run()
            wait(result)
            times[name].append((time.perf_counter() - started) / calls)
    for name, seconds in first.items():
        print(f"    {name:24} first call {seconds:8.2f} s")
    return {name: statistics.median(values) for name, values in times.items()}


def report(
    title: str, times: dict[str, float], peer: str, limit: float | None = None, ours: str = "isthmus"
) -> None:
    """Print times and ratios to a peer, and whether ours is within the limit."""
    print(title)
    for name, seconds in times.items():
        print(f"    {name:24} {seconds * 1e3:10.3f} ms  {seconds / times[peer]:6.2f} x {peer}")
    if limit is not None:
        ratio = times[ours] / times[peer]
        print(f"    {'ok' if ratio <= limit else 'MISSED'}: {ratio:.2f} x, at most {limit} x")
