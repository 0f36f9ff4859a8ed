"""Copies, casts and fills: ops whose result is a constant or another tensor's elements."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import cast
from isthmus._ops.registry import lowering

Array = Any


@lowering(aten.clone.default)
def clone(self: Array) -> Array:
    """The same elements in memory of their own; the memory format is the result's strides."""
    return self


@lowering(aten._to_copy.default)
def to_copy(self: Array, dtype: Any = None) -> Array:
    """The same elements in another dtype."""
    return self if dtype is None else cast(self, dtype)


@lowering(aten.copy.default)
def copy(self: Array, src: Array) -> Array:
    """``src`` in the shape and dtype of ``self``."""
    return jnp.broadcast_to(cast(src, self.dtype), self.shape)


@lowering(aten.fill.Scalar)
def fill_scalar(self: Array, value: Any) -> Array:
    """Every element ``value``."""
    return jnp.broadcast_to(cast(value, self.dtype), self.shape)


@lowering(aten.fill.Tensor)
def fill_tensor(self: Array, value: Array) -> Array:
    """Every element ``value``, a 0-dim tensor."""
    return jnp.broadcast_to(cast(value, self.dtype), self.shape)


@lowering(aten.zero.default)
def zero(self: Array) -> Array:
    """Every element zero."""
    return jnp.zeros_like(self)
