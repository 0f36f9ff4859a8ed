"""Orthogonal factorizations: QR with LAPACK's signs, and eigenvectors, which no convention makes unique."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from isthmus._graph.names import aten
from isthmus._ops.linalg.factorizations import adjoint_of, check_dtype, hermitian, nothing
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported

Array = Any


@lowering(aten.linalg_qr.default)
def linalg_qr(A: Array, mode: str = "reduced") -> tuple[Array, Array]:
    """Q and R, or R alone."""
    check_dtype(A)
    if mode == "r":
        return nothing(A), jnp.linalg.qr(A, mode="r")
    found = jnp.linalg.qr(A, mode=mode)
    return found[0], found[1]


@lowering(aten.geqrf.default)
def geqrf(self: Array) -> tuple[Array, Array]:
    """QR as reflectors: R above the diagonal, the vectors below it, their factors beside it."""
    check_dtype(self)
    reflectors, factors = jnp.linalg.qr(self, mode="raw")
    return reflectors.swapaxes(-1, -2), factors


@lowering(aten.linalg_householder_product.default)
def linalg_householder_product(input: Array, tau: Array) -> Array:
    """The first columns of a product of reflectors."""
    check_dtype(input, tau)
    if input.size == 0 or tau.shape[-1] == 0:
        rows, columns = input.shape[-2:]
        return jnp.broadcast_to(jnp.eye(rows, columns, dtype=input.dtype), input.shape)
    return jax.lax.linalg.householder_product(input, tau)


@lowering(aten.ormqr.default)
def ormqr(self: Array, input2: Array, input3: Array, left: bool = True, transpose: bool = False) -> Array:
    """Multiply by a product of reflectors, all of its columns, or by its adjoint, from either side."""
    check_dtype(self, input2, input3)
    rows, columns = self.shape[-2:]
    count = input2.shape[-1]
    if self.dtype != input3.dtype or rows != input3.shape[-2 if left else -1] or count > columns:
        raise Unsupported("torch says what does not fit")
    square = jnp.pad(self[..., :count], [(0, 0)] * (self.ndim - 1) + [(0, rows - count)])
    product = linalg_householder_product(square, input2)
    product = adjoint_of(product) if transpose else product
    return jnp.matmul(*((product, input3) if left else (input3, product)), precision="highest")


@lowering(aten._linalg_eigh.default)
def linalg_eigh(A: Array, UPLO: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    """Eigenvalues in ascending order, and eigenvectors up to their phase."""
    check_dtype(A)
    vectors, found = jax.lax.linalg.eigh(hermitian(A, UPLO.upper() == "U"), symmetrize_input=False)
    message = "the input matrix is ill-conditioned or has too many repeated eigenvalues"
    require(
        jnp.isfinite(found), LinAlgError, f"linalg.eigh: The algorithm failed to converge because {message}."
    )
    return found, vectors if compute_v else nothing(A)


@lowering(aten._linalg_svd.default)
def linalg_svd(
    A: Array, full_matrices: bool = False, compute_uv: bool = True, driver: str | None = None
) -> tuple[Array, ...]:
    """Singular values in descending order, and singular vectors up to the phase of each pair."""
    check_dtype(A)
    if driver is not None:
        raise Unsupported("a driver is cuSOLVER's")
    message = (
        "linalg.svd: The algorithm failed to converge because the input matrix contained non-finite values."
    )
    require(jnp.isfinite(A), LinAlgError, message)
    if not compute_uv:
        return nothing(A), jnp.linalg.svd(A, compute_uv=False), nothing(A)
    return tuple(jnp.linalg.svd(A, full_matrices=full_matrices))
