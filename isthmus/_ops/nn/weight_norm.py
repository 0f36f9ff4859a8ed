"""The backward of ``torch._weight_norm``; torch decomposes its forward."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import accumulation_dtype, wrap_dim
from isthmus._ops.registry import lowering

Array = Any


@lowering(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    grad_w: Array, saved_v: Array, saved_g: Array, saved_norms: Array, dim: int
) -> tuple[Array, Array]:
    """The gradients of v and g for w = g * v / norm(v), the norm over every dim but ``dim``."""
    wide = accumulation_dtype(saved_v.dtype)
    grad, v, g, norms = (x.astype(wide) for x in (grad_w, saved_v, saved_g, saved_norms))
    others = [d for d in range(v.ndim) if d != wrap_dim(dim, v.ndim)]
    along = jnp.sum(grad * v, axis=tuple(others), keepdims=True)
    grad_v = g / norms * (grad - v * along / (norms * norms))
    return grad_v.astype(saved_v.dtype), (along / norms).astype(saved_g.dtype)
