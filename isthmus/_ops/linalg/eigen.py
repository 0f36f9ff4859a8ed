"""Eigenvalues of general matrices: always complex, and in no order that anybody promises."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.linalg.factorizations import check_dtype
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus._runtime import compiler
from isthmus.errors import Unsupported

Array = Any


def _eigen(x: Array, name: str, *, vectors: bool) -> list[Array]:
    """Return the eigenvalues of finite matrices, and their right eigenvectors if asked for."""
    check_dtype(x)
    if compiler.platform() == "tpu":
        raise Unsupported("XLA has no general eigenvalues on TPUs")
    message = f"torch.linalg.{name}: input tensor should not contain infs or NaNs."
    require(jnp.isfinite(x), RuntimeError, message)
    # LAPACK may end the process over a nan, so none reaches it.
    x = jnp.where(jnp.isfinite(x), x, 0)
    if x.size == 0:
        wide = jnp.result_type(x.dtype, jnp.complex64)
        return [jnp.zeros(x.shape[:-1], wide), jnp.zeros(x.shape, wide)]
    return jax.lax.linalg.eig(x, compute_left_eigenvectors=False, compute_right_eigenvectors=vectors)


@lowering(aten.linalg_eig.default)
def linalg_eig(self: Array) -> tuple[Array, Array]:
    """Eigenvalues, and eigenvectors of length one up to their phase."""
    found, vectors = _eigen(self, "eig", vectors=True)
    return found, vectors


@lowering(aten._linalg_eigvals.default)
def private_linalg_eigvals(self: Array) -> Array:
    """Eigenvalues, where no gradient is asked for."""
    return _eigen(self, "eigvals", vectors=False)[0]


@lowering(aten.linalg_eigvals.default)
def linalg_eigvals(self: Array) -> Array:
    """Eigenvalues; its ``out=`` form is the one that arrives here."""
    return _eigen(self, "eigvals", vectors=False)[0]
