"""LDL factors of symmetric matrices by Bunch and Kaufman's pivoting, packed as LAPACK packs them.

A pivot is one row, or two: of two, both entries hold minus the row exchanged with the second. Rows of columns
already done are not exchanged, so the factor is a product of steps rather than one triangle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.arguments import AnyFunction
from isthmus._graph.names import aten
from isthmus._ops.common import LAPACK, Array
from isthmus._ops.linalg.factorizations import check_unchecked
from isthmus._ops.registry import lowering

Conjugate = Callable[[Array], Array]
# Bunch and Kaufman's bound on the growth of elements: below it a pivot of one row may be too small.
_ALPHA = (1 + np.sqrt(17)) / 8


class _State(NamedTuple):
    """A factorization under way: the matrix kept full, the packed columns, and how far it has come."""

    matrix: Array
    packed: Array
    pivots: Array
    info: Array
    at: Array


def _size(x: Array) -> Array:
    """Return LAPACK's cheap absolute value: the sum of both parts' of a complex number."""
    return jnp.abs(x.real) + jnp.abs(x.imag) if jnp.iscomplexobj(x) else jnp.abs(x)


def _exchange(x: Array, i: Array, j: Array) -> Array:
    """Exchange two rows."""
    return x.at[i].set(x[j]).at[j].set(x[i])


def _choose(matrix: Array, k: Array) -> tuple[Array, Array, Array]:
    """Return the row to exchange, whether two rows are the pivot, and whether the column is all zero."""
    rows = jnp.arange(matrix.shape[0])
    sizes = _size(matrix)
    column = jnp.where(rows > k, sizes[:, k], -1)
    largest = jnp.argmax(column)
    here, below = sizes[k, k], jnp.maximum(column[largest], 0)
    across = jnp.where((rows >= k) & (rows != largest), sizes[largest], 0).max()
    # LAPACK's four cases of sytf2: keep the row, keep it after a look along the largest one's row, exchange, or take
    # two.
    stay = (here >= _ALPHA * below) | (here >= _ALPHA * below * (below / across))
    alone = sizes[largest, largest] >= _ALPHA * across
    zero = (jnp.maximum(here, below) == 0) | jnp.isnan(here)
    row = jnp.where(zero | stay, k, largest)
    return row, ~(zero | stay | alone), zero


def _columns(matrix: Array, k: Array, two: Array, zero: Array, conjugate: Conjugate) -> tuple[Array, ...]:
    """Return the multipliers of one or two columns, and what they take off the rest of the matrix."""
    rows = jnp.arange(matrix.shape[0])
    first, second = matrix[:, k], matrix[:, k + 1]
    a, b, c = matrix[k, k], matrix[k + 1, k], matrix[k + 1, k + 1]
    single = jnp.where(rows > k, first / jnp.where(zero, 1, a), 0)
    determinant = jnp.where(two, a * c - b * conjugate(b), 1)
    left = jnp.where(rows > k + 1, (first * c - second * b) / determinant, 0)
    right = jnp.where(rows > k + 1, (second * a - first * conjugate(b)) / determinant, 0)
    of_one = jnp.where(zero, 0, jnp.outer(single, conjugate(first)))
    of_two = jnp.outer(left, conjugate(first)) + jnp.outer(right, conjugate(second))
    return jnp.where(two, left, single), right, jnp.where(two, of_two, of_one)


def _step(state: _State, conjugate: Conjugate) -> _State:
    """Take one pivot of one or two rows off the matrix, which has one row and column of padding."""
    matrix, packed, pivots, info, k = state
    size = pivots.shape[0]
    rows = jnp.arange(matrix.shape[0])
    row, two, zero = _choose(matrix, k)
    target = k + two
    exchanged = _exchange(_exchange(matrix, target, row).T, target, row).T
    left, right, taken = _columns(exchanged, k, two, zero, conjugate)
    left = left.at[k].set(exchanged[k, k])
    left = left.at[k + 1].set(jnp.where(two, exchanged[k + 1, k], left[k + 1]))
    right = right.at[k + 1].set(exchanged[k + 1, k + 1])
    packed = packed.at[:, k].set(left)
    packed = packed.at[:, k + 1].set(jnp.where(two, right, packed[:, k + 1]))
    remains = rows > target
    matrix = jnp.where(remains[:, None] & remains[None, :], exchanged - taken, exchanged)
    if conjugate is jnp.conj:  # rounding leaves the diagonal not quite real
        matrix = jnp.where(jnp.eye(matrix.shape[0], dtype=bool), matrix.real, matrix)
    # LAPACK counts rows from 1, so that a sign can mark a pivot of two rows.
    entry = jnp.where(two, -(row + 1), row + 1).astype(pivots.dtype)
    pivots = pivots.at[k].set(entry)
    pivots = jnp.where(two & (jnp.arange(size) == k + 1), entry, pivots)
    info = jnp.where((info == 0) & zero, k + 1, info).astype(info.dtype)
    return _State(matrix, packed, pivots, info, k + 1 + two)


def _factor(x: Array, hermitian: bool) -> tuple[Array, Array, Array]:
    conjugate: Conjugate = jnp.conj if hermitian else lambda value: value
    size = x.shape[-1]
    strict = jnp.tril(x, -1)
    diagonal = jnp.diagonal(x).real if hermitian else jnp.diagonal(x)
    full = strict + conjugate(strict.T) + jnp.diag(diagonal).astype(x.dtype)
    start = _State(
        jnp.pad(full, (0, 1)),
        jnp.zeros((size + 1, size + 1), x.dtype),
        jnp.zeros(size, jnp.int32),
        jnp.zeros((), jnp.int32),
        jnp.zeros((), jnp.int32),
    )
    end = jax.lax.while_loop(lambda s: s.at < size, lambda s: _step(s, conjugate), start)
    return end.packed[:size, :size], end.pivots, end.info


def _batched(function: AnyFunction, ndim: int) -> AnyFunction:
    for _ in range(ndim):
        function = jax.vmap(function)
    return function


@lowering(aten.linalg_ldl_factor_ex.default, dtypes=LAPACK)
def linalg_ldl_factor_ex(
    self: Array, *, hermitian: bool = False, check_errors: bool = False
) -> tuple[Array, Array, Array]:
    """The packed factors, the pivots, and the first pivot that is zero."""
    check_unchecked(check_errors)
    if self.size == 0:
        return self, jnp.zeros(self.shape[:-1], jnp.int32), jnp.zeros(self.shape[:-2], jnp.int32)
    return _batched(lambda x: _factor(x, hermitian), self.ndim - 2)(self)


def _starts(pivots: Array) -> Array:
    """Return which entries begin a pivot of two rows."""

    def walk(inside: Array, pivot: Array) -> tuple[Array, Array]:
        begins = (pivot < 0) & ~inside
        return begins, begins

    return jax.lax.scan(walk, jnp.zeros((), bool), pivots)[1]


def _solve(packed: Array, pivots: Array, b: Array, hermitian: bool) -> Array:
    conjugate: Conjugate = jnp.conj if hermitian else lambda value: value
    size = pivots.shape[0]
    rows = jnp.arange(size)
    begins = _starts(pivots)
    ends = jnp.roll(begins, 1).at[0].set(False)
    partner = jnp.abs(pivots) - 1
    # Below the pivot: the entry under the first of two rows belongs to the pivot itself.
    below = (rows[:, None] > rows + begins[None, :]) if size else rows[:, None] > rows
    lower = jnp.where(below, packed, 0)

    def exchange(k: Array, x: Array, applies: Array) -> Array:
        return jnp.where(applies, _exchange(x, k, partner[k]), x)

    def forward(k: Array, x: Array) -> Array:
        x = jnp.where(begins[k], _exchange(x, jnp.minimum(k + 1, size - 1), partner[k]), x)
        x = exchange(k, x, pivots[k] > 0)
        return x - lower[:, k, None] * x[k][None]

    def backward(i: Array, x: Array) -> Array:
        k = size - 1 - i
        x = x.at[k].add(-(conjugate(lower[:, k])[:, None] * x).sum(0))
        # The exchange of two rows comes after the columns of both.
        x = jnp.where(begins[k], _exchange(x, jnp.minimum(k + 1, size - 1), partner[k]), x)
        return exchange(k, x, pivots[k] > 0)

    x = jax.lax.fori_loop(0, size, forward, b)
    x = _divide(packed, x, begins, ends, conjugate)
    return jax.lax.fori_loop(0, size, backward, x)


def _divide(packed: Array, x: Array, begins: Array, ends: Array, conjugate: Conjugate) -> Array:
    """Solve with the pivots, of one row and of two."""
    diagonal = jnp.diagonal(packed)[:, None]
    under = jnp.diagonal(jnp.roll(packed, -1, 0))[:, None]  # the entry below each diagonal one
    after, before = jnp.roll(x, -1, 0), jnp.roll(x, 1, 0)
    determinant = diagonal * jnp.roll(diagonal, -1, 0) - under * conjugate(under)
    first = (jnp.roll(diagonal, -1, 0) * x - conjugate(under) * after) / jnp.where(
        begins[:, None], determinant, 1
    )
    above = jnp.roll(under, 1, 0)
    second = (jnp.roll(diagonal, 1, 0) * x - above * before) / jnp.where(
        ends[:, None], jnp.roll(determinant, 1, 0), 1
    )
    single = x / jnp.where((begins | ends)[:, None], 1, diagonal)
    return jnp.where(begins[:, None], first, jnp.where(ends[:, None], second, single))


@lowering(aten.linalg_ldl_solve.default, dtypes=LAPACK)
def linalg_ldl_solve(LD: Array, pivots: Array, B: Array, *, hermitian: bool = False) -> Array:
    """Solve with packed factors."""
    batch = jnp.broadcast_shapes(LD.shape[:-2], B.shape[:-2])
    B = jnp.broadcast_to(B, batch + B.shape[-2:])
    if B.size == 0:
        return B
    LD = jnp.broadcast_to(LD, batch + LD.shape[-2:])
    pivots = jnp.broadcast_to(pivots, batch + pivots.shape[-1:]).astype(jnp.int32)
    solve = _batched(lambda a, p, b: _solve(a, p, b, hermitian), len(batch))
    return solve(LD, pivots, B)
