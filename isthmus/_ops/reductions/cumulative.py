"""Running sums, products and extremes along a dim."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from isthmus._graph.names import aten
from isthmus._ops.common import Array, accumulation_dtype, cast, wrap_dim
from isthmus._ops.math.binary import logaddexp
from isthmus._ops.registry import lowering

Scan = Callable[[Array, int], Array]


def _scanned(scan: Scan, self: Array, dim: int, dtype: DTypeLike | None = None) -> Array:
    """A running sum or product; integers become int64, half types accumulate in float32."""
    inexact = jnp.issubdtype(self.dtype, jnp.inexact)
    result = np.dtype(dtype) if dtype is not None else self.dtype if inexact else np.dtype(np.int64)
    # A running count, then whether it is not zero: XLA has no running sum of booleans.
    if result == np.bool_:
        x = cast(cast(self, result), np.int64)
    else:
        x = cast(self, accumulation_dtype(result))
    return cast(scan(x, wrap_dim(dim, self.ndim)) if self.ndim else x, result)


lowering(aten.cumsum.default)(functools.partial(_scanned, jax.lax.cumsum))
lowering(aten.cumprod.default)(functools.partial(_scanned, jax.lax.cumprod))


def _complex_logcumsumexp(x: Array, axis: int) -> Array:
    """One element after another, as torch goes: the order decides the branch of a complex logarithm."""
    moved = cast(jnp.moveaxis(x, axis, 0), np.complex128)  # its gradient magnifies every rounding

    def step(total: Array, element: Array) -> tuple[Array, Array]:
        total = logaddexp(element, total)
        return total, total

    _, rest = jax.lax.scan(step, moved[0], moved[1:])
    return cast(jnp.moveaxis(jnp.concatenate([moved[:1], rest]), 0, axis), x.dtype)


@lowering(aten.logcumsumexp.default, aten._logcumsumexp.default, accumulate=True)
def logcumsumexp(self: Array, dim: int) -> Array:
    """The logarithm of a running sum of exponentials."""
    if not self.ndim or not self.size:
        return self
    axis = wrap_dim(dim, self.ndim)
    if jnp.issubdtype(self.dtype, jnp.complexfloating):
        return _complex_logcumsumexp(self, axis)
    return jax.lax.associative_scan(jnp.logaddexp, self, axis=axis)


def _running_extreme(beats: Callable[[Array, Array], Array], self: Array, dim: int) -> tuple[Array, Array]:
    """A running extreme with the last index that has it; from the first nan on, nan wins."""

    def later(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        takes = beats(b[0], a[0])
        if jnp.issubdtype(a[0].dtype, jnp.inexact):
            takes = jnp.isnan(b[0]) | (~jnp.isnan(a[0]) & takes)
        return jnp.where(takes, b[0], a[0]), jnp.where(takes, b[1], a[1])

    axis = wrap_dim(dim, self.ndim)
    places = jax.lax.broadcasted_iota(jnp.int64, self.shape, axis) if self.ndim else jnp.zeros((), jnp.int64)
    if not self.ndim or not self.size:
        return self, places
    values, indices = jax.lax.associative_scan(later, (self, places), axis=axis)
    return values, indices


lowering(aten.cummax.default)(functools.partial(_running_extreme, jnp.greater_equal))
lowering(aten.cummin.default)(functools.partial(_running_extreme, jnp.less_equal))
