"""The backward of ``torch._weight_norm``; torch decomposes its forward."""

from __future__ import annotations

import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import Array, wrap_dim
from isthmus._ops.registry import lowering


@lowering(aten._weight_norm_interface_backward.default, accumulate=("saved_v", "saved_g"))
def weight_norm_backward(
    grad_w: Array, saved_v: Array, saved_g: Array, saved_norms: Array, dim: int
) -> tuple[Array, Array]:
    """The gradients of v and g for w = g * v / norm(v), the norm over every dim but ``dim``."""
    others = tuple(d for d in range(saved_v.ndim) if d != wrap_dim(dim, saved_v.ndim))
    along = jnp.sum(grad_w * saved_v, axis=others, keepdims=True)
    grad_v = saved_g / saved_norms * (grad_w - saved_v * along / (saved_norms * saved_norms))
    return grad_v, along / saved_norms
