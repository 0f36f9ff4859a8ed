"""Mesh axes over which arrays vary, inside ``jax.shard_map``: operands of one equation must vary alike.

A replicated array (weights) beside one that is split over an axis (the batch) is cast explicitly. The cast's transpose
adds up the cotangents of all devices, without which the gradient of the weights would be one device's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from isthmus._runtime.compiler import scoped_x64


def varying_alike(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Return arrays that vary over the same mesh axes; outside of ``shard_map``, those given."""
    axes = frozenset().union(*[varying_axes(jax.typeof(array)) for array in arrays])
    # Outside of ``shard_map`` nothing varies, and nothing has to be cast.
    if not axes:
        return arrays
    with scoped_x64():  # int64 constants may be among them
        missing = [tuple(sorted(axes - varying_axes(jax.typeof(array)))) for array in arrays]
        return [jax.lax.pcast(a, m, to="varying") if m else a for a, m in zip(arrays, missing, strict=True)]


def varying_axes(aval: Any) -> frozenset[str]:
    """Return the mesh axes over which an array varies; JAX 0.10.2 moved them from ``vma`` to ``manual_axis_type``."""
    axis_type = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if axis_type is None else axis_type.varying)
