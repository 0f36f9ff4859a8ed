"""Distances between the rows of matrices, in any p-norm, and their gradients."""

from __future__ import annotations

import math

import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import FLOAT32_OR_64, INEXACT, Array
from isthmus._ops.linalg.matmul import product
from isthmus._ops.registry import lowering

_MATMUL_ROWS = 25  # with more rows than this torch takes the matrix product by default


def _norm(difference: Array, p: float) -> Array:
    """The p-norm along the last dim, as torch defines it for p = 0 and infinity too."""
    size = jnp.abs(difference)
    if p == 0:
        # How many coordinates differ; a nan passes both functions, where a comparison would lose it.
        return jnp.minimum(jnp.ceil(size), 1).sum(-1)
    if p == 1:
        return size.sum(-1)
    if p == 2:
        return jnp.sqrt((size * size).sum(-1))
    if math.isinf(p):
        return size.max(-1, initial=0)
    return (size**p).sum(-1) ** (1 / p)


def _slope(difference: Array, distance: Array, p: float) -> Array:
    """The derivative of a distance by each coordinate; zero where torch has it zero."""
    size, sign = jnp.abs(difference), jnp.sign(difference)
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return sign
    if math.isinf(p):
        return sign * (1 - jnp.minimum(jnp.ceil(jnp.abs(size - distance)), 1))  # nan stays nan
    flat = distance == 0
    if p < 1:
        flat = flat | (difference == 0)
    # The quotient is taken everywhere before one is chosen, so no divisor may be zero: its gradient would be nan.
    below = jnp.where(distance == 0, 1, distance)
    if p == 2:
        return jnp.where(flat, 0, difference / below)
    return jnp.where(flat, 0, sign * jnp.where(flat, 1, size) ** (p - 1) / below ** (p - 1))


def _between(x1: Array, x2: Array) -> Array:
    return x1[..., :, None, :] - x2[..., None, :, :]


@lowering(aten._euclidean_dist.default, matmul=True, accumulate=True, dtypes=INEXACT)
def euclidean_dist(x1: Array, x2: Array) -> Array:
    """Distances between rows by one matrix product: the squares of both plus -2 times what they share."""
    squares1 = (x1 * x1).sum(-1, keepdims=True)
    squares2 = (x2 * x2).sum(-1, keepdims=True)
    left = jnp.concatenate([x1 * -2, squares1, jnp.ones_like(squares1)], -1)
    right = jnp.concatenate([x2, jnp.ones_like(squares2), squares2], -1)
    # Rounding may leave a small negative square of a distance that is zero.
    return jnp.sqrt(jnp.maximum(product(left, right.swapaxes(-1, -2)), 0))


@lowering(aten._cdist_forward.default, matmul=True, dtypes=FLOAT32_OR_64)
def cdist_forward(x1: Array, x2: Array, p: float, compute_mode: int | None) -> Array:
    """Distances of every row of ``x1`` to every row of ``x2``, over broadcast batches."""
    mode = compute_mode or 0
    if p == 2 and (mode == 1 or (mode == 0 and max(x1.shape[-2], x2.shape[-2]) > _MATMUL_ROWS)):
        return euclidean_dist(x1, x2)
    return _norm(_between(x1, x2), p)


@lowering(aten._cdist_backward.default, dtypes=FLOAT32_OR_64)
def cdist_backward(grad: Array, x1: Array, x2: Array, p: float, cdist: Array) -> Array:
    """The gradient for ``x1``, in the broadcast batch."""
    batch = jnp.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    shape = (*batch, *x1.shape[-2:])
    if 0 in (*shape, x2.shape[-2]):
        return jnp.zeros_like(x1)
    slope = _slope(_between(x1, x2), cdist[..., None], p)
    return jnp.broadcast_to((grad[..., None] * slope).sum(-2), shape)


def _pairs(count: int) -> tuple[Array, Array]:
    """Return the pairs i < j in torch's order."""
    above = jnp.arange(count)[:, None] < jnp.arange(count)[None, :]
    i, j = jnp.nonzero(above, size=count * (count - 1) // 2)
    return i, j


@lowering(aten._pdist_forward.default, dtypes=FLOAT32_OR_64)
def pdist_forward(self: Array, p: float = 2.0) -> Array:
    """The distance of every pair of rows."""
    if self.shape[0] <= 1:
        return jnp.zeros((0,), self.dtype)
    return _norm(_between(self, self), p)[_pairs(self.shape[0])]


@lowering(aten._pdist_backward.default, dtypes=FLOAT32_OR_64)
def pdist_backward(grad: Array, self: Array, p: float, pdist: Array) -> Array:
    """The gradient of the distances of every pair of rows."""
    count = self.shape[0]
    if count <= 1 or self.size == 0:
        return jnp.zeros_like(self)
    i, j = _pairs(count)

    def square(pairs: Array) -> Array:
        return jnp.zeros((count, count), self.dtype).at[i, j].set(pairs).at[j, i].set(pairs)

    # A row is no pair with itself: inf - inf must not reach the sum.
    difference = jnp.where(jnp.eye(count, dtype=bool)[..., None], 0, _between(self, self))
    slope = _slope(difference, square(pdist)[..., None], p)
    return (square(grad)[..., None] * slope).sum(-2)
