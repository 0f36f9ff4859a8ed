"""Reductions over dims: sums, products, extremes, truth, moments and norms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from isthmus._graph.names import aten
from isthmus._ops.common import (
    INT_TO_FLOAT,
    Array,
    ArrayFunction,
    DType,
    Scalar,
    accumulation_dtype,
    cast,
    promote,
    wrap_dim,
    wrap_dims,
)
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported

Dims = tuple[int, ...]
Named = int | Sequence[int] | None
"""Dims as a call names them; None, and mostly an empty list too, names all."""


def _sum_dtype(x: Array, dtype: DTypeLike | None) -> DType:
    if dtype is not None:
        return np.dtype(dtype)
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else np.dtype(np.int64)


@lowering(aten.sum.default, aten.sum.dim_IntList)
def total(self: Array, dim: Named = None, keepdim: bool = False, dtype: DTypeLike | None = None) -> Array:
    """The sum along dims, or of every element."""
    dims, result = wrap_dims(dim, self.ndim), _sum_dtype(self, dtype)
    if result == np.bool_:
        return jnp.any(self != 0, axis=dims, keepdims=keepdim)
    return cast(cast(self, accumulation_dtype(result)).sum(dims, keepdims=keepdim), result)


@lowering(aten.nansum.default)
def nansum(self: Array, dim: Named = None, keepdim: bool = False, dtype: DTypeLike | None = None) -> Array:
    """Sums along dims that leave nans out."""
    return total(jnp.where(jnp.isnan(self), jnp.zeros((), self.dtype), self), dim, keepdim, dtype)


@lowering(aten.prod.default, aten.prod.dim_int)
def prod(self: Array, dim: int | None = None, keepdim: bool = False, dtype: DTypeLike | None = None) -> Array:
    """The product along a dim, or of every element."""
    dims, result = wrap_dims(dim, self.ndim), _sum_dtype(self, dtype)
    if result == np.bool_:
        return jnp.all(self != 0, axis=dims, keepdims=keepdim)
    return cast(cast(self, accumulation_dtype(result)).prod(dims, keepdims=keepdim), result)


@lowering(aten.mean.default, aten.mean.dim)
def mean(self: Array, dim: Named = None, keepdim: bool = False, dtype: DTypeLike | None = None) -> Array:
    """The mean along dims, or of every element."""
    result = self.dtype if dtype is None else np.dtype(dtype)
    x = cast(self, accumulation_dtype(result))
    return cast(x.mean(wrap_dims(dim, self.ndim), keepdims=keepdim) if self.ndim else x, result)


def _extreme(function: ArrayFunction, self: Array, dim: Named = (), keepdim: bool = False) -> Array:
    """The greatest or the least elements along dims."""
    return function(self, axis=wrap_dims(dim, self.ndim), keepdims=keepdim)


lowering(aten.amax.default)(functools.partial(_extreme, jnp.max))
lowering(aten.amin.default)(functools.partial(_extreme, jnp.min))


@lowering(aten.aminmax.default)
def aminmax(self: Array, dim: int | None = None, keepdim: bool = False) -> tuple[Array, Array]:
    """The least and the greatest elements along a dim, or of all."""
    dims = wrap_dims(dim, self.ndim)
    return self.min(dims, keepdims=keepdim), self.max(dims, keepdims=keepdim)


def _extreme_of_all(function: Callable[[Array], Array], name: str, self: Array) -> Array:
    """The extreme of every element, of which there must be one."""
    if self.size:
        return function(self)
    message = f"{name}(): Expected reduction dim to be specified for input.numel() == 0. "
    require(False, RuntimeError, message + "Specify the reduction dim with the 'dim' argument.")
    return jnp.zeros((), self.dtype)


lowering(aten.max.default)(functools.partial(_extreme_of_all, jnp.max, "max"))
lowering(aten.min.default)(functools.partial(_extreme_of_all, jnp.min, "min"))


Argument = Callable[[Array, int, type], Array]
"""``jax.lax.argmax`` or ``argmin``."""


def _ordered(x: Array) -> Array:
    return x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x


def _extreme_along(argument: Argument, self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """An extreme element and the first index that has it; a nan is extreme."""
    if not self.ndim:
        return self, jnp.zeros((), jnp.int64)
    axis = wrap_dim(dim, self.ndim)
    index = jnp.expand_dims(argument(_ordered(self), axis, jnp.int64), axis)
    values = jnp.take_along_axis(self, index, axis, mode="promise_in_bounds")
    return (values, index) if keepdim else (values.squeeze(axis), index.squeeze(axis))


lowering(aten.max.dim)(functools.partial(_extreme_along, jax.lax.argmax))
lowering(aten.min.dim)(functools.partial(_extreme_along, jax.lax.argmin))


def _position(argument: Argument, self: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """The first index of an extreme element, along a dim or of all elements in row-major order."""
    if not self.ndim:
        return jnp.zeros((), jnp.int64)
    if dim is None:
        index = argument(_ordered(self).reshape(-1), 0, jnp.int64)
        return index.reshape((1,) * self.ndim) if keepdim else index
    axis = wrap_dim(dim, self.ndim)
    index = argument(_ordered(self), axis, jnp.int64)
    return jnp.expand_dims(index, axis) if keepdim else index


lowering(aten.argmax.default)(functools.partial(_position, jax.lax.argmax))
lowering(aten.argmin.default)(functools.partial(_position, jax.lax.argmin))


def _truth(function: ArrayFunction, self: Array, dim: Named = None, keepdim: bool = False) -> Array:
    """Whether all or any elements are not zero; torch answers for uint8 with a uint8."""
    # Here, unlike elsewhere, an empty list of dims names none.
    dims = wrap_dims(dim, self.ndim) if dim is None or isinstance(dim, int) or len(dim) else ()
    holds = function(self != 0, axis=dims, keepdims=keepdim)
    return holds.astype(jnp.uint8) if self.dtype == jnp.uint8 else holds


lowering(aten.all.default, aten.all.dim, aten.all.dims)(functools.partial(_truth, jnp.all))
lowering(aten.any.default, aten.any.dim, aten.any.dims)(functools.partial(_truth, jnp.any))


@lowering(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(self: Array, dim: Named = None) -> Array:
    """How many elements are not zero, along dims or of all."""
    return (self != 0).sum(wrap_dims(dim, self.ndim), dtype=jnp.int64)


def moments(x: Array, dims: Dims, correction: Scalar | None, keepdim: bool) -> tuple[Array, Array]:
    """Return (variance, mean)."""
    mean = x.mean(dims, keepdims=True)
    difference = x - mean
    square = (
        difference.real**2 + difference.imag**2 if jnp.iscomplexobj(difference) else difference * difference
    )
    count = math.prod(x.shape[d] for d in dims)
    # Fewer elements than the correction takes off: torch divides by zero, not by a negative number.
    divisor = jnp.maximum(count - cast(1 if correction is None else correction, square.dtype), 0)
    variance = square.sum(dims, keepdims=keepdim) / divisor
    return variance, mean if keepdim else mean.reshape(variance.shape)


def _spread(
    with_mean: bool,
    root: bool,
    self: Array,
    dim: Named = None,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> Array | tuple[Array, Array]:
    """The variance along dims or its root, and the mean where asked for."""
    if not jnp.issubdtype(self.dtype, jnp.inexact):
        raise Unsupported("a variance of integers")
    x = cast(self, accumulation_dtype(self.dtype))
    variance, mean = moments(x, wrap_dims(dim, self.ndim), correction, keepdim)
    spread = cast(jnp.sqrt(variance) if root else variance, self.real.dtype)
    return (spread, cast(mean, self.dtype)) if with_mean else spread


lowering(aten.var.correction)(functools.partial(_spread, False, False))
lowering(aten.var_mean.correction)(functools.partial(_spread, True, False))
lowering(aten.std.correction)(functools.partial(_spread, False, True))
lowering(aten.std_mean.correction)(functools.partial(_spread, True, True))


@lowering(
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype,
    static=["p"],
)
def vector_norm(
    self: Array, p: float | None = 2, dim: Named = None, keepdim: bool = False, dtype: DTypeLike | None = None
) -> Array:
    """The p-norm along dims, or of every element, accumulated in at least float32."""
    in_dtype, dims = self.dtype if dtype is None else np.dtype(dtype), wrap_dims(dim, self.ndim)
    result = np.dtype(np.zeros((), in_dtype).real.dtype)
    x = cast(self, accumulation_dtype(in_dtype))
    size = jnp.abs(x)
    p = 2.0 if p is None else float(p)
    if p == math.inf or p == -math.inf:
        norms = (jnp.max if p > 0 else jnp.min)(size, axis=dims, keepdims=keepdim)
    elif p == 0:
        norms = (size != 0).astype(size.dtype).sum(dims, keepdims=keepdim)
    elif p == 1:
        norms = size.sum(dims, keepdims=keepdim)
    elif p == 2:
        square = x.real**2 + x.imag**2 if jnp.iscomplexobj(x) else x * x
        norms = jnp.sqrt(square.sum(dims, keepdims=keepdim))
    else:
        norms = (size**p).sum(dims, keepdims=keepdim) ** (1 / p)
    return cast(norms, result)


@lowering(aten.linalg_vector_norm.default, static=["ord"])
def linalg_vector_norm(
    self: Array, ord: float = 2, dim: Named = None, keepdim: bool = False, dtype: DTypeLike | None = None
) -> Array:
    """The norm of vectors along dims."""
    return vector_norm(self, ord, dim, keepdim, dtype)


@lowering(aten.logsumexp.default)
def logsumexp(self: Array, dim: Named, keepdim: bool = False) -> Array:
    """The logarithm of a sum of exponentials, without overflow."""
    compute, result = promote(self, kind=INT_TO_FLOAT)
    dims = wrap_dims(dim, self.ndim)
    if any(self.shape[d] == 0 for d in dims):
        sizes = (1 if d in dims else n for d, n in enumerate(self.shape) if keepdim or d not in dims)
        return jnp.full(tuple(sizes), -jnp.inf, result)
    if jnp.iscomplexobj(self):
        return _complex_logsumexp(self, dims, keepdim)
    out = jax.scipy.special.logsumexp(cast(self, compute), axis=dims, keepdims=keepdim)
    return cast(out, result)


def _complex_logsumexp(x: Array, dims: tuple[int, ...], keepdim: bool) -> Array:
    """The logarithm about the largest real part, as torch takes it."""
    largest = jnp.max(x.real, axis=dims, keepdims=True)
    # inf - inf would be nan; without the shift an infinite sum is infinite.
    largest = jnp.where(jnp.isinf(largest), jnp.zeros_like(largest), largest)
    out = jnp.log(jnp.sum(jnp.exp(x - largest), axis=dims, keepdims=True)) + largest
    return out if keepdim else jnp.squeeze(out, dims)


@lowering(aten.trace.default)
def trace(self: Array) -> Array:
    """The sum of the diagonal."""
    return total(jnp.diagonal(self))


@lowering(aten.linalg__powsum.default)
def powsum(
    self: Array,
    ord: Scalar = 2,
    dim: Named = None,
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
