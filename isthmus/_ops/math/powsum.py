"""Sums of powers: norms before their root is taken."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from isthmus._graph.names import aten
from isthmus._ops.common import Array, Ints, Scalar, accumulation_dtype, cast, wrap_dims
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported


@lowering(aten.linalg__powsum.default)
def powsum(
    self: Array,
    ord: Scalar = 2,
    dim: Ints | None = None,
    keepdim: bool = False,
    dtype: DTypeLike | None = None,
) -> Array:
    """The sum of the absolute values raised to ``ord``, along dims."""
    x = self if dtype is None else cast(self, dtype)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise Unsupported("sums of powers of integers, which torch refuses as well")
    size = jnp.abs(cast(x, accumulation_dtype(x.dtype)))
    sums = jnp.sum(jnp.power(size, cast(ord, size.dtype)), axis=wrap_dims(dim, x.ndim), keepdims=keepdim)
    return cast(sums, x.dtype if jnp.isrealobj(x) else size.dtype)


@lowering(aten._foreach_powsum.Scalar)
def foreach_powsum(self: list[Array], ord: Scalar = 2, dtype: DTypeLike | None = None) -> list[Array]:
    """The sum of powers of each tensor of the list."""
    return [powsum(x, ord, dtype=dtype) for x in self]
