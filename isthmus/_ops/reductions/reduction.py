"""Reductions over dims: sums, products, extremes, truth, moments and norms."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import INT_TO_FLOAT, accumulation_dtype, cast, promote, wrap_dim, wrap_dims
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported

Array = Any
Dims = tuple[int, ...]


def _all_dims(x: Array) -> Dims:
    return tuple(range(x.ndim))


def _sum_dtype(x: Array, dtype: Any) -> Any:
    if dtype is not None:
        return np.dtype(dtype)
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else np.dtype(np.int64)


def total(x: Array, dims: Dims, keepdim: bool, dtype: Any) -> Array:
    """Sum in torch's accumulation dtype."""
    result = _sum_dtype(x, dtype)
    if result == np.bool_:
        return jnp.any(x != 0, axis=dims, keepdims=keepdim)
    return cast(cast(x, accumulation_dtype(result)).sum(dims, keepdims=keepdim), result)


@lowering(aten.sum.default)
def sum_all(self: Array, dtype: Any = None) -> Array:
    """The sum of every element."""
    return total(self, _all_dims(self), False, dtype)


@lowering(aten.sum.dim_IntList)
def sum_dims(self: Array, dim: Any, keepdim: bool = False, dtype: Any = None) -> Array:
    """Sums along dims."""
    return total(self, wrap_dims(dim, self.ndim), keepdim, dtype)


