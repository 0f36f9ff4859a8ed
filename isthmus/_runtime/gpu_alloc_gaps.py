"""Gaps in a GPU's memory that only small results fit, so that those never stand in the way of large ones.

XLA replays a program as CUDA graphs and rewrites every command whose arrays lie elsewhere than before. Its allocator
takes the smallest free place that fits. A loss that outlives its step, cut from the one large free place, divides that
differently at each step, and all that a program computes moves: rewriting took milliseconds of every compiled training
step of GPT-2. A gap between two arrays that stay is never joined with the free memory around it.
"""

from __future__ import annotations

import jax
import numpy as np

# Room for so many small results at once; the arrays between the gaps cost 256 bytes each.
COUNT = 256
_stays: list[jax.Array] = []  # every second array of the row; the gaps are where the others were


def leave(device: jax.Device) -> None:
    """Leave gaps of the allocator's smallest size (256 bytes) in the memory of a GPU."""
    if device.platform != "gpu":
        return
    with jax.ensure_compile_time_eval():
        row = [jax.device_put(np.zeros((), np.int8), device) for _ in range(2 * COUNT)]
    # An array whose transfer is under way frees its memory when that ends, and later ones would lie elsewhere.
    jax.block_until_ready(row)
    # Every second one stays: the others are freed with ``row``, and leave the gaps.
    _stays.extend(row[::2])
