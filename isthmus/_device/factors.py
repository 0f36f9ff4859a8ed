"""Determinants keep LU factors for their gradient: of the transpose where the matrix is contiguous.

torch's formulas look at the strides of the matrix to know which of the two was factored, and a lowering does
not see strides, so the choice is made here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus._device.conjugate import resolving
from isthmus._device.dispatch import kernel_for

_aten = torch.ops.aten
_det, _slogdet = (
    resolving(op, kernel_for(op)) for op in (_aten._linalg_det.default, _aten._linalg_slogdet.default)
)


def _transposes(A: Tensor) -> bool:
    square = A.dim() >= 2 and A.size(-1) == A.size(-2)
    return square and A.is_floating_point() and A.is_contiguous()


def linalg_det(A: Tensor) -> Any:
    """Run the determinant on the matrix torch would factor."""
    return _det(A.mT if _transposes(A) else A)


def linalg_slogdet(A: Tensor) -> Any:
    """Run the determinant's logarithm on the matrix torch would factor."""
    return _slogdet(A.mT if _transposes(A) else A)


KERNELS = {
    "_linalg_det": linalg_det,
    "_linalg_slogdet": linalg_slogdet,
}
