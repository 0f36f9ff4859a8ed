"""Factorizations that are unique once LAPACK's conventions are kept, and what torch solves with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from isthmus._graph.names import aten
from isthmus._ops.common import LAPACK, Array, cast, promote, wrap_dim
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported


def check_unchecked(check_errors: bool) -> None:
    """Leave to the CPU a call that raises by itself: the public functions look at ``info`` instead."""
    if check_errors:
        raise Unsupported("check_errors=True raises on the host")


def adjoint_of(x: Array) -> Array:
    """Conjugate and transpose matrices."""
    return jnp.conj(x.swapaxes(-1, -2))


def hermitian(x: Array, upper: bool) -> Array:
    """Complete Hermitian matrices from one triangle: nothing reads the other one."""
    lower = adjoint_of(jnp.triu(x)) if upper else jnp.tril(x)
    strict = jnp.tril(lower, -1)
    # LAPACK ignores the imaginary part of the diagonal of a Hermitian matrix.
    diagonal = jnp.eye(x.shape[-1], dtype=bool)
    return strict + adjoint_of(strict) + jnp.where(diagonal, lower.real, 0).astype(x.dtype)


def nothing(x: Array) -> Array:
    """Return the empty tensor that torch returns for a result that was not requested."""
    return jnp.zeros((0,), x.dtype)


def broadcast_batch(*arrays: Array) -> list[Array]:
    """Broadcast the batch dims of matrices."""
    batch = jnp.broadcast_shapes(*(a.shape[:-2] for a in arrays))
    return [jnp.broadcast_to(a, batch + a.shape[-2:]) for a in arrays]


def solve_triangle(
    a: Array, b: Array, *, upper: bool, left: bool = True, unit: bool = False, **how: bool
) -> Array:
    """Solve with one triangle of ``a``; the other may hold anything."""
    a, b = broadcast_batch(a, b)
    if b.size == 0:
        return jnp.zeros(b.shape, b.dtype)
    triangle = jnp.triu(a) if upper else jnp.tril(a)
    return jax.lax.linalg.triangular_solve(
        triangle, b, left_side=left, lower=not upper, unit_diagonal=unit, **how
    )


# Cholesky


def _factor(x: Array, upper: bool) -> tuple[Array, Array]:
    """Return the lower factor, nan where there is none, and the order of the first minor that is to blame."""
    if x.size == 0:
        return x, jnp.zeros(x.shape[:-2], jnp.int32)
    full = hermitian(x, upper)
    factor = jnp.tril(jax.lax.linalg.cholesky(full, symmetrize_input=False))
    # XLA answers with a matrix of nan where LAPACK would return `info`; which minor failed is found only if one did.
    failed = jnp.isnan(factor).any((-1, -2))
    info = jax.lax.cond(failed.any(), _first_bad_minor, lambda a: jnp.zeros(a.shape[:-2], jnp.int32), full)
    return factor, jnp.where(failed, jnp.where(info == 0, x.shape[-1], info), 0).astype(jnp.int32)


def _first_bad_minor(a: Array) -> Array:
    """Return the order of the first leading minor that is not positive, 0 if all are, by elimination."""

    def eliminate(k: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        a, info = state
        column = jnp.take(a, k, axis=-1)
        pivot = jnp.take(column, k, axis=-1).real
        info = jnp.where((info == 0) & ~(pivot > 0), k + 1, info).astype(jnp.int32)
        scaled = column / pivot[..., None]
        return a - scaled[..., :, None] * jnp.conj(column)[..., None, :], info

    start = (a, jnp.zeros(a.shape[:-2], jnp.int32))
    return jax.lax.fori_loop(0, a.shape[-1], eliminate, start)[1]


@lowering(aten.linalg_cholesky_ex.default, dtypes=LAPACK)
def linalg_cholesky_ex(self: Array, upper: bool = False, check_errors: bool = False) -> tuple[Array, Array]:
    """The Cholesky factor and ``info``; a matrix that is not positive-definite has a factor of nan."""
    check_unchecked(check_errors)
    factor, info = _factor(self, upper)
    return (adjoint_of(factor) if upper else factor), info


@lowering(aten.cholesky.default)
def cholesky(self: Array, upper: bool = False) -> Array:
    """The Cholesky factor of matrices that must have one."""
    factor, info = linalg_cholesky_ex(self, upper)
    message = "cholesky: The factorization could not be completed because the input is not positive-definite."
    require(info == 0, LinAlgError, message)
    return factor


@lowering(aten._cholesky_solve_helper.default, dtypes=LAPACK)
def cholesky_solve_helper(self: Array, A: Array, upper: bool) -> Array:
    """Solve with the matrix whose Cholesky factor is ``A``."""
    how = {"transpose_a": True, "conjugate_a": True}
    first, second = (how, {}) if upper else ({}, how)
    half = solve_triangle(A, self, upper=upper, **first)
    return solve_triangle(A, half, upper=upper, **second)


@lowering(aten.cholesky_inverse.default)
def cholesky_inverse(self: Array, upper: bool = False) -> Array:
    """Invert the matrix whose Cholesky factor this is."""
    why = "the inversion could not be completed because the input matrix is singular"
    message = f"cholesky_inverse: A diagonal element is zero, {why}."
    require(jnp.diagonal(self, axis1=-2, axis2=-1) != 0, LinAlgError, message)
    identity = jnp.eye(self.shape[-1], dtype=self.dtype)
    return cholesky_solve_helper(identity, self, upper)


# Triangular systems


@lowering(aten.linalg_solve_triangular.default, dtypes=LAPACK)
def linalg_solve_triangular(
    self: Array, B: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    """Solve ``A X = B``, or ``X A = B``, with a triangle of ``A``."""
    return solve_triangle(self, B, upper=upper, left=left, unit=unitriangular)


@lowering(aten.triangular_solve.default, dtypes=LAPACK)
def triangular_solve(
    self: Array, A: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Array, Array]:
    """Solve ``A X = self`` with a triangle of ``A``, which is returned as well."""
    solution = solve_triangle(A, self, upper=upper, unit=unitriangular, transpose_a=transpose)
    return solution, broadcast_batch(A, self)[0]


# LU


def _lu(x: Array) -> tuple[Array, Array, Array, Array]:
    """Return the packed factors, pivots counted from 1, the permutation of rows, and ``info``."""
    packed, pivots, permutation = jax.lax.linalg.lu(x)
    # LAPACK's info: the first pivot that is exactly zero, counted from 1.
    zero = jnp.diagonal(packed, axis1=-2, axis2=-1) == 0
    if zero.shape[-1] == 0:
        return packed, pivots + 1, permutation, jnp.zeros(x.shape[:-2], jnp.int32)
    info = jnp.where(zero.any(-1), zero.argmax(-1) + 1, 0)
    return packed, (pivots + 1).astype(jnp.int32), permutation, info.astype(jnp.int32)


def _solve_lu(packed: Array, permutation: Array, b: Array, *, left: bool, adjoint: bool) -> Array:
    """Solve with a factored matrix or its adjoint, from either side."""
    if not left:
        return adjoint_of(_solve_lu(packed, permutation, adjoint_of(b), left=True, adjoint=not adjoint))
    packed, b = broadcast_batch(packed, b)
    order = jnp.broadcast_to(permutation, packed.shape[:-1])
    if not adjoint:
        rows = jnp.take_along_axis(b, order[..., None], axis=-2)
        return solve_triangle(packed, solve_triangle(packed, rows, upper=False, unit=True), upper=True)
    how = {"transpose_a": True, "conjugate_a": True}
    solution = solve_triangle(packed, b, upper=True, **how)
    solution = solve_triangle(packed, solution, upper=False, unit=True, **how)
    return jnp.take_along_axis(solution, jnp.argsort(order, axis=-1)[..., None], axis=-2)


def _permutation(pivots: Array, rows: int) -> Array:
    within = (pivots >= 1) & (pivots <= rows)
    message = "pivots passed to lu_unpack must be between 1 and LU.size(-2) inclusive."
    require(within, RuntimeError, f"{message}Did you properly pass the result of lu_factor?")
    return jax.lax.linalg.lu_pivots_to_permutation(pivots.astype(jnp.int32) - 1, rows)


def _unpack(packed: Array) -> tuple[Array, Array]:
    rows, columns = packed.shape[-2:]
    inner = min(rows, columns)
    # Both factors share one matrix: the ones on the diagonal of the lower one are not stored.
    lower = jnp.tril(packed[..., :inner], -1) + jnp.eye(rows, inner, dtype=packed.dtype)
    return lower, jnp.triu(packed[..., :inner, :])


def _permutation_matrix(permutation: Array, dtype: DTypeLike) -> Array:
    rows = jnp.arange(permutation.shape[-1])
    return (rows[:, None] == permutation[..., None, :]).astype(dtype)


@lowering(aten.linalg_lu_factor_ex.default, dtypes=LAPACK)
def linalg_lu_factor_ex(A: Array, pivot: bool = True, check_errors: bool = False) -> tuple[Array, ...]:
    """Packed LU factors with partial pivoting."""
    check_unchecked(check_errors)
    if not pivot:
        raise Unsupported("LU without pivoting")
    packed, pivots, _, info = _lu(A)
    return packed, pivots, info


@lowering(aten.linalg_lu.default, dtypes=LAPACK)
def linalg_lu(A: Array, pivot: bool = True) -> tuple[Array, ...]:
    """The matrices P, L and U."""
    if not pivot:
        raise Unsupported("LU without pivoting")
    packed, _, permutation, _ = _lu(A)
    return (_permutation_matrix(permutation, A.dtype), *_unpack(packed))


@lowering(aten.lu_unpack.default)
def lu_unpack(
    LU_data: Array, LU_pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Array, ...]:
    """The matrices P, L and U of packed factors."""
    lower, upper = _unpack(LU_data) if unpack_data else (nothing(LU_data), nothing(LU_data))
    if not unpack_pivots:
        return nothing(LU_data), lower, upper
    permutation = _permutation(LU_pivots, LU_data.shape[-2])
    return _permutation_matrix(permutation, LU_data.dtype), lower, upper


@lowering(aten.linalg_lu_solve.default, dtypes=LAPACK)
def linalg_lu_solve(LU: Array, pivots: Array, B: Array, left: bool = True, adjoint: bool = False) -> Array:
    """Solve with packed factors."""
    permutation = _permutation(pivots, LU.shape[-2])
    return _solve_lu(LU, permutation, B, left=left, adjoint=adjoint)


@lowering(aten._linalg_solve_ex.default, dtypes=LAPACK)
def linalg_solve_ex(A: Array, B: Array, left: bool = True, check_errors: bool = False) -> tuple[Array, ...]:
    """Solve ``A X = B`` or ``X A = B``, and return the factors of ``A`` for the gradient."""
    check_unchecked(check_errors)
    # torch's rule for when the right-hand side is a batch of vectors, not of matrices.
    vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    packed, pivots, permutation, info = _lu(A)
    solution = _solve_lu(packed, permutation, B[..., None] if vector else B, left=left, adjoint=False)
    return (solution[..., 0] if vector else solution), packed, pivots, info


@lowering(aten.linalg_inv_ex.default, dtypes=LAPACK)
def linalg_inv_ex(A: Array, check_errors: bool = False) -> tuple[Array, Array]:
    """The inverse and ``info``."""
    check_unchecked(check_errors)
    packed, _, permutation, info = _lu(A)
    identity = jnp.eye(A.shape[-1], dtype=A.dtype)
    return _solve_lu(packed, permutation, identity, left=True, adjoint=False), info


def _parity(pivots: Array, dtype: DTypeLike) -> Array:
    """Return the sign of a permutation: every row exchanged with another turns it."""
    # A pivot that names its own row exchanges nothing.
    exchanged = pivots != jnp.arange(1, pivots.shape[-1] + 1)
    return (1 - 2 * (exchanged.sum(-1) % 2)).astype(dtype)


@lowering(aten._linalg_det.default, dtypes=LAPACK)
def linalg_det(A: Array) -> tuple[Array, ...]:
    """The determinant, and the factors for its gradient."""
    packed, pivots, _, _ = _lu(A)
    diagonal = jnp.diagonal(packed, axis1=-2, axis2=-1)
    return diagonal.prod(-1) * _parity(pivots, A.dtype), packed, pivots


@lowering(aten._linalg_slogdet.default, dtypes=LAPACK)
def linalg_slogdet(A: Array) -> tuple[Array, ...]:
    """The sign and the logarithm of the determinant, and the factors for their gradient."""
    packed, pivots, _, _ = _lu(A)
    diagonal = jnp.diagonal(packed, axis1=-2, axis2=-1)
    sign = jnp.sign(diagonal).prod(-1) * _parity(pivots, A.dtype)
    return sign, jnp.log(jnp.abs(diagonal)).sum(-1), packed, pivots


@lowering(aten.linalg_cross.default)
def linalg_cross(self: Array, other: Array, dim: int = -1) -> Array:
    """The cross product of vectors of three elements along ``dim``."""
    _, dtype = promote(self, other)
    left, right = jnp.broadcast_arrays(cast(self, dtype), cast(other, dtype))
    return jnp.cross(left, right, axis=wrap_dim(dim, left.ndim)).astype(dtype)


@lowering(aten.linalg_matrix_exp.default, accumulate=True)
def linalg_matrix_exp(self: Array) -> Array:
    """The exponential of matrices."""
    if self.size == 0:
        return self
    with jax.default_matmul_precision("highest"):
        # JAX gives nan where more squarings are needed: not before norms of 2**64.
        return jax.scipy.linalg.expm(self, max_squarings=64)