@lowering(aten.nansum.default)
def nansum(self: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    """Sums along dims that leave nans out."""
    kept = jnp.where(jnp.isnan(self), jnp.zeros((), self.dtype), self)
    return total(kept, wrap_dims(dim, self.ndim), keepdim, dtype)


def _prod(x: Array, dims: Dims, keepdim: bool, dtype: Any) -> Array:
    result = _sum_dtype(x, dtype)
    if result == np.bool_:
        return jnp.all(x != 0, axis=dims, keepdims=keepdim)
    return cast(cast(x, accumulation_dtype(result)).prod(dims, keepdims=keepdim), result)


@lowering(aten.prod.default)
def prod_all(self: Array, dtype: Any = None) -> Array:
    """The product of every element."""
    return _prod(self, _all_dims(self), False, dtype)


@lowering(aten.prod.dim_int)
def prod_dim(self: Array, dim: int, keepdim: bool = False, dtype: Any = None) -> Array:
    """Products along a dim."""
    return _prod(self, wrap_dims(dim, self.ndim), keepdim, dtype)


def _mean(x: Array, dims: Dims, keepdim: bool, dtype: Any) -> Array:
    result = x.dtype if dtype is None else np.dtype(dtype)
    wide = cast(x, accumulation_dtype(result))
    return cast(wide.mean(dims, keepdims=keepdim) if x.ndim else wide, result)


@lowering(aten.mean.default)
def mean_all(self: Array, dtype: Any = None) -> Array:
    """The mean of every element."""
    return _mean(self, _all_dims(self), False, dtype)


@lowering(aten.mean.dim)
def mean_dims(self: Array, dim: Any, keepdim: bool = False, dtype: Any = None) -> Array:
    """Means along dims."""
    return _mean(self, wrap_dims(dim, self.ndim), keepdim, dtype)


def _extreme(op: Any, fn: Any) -> None:
    @lowering(op)
    def lowered(self: Array, dim: Any = (), keepdim: bool = False) -> Array:
        return fn(self, axis=wrap_dims(dim, self.ndim), keepdims=keepdim)


_extreme(aten.amax.default, jnp.max)
_extreme(aten.amin.default, jnp.min)


@lowering(aten.aminmax.default)
def aminmax(self: Array, dim: int | None = None, keepdim: bool = False) -> tuple[Array, Array]:
    """The least and the greatest elements along a dim, or of all."""
    dims = wrap_dims(dim, self.ndim)
    return self.min(dims, keepdims=keepdim), self.max(dims, keepdims=keepdim)


def _extreme_all(op: Any, fn: Any, name: str) -> None:
    @lowering(op)
    def lowered(self: Array) -> Array:
        if self.size:
            return fn(self)
        message = f"{name}(): Expected reduction dim to be specified for input.numel() == 0. "
        require(False, RuntimeError, message + "Specify the reduction dim with the 'dim' argument.")
        return jnp.zeros((), self.dtype)


_extreme_all(aten.max.default, jnp.max, "max")
_extreme_all(aten.min.default, jnp.min, "min")


def _ordered(x: Array) -> Array:
    return x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x


def _extreme_at(op: Any, fn: Any) -> None:
    """File an op that returns an extreme element and the first index that has it; a nan is extreme."""

    @lowering(op)
    def lowered(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        if not self.ndim:
            return self, jnp.zeros((), jnp.int64)
        axis = wrap_dim(dim, self.ndim)
        at = jnp.expand_dims(fn(_ordered(self), axis, jnp.int64), axis)
        found = jnp.take_along_axis(self, at, axis, mode="promise_in_bounds")
        return (found, at) if keepdim else (found.squeeze(axis), at.squeeze(axis))


_extreme_at(aten.max.dim, jax.lax.argmax)
_extreme_at(aten.min.dim, jax.lax.argmin)


def _position(op: Any, fn: Any) -> None:
    @lowering(op)
    def lowered(self: Array, dim: int | None = None, keepdim: bool = False) -> Array:
        if not self.ndim:
            return jnp.zeros((), jnp.int64)
        if dim is None:
            at = fn(_ordered(self).reshape(-1), 0, jnp.int64)
            return at.reshape((1,) * self.ndim) if keepdim else at
        axis = wrap_dim(dim, self.ndim)
        at = fn(_ordered(self), axis, jnp.int64)
        return jnp.expand_dims(at, axis) if keepdim else at


_position(aten.argmax.default, jax.lax.argmax)
_position(aten.argmin.default, jax.lax.argmin)


def _truth(name: str, fn: Any) -> None:
    """File the overloads of ``all`` or ``any``; torch answers a uint8 question with a uint8."""

    def answer(x: Array, dims: Dims, keepdim: bool) -> Array:
        found = fn(x != 0, axis=dims, keepdims=keepdim)
        return found.astype(jnp.uint8) if x.dtype == jnp.uint8 else found

    packet = getattr(aten, name)

    @lowering(packet.default)
    def everything(self: Array) -> Array:
        return answer(self, _all_dims(self), False)

    @lowering(packet.dim)
    def one_dim(self: Array, dim: int, keepdim: bool = False) -> Array:
        return answer(self, wrap_dims(dim, self.ndim), keepdim)

    @lowering(packet.dims)
    def many_dims(self: Array, dim: Any = None, keepdim: bool = False) -> Array:
        # Here, unlike elsewhere, an empty list of dims names none.
        dims = wrap_dims(dim, self.ndim) if dim is None or len(dim) else ()
        return answer(self, dims, keepdim)


_truth("all", jnp.all)
_truth("any", jnp.any)


@lowering(aten.count_nonzero.default)
def count_nonzero(self: Array, dim: int | None = None) -> Array:
    """How many elements are not zero, along a dim or of all."""
    return (self != 0).sum(wrap_dims(dim, self.ndim), dtype=jnp.int64)


@lowering(aten.count_nonzero.dim_IntList)
def count_nonzero_dims(self: Array, dim: Any) -> Array:
    """How many elements are not zero along dims."""
    return (self != 0).sum(wrap_dims(dim, self.ndim), dtype=jnp.int64)


def moments(x: Array, dims: Dims, correction: Any, keepdim: bool) -> tuple[Array, Array]:
    """Return (variance, mean) in the accumulation dtype."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise Unsupported("a variance of integers")
    wide = cast(x, accumulation_dtype(x.dtype))
    mean = wide.mean(dims, keepdims=True)
    apart = wide - mean
    square = apart.real**2 + apart.imag**2 if jnp.iscomplexobj(apart) else apart * apart
    count = math.prod(x.shape[d] for d in dims)
    divisor = jnp.maximum(count - cast(1 if correction is None else correction, square.dtype), 0)
    variance = square.sum(dims, keepdims=keepdim) / divisor
    return variance, mean if keepdim else mean.reshape(variance.shape)


def _spread(name: str, finish: Any) -> None:
    """File ``var`` or ``std`` and their twins that return the mean too."""

    def real(x: Array) -> Any:
        return np.dtype(x.real.dtype)

    @lowering(getattr(aten, name).correction)
    def alone(self: Array, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Array:
        variance, _ = moments(self, wrap_dims(dim, self.ndim), correction, keepdim)
        return cast(finish(variance), real(self))

    @lowering(getattr(aten, f"{name}_mean").correction)
    def with_mean(
        self: Array, dim: Any = None, correction: Any = None, keepdim: bool = False
    ) -> tuple[Array, Array]:
        variance, mean = moments(self, wrap_dims(dim, self.ndim), correction, keepdim)
        return cast(finish(variance), real(self)), cast(mean, self.dtype)


_spread("var", lambda variance: variance)
_spread("std", jnp.sqrt)


def vector_norm(x: Array, p: Any, dims: Dims, keepdim: bool, dtype: Any) -> Array:
    """Return the p-norm along dims, accumulated in at least float32."""
    given = x.dtype if dtype is None else np.dtype(dtype)
    result = np.dtype(np.zeros((), given).real.dtype)
    wide = cast(x, accumulation_dtype(given))
    size = jnp.abs(wide)
    p = 2.0 if p is None else float(p)
    if p == math.inf or p == -math.inf:
        found = (jnp.max if p > 0 else jnp.min)(size, axis=dims, keepdims=keepdim)
    elif p == 0:
        found = (size != 0).astype(size.dtype).sum(dims, keepdims=keepdim)
    elif p == 1:
        found = size.sum(dims, keepdims=keepdim)
    elif p == 2:
        square = wide.real**2 + wide.imag**2 if jnp.iscomplexobj(wide) else wide * wide
        found = jnp.sqrt(square.sum(dims, keepdims=keepdim))
    else:
        found = (size**p).sum(dims, keepdims=keepdim) ** (1 / p)
    return cast(found, result)


@lowering(aten.linalg_vector_norm.default, static=["ord"])
def linalg_vector_norm(
    self: Array, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Array:
    """The norm of vectors along dims."""
    return vector_norm(self, ord, wrap_dims(dim, self.ndim), keepdim, dtype)


@lowering(aten.norm.Scalar, static=["p"])
def norm(self: Array, p: Any = 2) -> Array:
    """The norm of all elements."""
    return vector_norm(self, p, _all_dims(self), False, None)


@lowering(aten.norm.ScalarOpt_dtype, static=["p"])
def norm_dtype(self: Array, p: Any, dtype: Any) -> Array:
    """The norm of all elements in another dtype."""
    return vector_norm(self, p, _all_dims(self), False, dtype)


@lowering(aten.norm.ScalarOpt_dim, static=["p"])
def norm_dims(self: Array, p: Any, dim: Any, keepdim: bool = False) -> Array:
    """Norms along dims."""
    return vector_norm(self, p, wrap_dims(dim, self.ndim), keepdim, None)


@lowering(aten.norm.ScalarOpt_dim_dtype, static=["p"])
def norm_dims_dtype(self: Array, p: Any, dim: Any, keepdim: bool, dtype: Any) -> Array:
    """Norms along dims in another dtype."""
    return vector_norm(self, p, wrap_dims(dim, self.ndim), keepdim, dtype)


@lowering(aten.logsumexp.default)
def logsumexp(self: Array, dim: Any, keepdim: bool = False) -> Array:
    """The logarithm of a sum of exponentials, without overflow."""
    compute, result = promote(self, kind=INT_TO_FLOAT)
    dims = wrap_dims(dim, self.ndim)
    if any(self.shape[d] == 0 for d in dims):
        sizes = (1 if d in dims else n for d, n in enumerate(self.shape) if keepdim or d not in dims)
        return jnp.full(tuple(sizes), -jnp.inf, result)
    if jnp.iscomplexobj(self):
        return _complex_logsumexp(self, dims, keepdim)
    found = jax.scipy.special.logsumexp(cast(self, compute), axis=dims, keepdims=keepdim)
    return cast(found, result)


def _complex_logsumexp(x: Array, dims: tuple[int, ...], keepdim: bool) -> Array:
    """The logarithm about the largest real part, as torch takes it."""
    largest = jnp.max(x.real, axis=dims, keepdims=True)
    largest = jnp.where(jnp.isinf(largest), jnp.zeros_like(largest), largest)
    found = jnp.log(jnp.sum(jnp.exp(x - largest), axis=dims, keepdims=True)) + largest
    return found if keepdim else jnp.squeeze(found, dims)


@lowering(aten.trace.default)
def trace(self: Array) -> Array:
    """The sum of the diagonal."""
    return total(jnp.diagonal(self), (0,), False, None)
