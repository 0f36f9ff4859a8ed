"""torch's primitive ops, as far as its decompositions leave them in a graph."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from isthmus._graph.names import prims
from isthmus._ops.common import Array, Operand, cast, promote
from isthmus._ops.registry import lowering


@lowering(prims.iota.default)
def iota(length: int, start: int, step: int, dtype: DTypeLike, requires_grad: bool = False) -> Array:
    """Return ``length`` numbers from ``start`` on."""
    return (jnp.arange(length, dtype=jnp.int64) * step + start).astype(dtype)


@lowering(prims.convert_element_type.default)
def convert_element_type(a: Array, dtype: DTypeLike) -> Array:
    """Convert as torch does."""
    return cast(a, dtype)


@lowering(prims.device_put.default)
def device_put(a: Array) -> Array:
    """Return the same elements; where they live is not a program's concern."""
    return a


@lowering(prims.where.default)
def where(pred: Array, a: Operand, b: Operand) -> Array:
    """Return the elements of ``a`` where a condition holds, those of ``b`` elsewhere; one may be a number."""
    _, dtype = promote(a, b)
    return jnp.where(pred, cast(a, dtype), cast(b, dtype))
