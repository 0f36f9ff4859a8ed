"""Factorizations whose results depend on what a lowering does not see: strides, and the size a rank decides.

Determinants keep LU factors for their gradient: of the transpose where the matrix is contiguous. torch's
formulas look at the strides of the matrix to know which of the two was factored, so the choice is made here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus._device.checks import ask_cpu
from isthmus._device.core.dispatch import kernel_for
from isthmus._device.kernels.conjugate import resolving
from isthmus._device.kernels.factories import write_out
from isthmus._graph.names import aten as _aten
from isthmus._graph.schema import schema_of

_det, _slogdet, _lstsq = (
    resolving(op, kernel_for(op))
    for op in (_aten._linalg_det.default, _aten._linalg_slogdet.default, _aten.linalg_lstsq.default)
)


def _transposes(A: Tensor) -> bool:
    # torch factors the transpose of a contiguous matrix, whose columns then lie one after another.
    square = A.dim() >= 2 and A.size(-1) == A.size(-2)
    return square and A.is_floating_point() and A.is_contiguous()


def linalg_det(A: Tensor) -> Any:
    """Run the determinant on the matrix torch would factor."""
    return _det(A.mT if _transposes(A) else A)


def linalg_slogdet(A: Tensor) -> Any:
    """Run the determinant's logarithm on the matrix torch would factor."""
    return _slogdet(A.mT if _transposes(A) else A)


def _tall(A: Tensor, b: Tensor, driver: str | None) -> bool:
    """Return whether this is a sound call whose residuals are there only if the matrix has full rank."""
    # A vector, or a batch of them, on the right.
    fits = 0 <= A.dim() - b.dim() <= 1 and A.dtype == b.dtype and (A.is_floating_point() or A.is_complex())
    if A.dim() > b.dim() > 1 and b.shape != A.shape[:-1]:
        return False  # torch takes b for a matrix there
    return driver in ("gelsd", "gelss") and A.dim() >= 2 and fits and A.size(-2) > A.size(-1)


def linalg_lstsq(A: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """Solve least squares; of a tall matrix ``gelsd`` and ``gelss`` give residuals unless its rank is too small."""
    if not _tall(A, b, driver):
        return _lstsq(A, b, rcond, driver=driver)
    target = b.unsqueeze(-1) if A.dim() > b.dim() else b
    # R has the solutions and the singular values of the whole matrix, which sets the tolerance.
    tolerance = torch.finfo(A.dtype).eps * A.size(-2) if rcond is None else rcond
    # The QR product leaves a small triangle, whose rank is the matrix's.
    Q, R = torch.linalg.qr(A)
    solution, _, rank, values = _lstsq(R, Q.mH @ target, tolerance, driver=driver)
    # One read of the device: the residuals have a size of their own.
    if (rank == A.size(-1)).all():
        residuals = (target - A @ solution).abs().square().sum(-2)
    else:
        residuals = torch.empty(0, dtype=values.dtype, device=A.device)
    return solution.squeeze(-1) if target is not b else solution, residuals, rank, values


def linalg_lstsq_out(
    A: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None, **targets: Tensor
) -> Any:
    """Solve least squares into ``solution``, ``residuals``, ``rank`` and ``singular_values``."""
    op = _aten.linalg_lstsq.out
    ask_cpu.check(op, schema_of(op).ordered((A, b, rcond), {"driver": driver, **targets}))
    results = linalg_lstsq(A, b, rcond, driver=driver)
    return tuple(write_out(target, value) for target, value in zip(targets.values(), results, strict=True))


KERNELS = {
    "_linalg_det": linalg_det,
    "_linalg_slogdet": linalg_slogdet,
    "linalg_lstsq": linalg_lstsq,
    "linalg_lstsq.out": linalg_lstsq_out,
}
