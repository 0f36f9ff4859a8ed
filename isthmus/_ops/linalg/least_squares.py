"""Least squares: by QR where the matrix has full rank, by singular values where it may not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from isthmus._graph.names import aten
from isthmus._ops.common import LAPACK, Array
from isthmus._ops.linalg.factorizations import adjoint_of, broadcast_batch, solve_triangle
from isthmus._ops.registry import lowering
from isthmus._runtime.dtypes import to_torch_dtype
from isthmus.errors import Unsupported

_HIGHEST = jax.lax.Precision.HIGHEST
DRIVERS = ("gels", "gelsy", "gelsd", "gelss")


def _times(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_HIGHEST)


def _precision(x: Array) -> float:
    return torch.finfo(to_torch_dtype(x.dtype)).eps


def _full_rank(a: Array, b: Array) -> Array:
    """Solve as ``gels`` does: the smallest solution of a wide system, the best one of a tall system."""
    rows, columns = a.shape[-2:]
    if rows >= columns:
        q, r = jnp.linalg.qr(a)
        return solve_triangle(r, _times(adjoint_of(q), b), upper=True)
    q, r = jnp.linalg.qr(adjoint_of(a))
    return _times(q, solve_triangle(r, b, upper=True, transpose_a=True, conjugate_a=True))


def _any_rank(a: Array, b: Array, rcond: float) -> tuple[Array, Array, Array]:
    """Return the smallest of the best solutions, the rank, and the singular values that decide it."""
    u, s, vh = jnp.linalg.svd(a, full_matrices=False)
    # A negative tolerance means the precision of the dtype, as LAPACK has it.
    tolerance = _precision(s) if rcond < 0 else rcond
    # Singular values are sorted: the first is the largest.
    large = s > tolerance * s[..., :1]
    inverse = jnp.where(large, 1 / jnp.where(large, s, 1), 0).astype(a.dtype)
    solution = _times(adjoint_of(vh), inverse[..., None] * _times(adjoint_of(u), b))
    return solution, large.sum(-1).astype(jnp.int64), s


@lowering(aten.linalg_lstsq.default, dtypes=LAPACK)
def linalg_lstsq(
    self: Array, b: Array, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Array, ...]:
    """The solution, and what the driver says besides of residuals, rank and singular values."""
    driver = driver or "gelsy"
    rows, columns = self.shape[-2:]
    if driver not in DRIVERS or self.dtype != b.dtype or self.ndim < 2 or not 0 <= self.ndim - b.ndim <= 1:
        raise Unsupported(f"no least squares of {self.shape} and {b.shape} by {driver!r}")
    if driver in ("gelsd", "gelss") and rows > columns:
        raise Unsupported(
            "whether there are residuals depends on the rank"
        )  # see _device/kernels/factorizations.py
    vector = self.ndim - b.ndim == 1
    if vector and b.ndim > 1 and b.shape != self.shape[:-1]:
        raise Unsupported(
            "a batch of one matrix: torch takes b for a matrix, and repeats the answer once per row of b"
        )
    a, target = broadcast_batch(self, b[..., None] if vector else b)
    if driver == "gels":
        return _answer_full_rank(a, target, vector)
    # torch's default, the same as numpy's: machine precision times the larger side.
    usual = _precision(a) * max(rows, columns)
    tolerance = usual if rcond is None else rcond
    if driver == "gelsy" and tolerance > usual:
        # It leaves out columns where the others leave out singular vectors: the same only for what is all rounding.
        raise Unsupported("no pivoted QR to tell the rank by")
    solution, rank, values = _any_rank(a, target, tolerance)
    none = jnp.zeros((0,), values.dtype)
    if driver == "gelsy" or (self.size == 0 and self.ndim == 2):
        values = none
    return (solution[..., 0] if vector else solution), none, rank, values


def _answer_full_rank(a: Array, b: Array, vector: bool) -> tuple[Array, ...]:
    rows, columns = a.shape[-2:]
    solution = _full_rank(a, b)
    residuals = none = jnp.zeros((0,), solution.real.dtype)
    if rows > columns:
        residuals = (
            jnp.square(jnp.abs(b - _times(a, solution))).sum(-2)
            if columns
            else jnp.zeros_like(b[..., 0, :].real)
        )
    return (solution[..., 0] if vector else solution), residuals, jnp.zeros((0,), jnp.int64), none
