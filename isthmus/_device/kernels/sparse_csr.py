"""Kernels of sparse CSR and CSC tensors, in dense ops on their parts; ``sparse.py`` says when these are asked.

A compressed matrix says where each row (CSR) or column (CSC) begins among its entries. Kernels that go through entries
turn that into a row and a column for each (``entries``), as COO tensors have, and share their products and sums
(``sparse_coo.py``); kernels of values alone keep the pattern (``_like``)::

    crow_indices [0, 2, 2, 3], col_indices [0, 3, 1]     entries: rows [0, 0, 2], columns [0, 3, 1]

A kernel returns ``NotImplemented`` for a call it does not serve, and the CPU answers or refuses. Batches and blocks
(BSR, BSC) go that way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus._device.kernels.factories import write_out
from isthmus._device.kernels.sparse_coo import DEFER, HALF, add_rows, combined, is_dense, make, product

_aten = torch.ops.aten
_ROWS_AND_COLUMNS = (torch.sparse_csr, torch.sparse_csc)


def is_matrix(value: Tensor) -> bool:
    """Return whether this is one CSR or CSC matrix of numbers, on the device."""
    return value.layout in _ROWS_AND_COLUMNS and value.device.type == "jax" and value.dim() == 2


def entries(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row, the column and the value of each entry."""
    values = matrix.values()
    if matrix.layout is torch.sparse_csr:
        # Compressed indices say where each row begins; COO has the row of every entry.
        both = _aten._convert_indices_from_csr_to_coo(matrix.crow_indices(), matrix.col_indices())
        return both[0], both[1], values
    both = _aten._convert_indices_from_csr_to_coo(matrix.ccol_indices(), matrix.row_indices())
    return both[1], both[0], values


def _like(matrix: Tensor, values: Tensor) -> Tensor:
    """Return a tensor with the pattern of this one, of any compressed layout."""
    by_rows = matrix.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed = matrix.crow_indices() if by_rows else matrix.ccol_indices()
    plain = matrix.col_indices() if by_rows else matrix.row_indices()
    made: Tensor = _aten._sparse_compressed_tensor_unsafe(
        compressed,
        plain,
        values,
        matrix.shape,
        dtype=values.dtype,
        layout=matrix.layout,
        device=values.device,
    )
    return made


def _written(out: Tensor, result: Tensor) -> Tensor:
    # Resized first: the target may have another number of entries.
    return out.resize_as_sparse_(result).copy_(result)


def _add_out(self: Tensor, other: Any, *, alpha: Any = 1, out: Tensor) -> Any:
    if (
        not isinstance(other, Tensor)
        or self.shape != other.shape
        or not is_matrix(other)
        or other.values().dim() != 1
    ):
        return NotImplemented
    common = torch.result_type(self, other)
    inexact = common.is_floating_point or common.is_complex
    if not torch.can_cast(common, out.dtype) or (isinstance(alpha, float) and not inexact):
        return NotImplemented
    if isinstance(alpha, complex) and not common.is_complex:
        return NotImplemented
    if is_dense(self) and is_dense(out):
        rows, columns, values = entries(other)
        summed = add_rows(self.numel(), rows * self.shape[1] + columns, values.to(common) * alpha)
        result = self.to(common) + summed.reshape(self.shape)
        return write_out(out, result)
    same = is_matrix(self) and self.layout is other.layout is out.layout is torch.sparse_csr
    if not same or self.values().dim() != 1:
        return NotImplemented
    # In COO form: conversions keep the order of entries that coalescing makes.
    summed = torch.add(self.to_sparse(), other.to_sparse(), alpha=alpha).coalesce()
    return _written(out, summed.to_sparse(layout=self.layout).to(out.dtype))


def _serves(self: Tensor, mat1: Tensor, mat2: Tensor, beta: Any, alpha: Any) -> bool:
    one = (is_matrix(mat1) and is_dense(mat2)) or (is_dense(mat1) and is_matrix(mat2))
    if not one or not is_dense(self) or mat2.dim() != 2 or mat1.dim() != 2 or mat1.shape[1] != mat2.shape[0]:
        return False
    size = (mat1.shape[0], mat2.shape[1])
    fits = self.dim() <= 2 and torch.broadcast_shapes(self.shape, size) == size
    whole = not (self.is_floating_point() or self.is_complex())
    exact = not (whole and (isinstance(beta, float) or isinstance(alpha, float)))
    return fits and exact and self.dtype == mat1.dtype == mat2.dtype and self.dtype is not torch.bool


