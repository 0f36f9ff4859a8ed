"""Running sums, products and extremes along a dim."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import accumulation_dtype, cast, wrap_dim
from isthmus._ops.math.binary import logaddexp
from isthmus._ops.registry import lowering

Array = Any


def _scanned(op: Any, fn: Any) -> None:
    """File a running sum or product; integers become int64, half types accumulate in float32."""

    @lowering(op)
    def lowered(self: Array, dim: int, dtype: Any = None) -> Array:
        exact = jnp.issubdtype(self.dtype, jnp.inexact)
        result = np.dtype(dtype) if dtype is not None else self.dtype if exact else np.dtype(np.int64)
        if result == np.bool_:
            wide = cast(cast(self, result), np.int64)
        else:
            wide = cast(self, accumulation_dtype(result))
        return cast(fn(wide, wrap_dim(dim, self.ndim)) if self.ndim else wide, result)


_scanned(aten.cumsum.default, jax.lax.cumsum)
_scanned(aten.cumprod.default, jax.lax.cumprod)


def _complex_logcumsumexp(x: Array, axis: int) -> Array:
    """One element after another, as torch goes: the order decides the branch of a complex logarithm."""
    moved = cast(jnp.moveaxis(x, axis, 0), np.complex128)  # its gradient magnifies every rounding

    def step(total: Array, element: Array) -> tuple[Array, Array]:
        total = logaddexp(element, total)
        return total, total

    _, rest = jax.lax.scan(step, moved[0], moved[1:])
    return cast(jnp.moveaxis(jnp.concatenate([moved[:1], rest]), 0, axis), x.dtype)


def _logcumsumexp(op: Any) -> None:
    @lowering(op)
    def lowered(self: Array, dim: int) -> Array:
        """The logarithm of a running sum of exponentials."""
        if not self.ndim or not self.size:
            return self
        axis = wrap_dim(dim, self.ndim)
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            return _complex_logcumsumexp(self, axis)
        wide = cast(self, accumulation_dtype(self.dtype))
        return cast(jax.lax.associative_scan(jnp.logaddexp, wide, axis=axis), self.dtype)


_logcumsumexp(aten.logcumsumexp.default)
_logcumsumexp(aten._logcumsumexp.default)


def _running_extreme(op: Any, beats: Any) -> None:
    """File a running extreme with the last index that has it; from the first nan on, nan wins."""

    def later(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        takes = beats(b[0], a[0])
        if jnp.issubdtype(a[0].dtype, jnp.inexact):
            takes = jnp.isnan(b[0]) | (~jnp.isnan(a[0]) & takes)
        return jnp.where(takes, b[0], a[0]), jnp.where(takes, b[1], a[1])

    @lowering(op)
    def lowered(self: Array, dim: int) -> tuple[Array, Array]:
        axis = wrap_dim(dim, self.ndim)
        at = jax.lax.broadcasted_iota(jnp.int64, self.shape, axis) if self.ndim else jnp.zeros((), jnp.int64)
        if not self.ndim or not self.size:
            return self, at
        values, indices = jax.lax.associative_scan(later, (self, at), axis=axis)
        return values, indices


_running_extreme(aten.cummax.default, jnp.greater_equal)
_running_extreme(aten.cummin.default, jnp.less_equal)
