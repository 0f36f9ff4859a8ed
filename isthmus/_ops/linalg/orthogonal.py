"""QR with LAPACK's signs, and eigenvectors and singular vectors, which no convention makes unique."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from isthmus._graph.names import aten
from isthmus._ops.common import LAPACK, Array
from isthmus._ops.linalg.factorizations import adjoint_of, hermitian, nothing
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus._runtime import compiler
from isthmus.errors import Unsupported


@lowering(aten.linalg_qr.default, dtypes=LAPACK)
def linalg_qr(A: Array, mode: str = "reduced") -> tuple[Array, Array]:
    """Q and R, or R alone."""
    if mode == "r":
        return nothing(A), jnp.linalg.qr(A, mode="r")
    factors = jnp.linalg.qr(A, mode=mode)
    return factors[0], factors[1]


@lowering(aten.geqrf.default, dtypes=LAPACK)
def geqrf(self: Array) -> tuple[Array, Array]:
    """QR as reflectors: R above the diagonal, the vectors below it, their factors beside it."""
    # numpy's raw mode returns the transpose, LAPACK's column-major view of the matrix.
    reflectors, factors = jnp.linalg.qr(self, mode="raw")
    return reflectors.swapaxes(-1, -2), factors


@lowering(aten.linalg_householder_product.default, dtypes=LAPACK)
def linalg_householder_product(input: Array, tau: Array) -> Array:
    """The first columns of a product of reflectors."""
    if input.size == 0 or tau.shape[-1] == 0:
        rows, columns = input.shape[-2:]
        return jnp.broadcast_to(jnp.eye(rows, columns, dtype=input.dtype), input.shape)
    return jax.lax.linalg.householder_product(input, tau)


@lowering(aten.ormqr.default, dtypes=LAPACK)
def ormqr(self: Array, input2: Array, input3: Array, left: bool = True, transpose: bool = False) -> Array:
    """Multiply by a product of reflectors, all of its columns, or by its adjoint, from either side."""
    rows, columns = self.shape[-2:]
    count = input2.shape[-1]
    if self.dtype != input3.dtype or rows != input3.shape[-2 if left else -1] or count > columns:
        raise Unsupported("torch says what does not fit")
    # torch multiplies by the full square product; XLA forms it if the missing reflectors are columns of zeros.
    square = jnp.pad(self[..., :count], [(0, 0)] * (self.ndim - 1) + [(0, rows - count)])
    product = linalg_householder_product(square, input2)
    product = adjoint_of(product) if transpose else product
    return jnp.matmul(*((product, input3) if left else (input3, product)), precision="highest")


@lowering(aten._linalg_eigh.default, dtypes=LAPACK)
def linalg_eigh(A: Array, UPLO: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    """Eigenvalues in ascending order, and eigenvectors up to their phase."""
    # `hermitian` has already chosen the triangle, so XLA need not average the two.
    vectors, values = jax.lax.linalg.eigh(hermitian(A, UPLO.upper() == "U"), symmetrize_input=False)
    message = "the input matrix is ill-conditioned or has too many repeated eigenvalues"
    require(
        jnp.isfinite(values), LinAlgError, f"linalg.eigh: The algorithm failed to converge because {message}."
    )
    return values, vectors if compute_v else nothing(A)


@lowering(aten._linalg_svd.default, dtypes=LAPACK)
def linalg_svd(
    A: Array, full_matrices: bool = False, compute_uv: bool = True, driver: str | None = None
) -> tuple[Array, ...]:
    """Singular values in descending order, and singular vectors up to the phase of each pair."""
    if driver is not None:
        raise Unsupported("a driver is cuSOLVER's")
    message = (
        "linalg.svd: The algorithm failed to converge because the input matrix contained non-finite values."
    )
    require(jnp.isfinite(A), LinAlgError, message)
    if not compute_uv:
        return nothing(A), jnp.linalg.svd(A, compute_uv=False), nothing(A)
    return tuple(jnp.linalg.svd(A, full_matrices=full_matrices))


# General matrices: eigenvalues are always complex, and in no order that anything promises.


def _eigen(x: Array, name: str, *, vectors: bool) -> list[Array]:
    """Return the eigenvalues of finite matrices, and their right eigenvectors if asked for."""
    if compiler.platform() == "tpu":
        raise Unsupported("XLA has no general eigenvalues on TPUs")
    message = f"torch.linalg.{name}: input tensor should not contain infs or NaNs."
    require(jnp.isfinite(x), RuntimeError, message)
    # LAPACK may end the process over a nan, so none reaches it.
    x = jnp.where(jnp.isfinite(x), x, 0)
    if x.size == 0:
        complex_dtype = jnp.result_type(x.dtype, jnp.complex64)
        return [jnp.zeros(x.shape[:-1], complex_dtype), jnp.zeros(x.shape, complex_dtype)]
    return jax.lax.linalg.eig(x, compute_left_eigenvectors=False, compute_right_eigenvectors=vectors)


@lowering(aten.linalg_eig.default, dtypes=LAPACK)
def linalg_eig(self: Array) -> tuple[Array, Array]:
    """Eigenvalues, and eigenvectors of length one up to their phase."""
    values, vectors = _eigen(self, "eig", vectors=True)
    return values, vectors


@lowering(aten._linalg_eigvals.default, aten.linalg_eigvals.default, dtypes=LAPACK)
def linalg_eigvals(self: Array) -> Array:
    """Eigenvalues; of the public op the ``out=`` form is the one that arrives here."""
    return _eigen(self, "eigvals", vectors=False)[0]
