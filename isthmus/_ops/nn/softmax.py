"""Softmax and its logarithm, accumulated in at least float32 as torch does."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from isthmus._graph.names import aten
from isthmus._ops.common import FLOATING, Array, accumulation_dtype, cast, wrap_dim
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported


def _along(function: Callable[[Array, int], Array], x: Array, dim: int, half_to_float: bool) -> Array:
    # half_to_float is CUDA's fusion of a softmax with the cast of its input.
    result = jnp.float32 if half_to_float else x.dtype
    # The maximum of an empty row would raise.
    if x.size == 0:
        return jnp.zeros(x.shape, result)
    widened = jnp.atleast_1d(cast(x, accumulation_dtype(x.dtype)))  # a torch scalar has one dim
    return cast(function(widened, wrap_dim(dim, x.ndim)).reshape(x.shape), result)


@lowering(aten._softmax.default, dtypes=FLOATING)
def softmax(self: Array, dim: int, half_to_float: bool) -> Array:
    """Softmax along ``dim``."""
    return _along(jax.nn.softmax, self, dim, half_to_float)


@lowering(aten._safe_softmax.default)
def safe_softmax(self: Array, dim: int, dtype: DTypeLike | None = None) -> Array:
    """Softmax along ``dim``, zero where every element of a row is minus infinity."""
    x = self if dtype is None else cast(self, dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise Unsupported(f"a softmax of {x.dtype}, which torch refuses as well")

    def function(x: Array, axis: int) -> Array:
        masked = jnp.all(x == -jnp.inf, axis=axis, keepdims=True)
        # Chosen before and after: a gradient through the other choice would be nan.
        return jnp.where(masked, 0, jax.nn.softmax(jnp.where(masked, 0, x), axis=axis))

    return _along(function, x, dim, False)


@lowering(aten._log_softmax.default, dtypes=FLOATING)
def log_softmax(self: Array, dim: int, half_to_float: bool) -> Array:
    """The logarithm of softmax along ``dim``."""
    return _along(jax.nn.log_softmax, self, dim, half_to_float)


def _backward(
    formula: Callable[[Array, Array, int], Array],
    grad_output: Array,
    output: Array,
    dim: int,
    input_dtype: DTypeLike,
) -> Array:
    """The gradient of a softmax from its output."""
    acc_dtype = accumulation_dtype(output.dtype)
    g, y = (jnp.atleast_1d(cast(a, acc_dtype)) for a in (grad_output, output))
    return cast(formula(g, y, wrap_dim(dim, output.ndim)).reshape(output.shape), input_dtype)


def _softmax_grad(g: Array, y: Array, axis: int) -> Array:
    return y * (g - (g * y).sum(axis, keepdims=True))


def _log_softmax_grad(g: Array, y: Array, axis: int) -> Array:
    return g - jnp.exp(y) * g.sum(axis, keepdims=True)


lowering(aten._softmax_backward_data.default)(functools.partial(_backward, _softmax_grad))
lowering(aten._log_softmax_backward_data.default)(functools.partial(_backward, _log_softmax_grad))
