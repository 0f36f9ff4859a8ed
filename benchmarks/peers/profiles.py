"""The kernels that a call spends the GPU's time in, by torch's profiler or by JAX's."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STEPS, _KEPT = 5, 40


def kernels(call: Callable[[], Any], wait: Callable[[], None], by_jax: bool) -> list[tuple[str, float]]:
    """Return the kernels of a call and the milliseconds of each, the longest first, then the sum of all."""
    spent = _by_jax(call, wait) if by_jax else _by_torch(call, wait)
    total = sum(spent.values())
    rows = [(name, ms / _STEPS) for name, ms in spent.most_common(_KEPT)]
    return [*rows, ("all kernels", total / _STEPS)]


def _by_torch(call: Callable[[], Any], wait: Callable[[], None]) -> Counter[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_STEPS):
            call()
        wait()
    spent: Counter[str] = Counter()
    for event in found.key_averages():
        spent[event.key] += event.self_device_time_total / 1e3
    return spent


def _by_jax(call: Callable[[], Any], wait: Callable[[], None]) -> Counter[str]:
    import jax

    spent: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_STEPS):
                call()
            wait()
        for path in Path(folder).rglob("*.xplane.pb"):
            data = jax.profiler.ProfileData.from_file(str(path))
            for plane in data.planes:
                if not plane.name.startswith("/device:GPU"):
                    continue
                for line in plane.lines:
                    if not line.name.startswith("Stream"):
                        continue
                    for event in line.events:
                        spent[_family(event.name)] += event.duration_ns / 1e6
    return spent


def _family(name: str) -> str:
    """Return a kernel's name without the number that tells it from others made alike."""
    return re.sub(r"_\d+$", "", name)