def _sparse_addmm(self: Tensor, mat1: Tensor, mat2: Tensor, beta: Any, alpha: Any, out: Tensor) -> Any:
    """Return the product of two sparse matrices, added to a third where ``beta`` is not 0."""
    same = self.dtype == mat1.dtype == mat2.dtype == out.dtype and out.layout is torch.sparse_csr
    if not same or mat1.shape[1] != mat2.shape[0] or not self.is_floating_point():
        return NotImplemented
    result = _aten._sparse_sparse_matmul(mat1.to_sparse(), mat2.to_sparse())
    result = result if alpha == 1 else result * alpha
    if beta != 0:
        if not is_matrix(self) or self.shape != result.shape:
            return NotImplemented
        result = (result + self.to_sparse() * beta).coalesce()
    return _written(out, result.to_sparse_csr())


def _addmm_out(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Any:
    if is_matrix(mat1) and is_matrix(mat2):
        return _sparse_addmm(self, mat1, mat2, beta, alpha, out)
    if not _serves(self, mat1, mat2, beta, alpha) or not is_dense(out) or out.dtype != self.dtype:
        return NotImplemented
    if is_matrix(mat1):
        rows, columns, values = entries(mat1)
        result = product(rows, columns, values, mat2, mat1.shape[0])
    else:
        rows, columns, values = entries(mat2)
        result = product(columns, rows, values, mat1.t(), mat2.shape[1]).t()
    return write_out(out, combined(self.expand(result.shape), result, beta, alpha))


def _addmv_out(self: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor) -> Any:
    if vec.dim() != 1 or self.dim() != 1 or not is_dense(vec) or not is_dense(self) or not is_dense(out):
        return NotImplemented
    column = self.unsqueeze(1)
    if not _serves(column, mat, vec.unsqueeze(1), beta, alpha) or out.dtype != self.dtype:
        return NotImplemented
    result = product(*entries(mat), vec.unsqueeze(1), mat.shape[0]).squeeze(1)
    return write_out(out, combined(self.expand(result.shape), result, beta, alpha))


def _sampled(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    plain = self.layout is torch.sparse_csr and is_matrix(self) and is_dense(mat1) and is_dense(mat2)
    if not plain or mat1.dim() != 2 or mat2.dim() != 2 or mat1.shape[1] != mat2.shape[0]:
        return NotImplemented
    same = self.dtype == mat1.dtype == mat2.dtype and (self.is_floating_point() or self.is_complex())
    if not same or self.shape != (mat1.shape[0], mat2.shape[1]):
        return NotImplemented
    rows, columns, values = entries(self)
    # Only the products at the entries of the pattern are computed.
    sampled = (mat1.index_select(0, rows) * mat2.t().index_select(0, columns)).sum(1)
    return _like(self, combined(values, sampled, beta, alpha))


def _sampled_out(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Any:
    product = _sampled(self, mat1, mat2, beta=beta, alpha=alpha)
    return (
        product if product is NotImplemented or out.layout is not torch.sparse_csr else _written(out, product)
    )


def _mm_reduce(self: Tensor, other: Tensor, reduce: str) -> Any:
    """Return for each row of a matrix the rows of ``other`` that its entries take, reduced; torch.sparse.mm(reduce=).

    The second result says for "amax" and "amin" which entry each number is of, where a gradient will ask.
    """
    plain = self.layout is torch.sparse_csr and is_matrix(self) and is_dense(other) and other.dim() == 2
    if not plain or self.shape[1] != other.shape[0] or self.values().dim() != 1:
        return NotImplemented
    if self.dtype != other.dtype or not self.is_floating_point() or reduce not in _REDUCTIONS:
        return NotImplemented
    rows, columns, values = entries(self)
    wide = torch.float32 if other.dtype in HALF else other.dtype
    nowhere = columns.new_empty(0)
    if reduce in ("sum", "mean"):
        out = product(rows, columns, values.to(wide), other.to(wide), self.shape[0])
        return (out / _lengths(self, wide) if reduce == "mean" else out).to(other.dtype), nowhere
    terms = (values.to(wide).unsqueeze(1) * other.index_select(0, columns).to(wide)).to(other.dtype)
    out = other.new_zeros(self.shape[0], other.shape[1])
    out = _by_row(out, rows, terms, reduce, include_self=False)
    if not values.numel() or not (torch.is_grad_enabled() and (self.requires_grad or other.requires_grad)):
        return out, nowhere
    # As on the CPU: the first of equal entries, the last of those that are nan, and for an empty row the number of
    # all entries, which is none's.
    count = values.shape[0]
    each = torch.arange(count, device=out.device).unsqueeze(1).expand_as(terms)
    best = torch.where(terms == out.index_select(0, rows), each, count)
    first = _by_row(torch.full_like(out, count, dtype=torch.int64), rows, best, "amin")
    nans = torch.where(terms.isnan(), each, -1)
    last_nan = _by_row(torch.full_like(out, -1, dtype=torch.int64), rows, nans, "amax")
    return out, torch.where(last_nan < 0, first, last_nan)


_REDUCTIONS = ("sum", "mean", "amax", "amin")


def _by_row(out: Tensor, rows: Tensor, terms: Tensor, reduce: str, include_self: bool = True) -> Tensor:
    """Return ``out`` with each row of ``terms`` reduced into the row of that number."""
    where = rows.unsqueeze(1).expand_as(terms)
    return out.scatter_reduce(0, where, terms, reduce, include_self=include_self)


def _lengths(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how many entries each row has, at least 1, as a column."""
    return matrix.crow_indices().diff().clamp(min=1).unsqueeze(1).to(dtype)


def _mm_reduce_backward(
    self: Tensor, grad_out: Tensor, weight: Tensor, reduce: str, arg_out: Tensor, output_mask: list[bool]
) -> Any:
    """Return the gradients of the matrix, in its pattern, and of what it was multiplied with."""
    if not is_dense(grad_out) or not is_dense(weight):
        return NotImplemented
    rows, columns, values = entries(self)
    wide = torch.float32 if weight.dtype in HALF else weight.dtype
    above = grad_out.to(wide)
    above = (above / _lengths(self, wide) if reduce == "mean" else above).index_select(0, rows)
    for_values = above * weight.index_select(0, columns).to(wide)
    for_weight = above * values.to(wide).unsqueeze(1)
    if arg_out.numel():
        each = torch.arange(values.shape[0], device=values.device).unsqueeze(1)
        # Chosen after the products: a number that was not taken may be infinite.
        taken = arg_out.index_select(0, rows) == each
        for_values, for_weight = (torch.where(taken, part, 0) for part in (for_values, for_weight))
    grad_self = _like(self, for_values.sum(1).to(values.dtype)) if output_mask[0] else None
    grad_weight = add_rows(weight.shape[0], columns, for_weight).to(weight.dtype) if output_mask[1] else None
    return grad_self, grad_weight


def _sum(self: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if (
        not keepdim
        or self.layout is not torch.sparse_csr
        or not is_matrix(self)
        # The CPU has the other cases.
        or not self._nnz()
        or not len(dim)
    ):
        return NotImplemented
    dims = [d % 2 for d in dim]
    whole = not (self.is_floating_point() or self.is_complex())
    dtype = dtype or (torch.int64 if whole else self.dtype)
    indices = [part.new_zeros(part.shape) if d in dims else part for d, part in enumerate(entries(self)[:2])]
    size = [1 if d in dims else n for d, n in enumerate(self.shape)]
    return make(torch.stack(indices), self.values().to(dtype), size, False).coalesce().to_sparse_csr()


def _times(self: Tensor, other: Any) -> Any:
    return DEFER if isinstance(other, Tensor) else _like(self, self.values() * other)


def _times_(self: Tensor, other: Any) -> Any:
    if isinstance(other, Tensor):
        return DEFER
    self.values().mul_(other)
    return self


def _turned(layout: torch.layout) -> Any:
    """Return the conversion to CSR or CSC of a matrix in the other of the two; the rest torch's kernel can do."""

    def kernel(self: Tensor, dense_dim: int | None = None) -> Any:
        # Blocks and batches are torch's own conversion.
        if not is_matrix(self) or self.layout is layout or self.values().dim() != 1 or dense_dim:
            return DEFER
        rows, columns, values = entries(self)
        outer, inner = (rows, columns) if layout is torch.sparse_csr else (columns, rows)
        # Entries are sorted by the old outer index, which is the new inner one, so that a stable sort keeps it.
        outer, order = outer.sort(stable=True)
        count = self.shape[0 if layout is torch.sparse_csr else 1]
        made: Tensor = _aten._sparse_compressed_tensor_unsafe(
            _aten._convert_indices_from_coo_to_csr(outer, count), inner[order], values[order], self.shape,
            dtype=values.dtype, layout=layout, device=values.device,
        )  # fmt: skip
        return made

    return kernel


def _to_blocks(self: Tensor, blocksize: Any, dense_dim: int | None = None) -> Any:
    if self.layout is not torch.sparse_csc:
        return DEFER
    return self.to_sparse_csr().to_sparse_bsr(blocksize, dense_dim)


KERNELS = {
    "_to_sparse_bsr": _to_blocks,
    "_to_sparse_csc": _turned(torch.sparse_csc),
    "_to_sparse_csr": _turned(torch.sparse_csr),
    "mul.Tensor": _times,
    "mul_.Tensor": _times_,
    "_sparse_csr_sum.dim_dtype": _sum,
    "add.out": _add_out,
    "addmm.out": _addmm_out,
    "addmv.out": _addmv_out,
    "sparse_sampled_addmm": _sampled,
    "_sparse_mm_reduce_impl": _mm_reduce,
    "_sparse_mm_reduce_impl_backward": _mm_reduce_backward,
    "sparse_sampled_addmm.out": _sampled_out,
}
