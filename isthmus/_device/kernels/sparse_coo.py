"""Kernels of sparse COO tensors, in dense ops on indices and values.

torch's own read memory, which a "jax" tensor has none of (``sparse.py``). A kernel returns ``NotImplemented`` for calls
that it does not serve; the CPU then answers, or refuses in its words. Where the size of a result depends on values
(``coalesce``, the product of two sparse tensors) the size is read, as of ``unique``.

Most of them turn a column of indices into one number, its place in a contiguous tensor (``flat``), so that finding,
sorting and merging entries are ops on a vector of integers::

    indices [[0, 0, 2], [1, 1, 0]], size (3, 4)     flat -> [1, 1, 8]     unique -> [1, 8], rows added by ``add_rows``

What can go wrong: a product of sizes beyond an int64 has no places, so torch's own limit on ``numel`` applies; half
types are summed in float32, as the CPU does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus._device.kernels.factories import write_out

_aten = torch.ops.aten
DEFER = object()
"""Returned for a call that torch's own kernel is to run."""
HALF = frozenset({torch.float16, torch.bfloat16})


def make(indices: Tensor, values: Tensor, size: Any, coalesced: bool) -> Tensor:
    """Return a sparse tensor of these parts, unchecked."""
    sparse_dim = indices.shape[0]
    made: Tensor = _aten._sparse_coo_tensor_with_dims_and_tensors(
        sparse_dim, len(size) - sparse_dim, size, indices, values,
        dtype=values.dtype, layout=torch.sparse_coo, device=values.device,
    )  # fmt: skip
    # Marked as the caller says: torch would have to look at the indices.
    return made._coalesced_(coalesced)


def is_coo(value: Any) -> bool:
    """Return whether this is a sparse COO tensor of the device."""
    return value.layout is torch.sparse_coo and value.device.type == "jax"


def is_dense(value: Any) -> bool:
    """Return whether this is a dense tensor of the device."""
    return value.layout is torch.strided and value.device.type == "jax"


def flat(indices: Tensor, size: Any) -> Tensor:
    """Return one number for each column of ``indices``: its place in a contiguous tensor of this size."""
    # Strides of a contiguous tensor, over the sparse dims alone.
    strides = [1]
    for length in reversed(size[1 : indices.shape[0]]):
        strides.insert(0, strides[0] * max(length, 1))
    if not indices.shape[0]:
        return indices.new_zeros(indices.shape[1])
    place = indices[0] * strides[0]
    for row, stride in enumerate(strides[1:], 1):
        place = place + indices[row] * stride
    return place


def _unflattened(places: Tensor, size: Any) -> Tensor:
    """Return the columns of indices that ``flat`` made these numbers of."""
    rows: list[Tensor] = []
    for length in reversed(size):
        rows.insert(0, places % max(length, 1))
        places = places // max(length, 1)
    return torch.stack(rows) if rows else places.new_empty((0, *places.shape))


def add_rows(count: int, where: Tensor, rows: Tensor) -> Tensor:
    """Return ``count`` rows, each the sum of those that ``where`` sends to it; half types are summed in float32."""
    # Half types overflow in long sums, and booleans are added as integers.
    out = rows.to(
        torch.float32 if rows.dtype in HALF else torch.int32 if rows.dtype is torch.bool else rows.dtype
    )
    summed = out.new_zeros((count, *rows.shape[1:])).index_add_(0, where, out)
    return summed != 0 if rows.dtype is torch.bool else summed.to(rows.dtype)


def _coalesce(self: Tensor) -> Tensor:
    # None or one entry is coalesced as it is.
    if self._nnz() < 2:
        return self.clone()._coalesced_(True)
    indices, values, size = self._indices(), self._values(), self.shape
    places, back = torch.unique(flat(indices, size), return_inverse=True)
    return make(
        _unflattened(places, size[: indices.shape[0]]), add_rows(places.shape[0], back, values), size, True
    )


def _coalesced(self: Tensor) -> Tensor:
    return self if self.is_coalesced() else _coalesce(self)


def _written(out: Tensor, result: Tensor) -> Tensor:
    """Make a sparse ``out`` what ``result`` is, in its own dtype."""
    return _aten.copy_sparse_to_sparse_(out, result)  # type: ignore[no-any-return]


def _is_number(value: Any) -> bool:
    """Return whether torch handed on a number of the user's, which no kernel of torch's takes back from Python."""
    return not isinstance(value, Tensor)


def by_number(name: str) -> Any:
    """Return a product or quotient with a number; torch's kernel has those with tensors."""
    packet = name.split(".")[0]
    inplace, function = packet.endswith("_"), getattr(torch, packet.removesuffix("_"))

    def kernel(self: Tensor, other: Any, *, out: Tensor | None = None, **options: Any) -> Any:
        if not _is_number(other):
            return DEFER
        target = self if inplace else out
        # What is rounded is the value of an entry, not its parts.
        rounds = function is torch.floor_divide or options.get("rounding_mode") is not None
        entries = _coalesced(self) if rounds else self
        values = function(entries._values(), other, **options)
        result = make(entries._indices(), values, self.shape, entries.is_coalesced())
        if target is None:
            return result
        fits = is_coo(target) and torch.can_cast(values.dtype, target.dtype)
        # What cannot be cast the CPU refuses, in its words.
        return _written(target, result) if fits else NotImplemented

    return kernel


def _add_out(self: Tensor, other: Any, *, alpha: Any = 1, out: Tensor) -> Any:
    if _is_number(other) or self.shape != other.shape or not is_coo(other):
        return NotImplemented
    common = torch.result_type(self, other)
    # An ``out`` may not lose an imaginary part or a fraction.
    if not torch.can_cast(common, out.dtype) or isinstance(alpha, complex) > common.is_complex:
        return NotImplemented
    if isinstance(alpha, float) and not (common.is_floating_point or common.is_complex):
        return NotImplemented
    scaled = other._values().to(common) * alpha if alpha != 1 else other._values().to(common)
    if is_dense(self) and is_dense(out):
        return _add_to_dense(self, other, scaled, out)
    if not (is_coo(self) and is_coo(out)) or self.sparse_dim() != other.sparse_dim():
        return NotImplemented
    both = make(
        torch.cat([self._indices(), other._indices()], 1), torch.cat([self._values().to(common), scaled]),
        self.shape, False,
    )  # fmt: skip
    # Only two coalesced tensors make a coalesced sum.
    ordered = self.is_coalesced() and other.is_coalesced()
    return _written(out, _coalesce(both) if ordered else both)


def _add_to_dense(self: Tensor, other: Tensor, scaled: Tensor, out: Tensor) -> Tensor:
    if out.shape != self.shape:
        out.resize_(self.shape)
    if out is not self:
        out.copy_(self)
    if not other._nnz():
        return out
    indices = other._indices()
    # ``index_put_`` adds in the target's dtype, which is exact for wide floats and integers alone.
    exact = out.dtype == scaled.dtype and out.dtype not in HALF and out.dtype is not torch.bool
    if exact and indices.shape[0]:
        return out.index_put_(tuple(indices), scaled, accumulate=True)
    size = self.shape
    count = torch.Size(size[: indices.shape[0]]).numel()
    summed = add_rows(count, flat(indices, size), scaled).reshape(size)
    return out.copy_(out | summed if out.dtype is torch.bool else self.to(scaled.dtype) + summed)


def _mul_out(self: Any, other: Any, *, out: Tensor) -> Any:
    if _is_number(self) or _is_number(other):
        sparse, number = (other, self) if _is_number(self) else (self, other)
        return by_number("mul.out")(sparse, number, out=out)
    common = torch.result_type(self, other)
    if not is_coo(out) or not torch.can_cast(common, out.dtype):
        return NotImplemented
    if is_coo(self) and is_coo(other):
        if self.shape != other.shape or self.sparse_dim() != other.sparse_dim():
            return NotImplemented
        return _written(out, _common_entries(_coalesced(self), _coalesced(other)))
    sparse, dense = (self, other) if is_coo(self) else (other, self)
    if not is_coo(sparse) or dense.layout is not torch.strided or dense.dim() > sparse.dim():
        return NotImplemented
    if torch.broadcast_shapes(sparse.shape, dense.shape) != sparse.shape:
        return NotImplemented
    if dense.device.type != "jax" and dense.dim():
        return NotImplemented
    # The dense factor at the entries of the sparse one.
    factor = dense if not dense.dim() else dense.expand(sparse.shape)[tuple(sparse._indices())]
    return _written(
        out, make(sparse._indices(), sparse._values() * factor, sparse.shape, sparse.is_coalesced())
    )


def _common_entries(self: Tensor, other: Tensor) -> Tensor:
    """Return the products of the values that both of two coalesced tensors have."""
    if not self._nnz() or not other._nnz():
        return make(self._indices()[:, :0], self._values()[:0] * other._values()[:0], self.shape, True)
    where, is_there = _places_in(self._indices(), other)
    both = is_there.nonzero().squeeze(1)
    values = self._values()[both] * other._values()[where[both]]
    return make(self._indices()[:, both], values, self.shape, True)


def _places_in(indices: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each column of ``indices`` its position in a coalesced tensor with entries, and if it is there."""
    sought, known = flat(indices, other.shape), flat(other._indices(), other.shape)
    # Clamped: a number past the last one is compared below, and is not there.
    where = torch.searchsorted(known, sought).clamp(max=known.shape[0] - 1)
    return where, known[where] == sought


def _sparse_mask(self: Tensor, mask: Tensor) -> Any:
    if self.shape != mask.shape or not is_coo(mask):
        return NotImplemented
    if self is mask:
        return self
    indices = mask._indices()
    if is_dense(self):
        # Without sparse dims every entry is as large as the tensor.
        values = self[tuple(indices)] if indices.shape[0] else self.expand(mask._nnz(), *self.shape)
        return make(indices.clone(), values.clone(), mask.shape, mask.is_coalesced())
    if not is_coo(self) or self.sparse_dim() != mask.sparse_dim():
        return NotImplemented
    return make(indices.clone(), _values_at(indices, _coalesced(self)), mask.shape, mask.is_coalesced())


def _values_at(indices: Tensor, known: Tensor) -> Tensor:
    """Return the value that a coalesced tensor has at each column of ``indices``, zero where it has none."""
    if not known._nnz() or not indices.shape[1]:
        return known._values().new_zeros((indices.shape[1], *known._values().shape[1:]))
    where, is_there = _places_in(indices, known)
    values = known._values()[where]
    return torch.where(is_there.reshape(-1, *(1,) * (values.dim() - 1)), values, values.new_zeros(()))


def _sparse_mask_projection(self: Tensor, mask: Tensor, accumulate_matches: bool = False) -> Any:
    """Return the entries of ``self`` that ``mask`` has too, others as zeros: what ``sparse_mask`` hands back."""
    if not (is_coo(self) and is_coo(mask)) or self.shape != mask.shape:
        return NotImplemented
    if accumulate_matches and not mask.is_coalesced():
        return NotImplemented
    if self.sparse_dim() != mask.sparse_dim() or self.dtype != mask.dtype:
        return NotImplemented
    if not self._nnz() or not mask._nnz():
        return torch.zeros_like(self)
    _, is_there = _places_in(self._indices(), _coalesced(mask))
    values = self._values()
    values_there = torch.where(is_there.reshape(-1, *(1,) * (values.dim() - 1)), values, values.new_zeros(()))
    return make(self._indices().clone(), values_there, self.shape, self.is_coalesced())


def _sum_backward(grad: Tensor, self: Tensor, dim: Any) -> Any:
    """Return the gradient of ``torch.sparse.sum`` over dims: that of the sum at the entries of what was summed."""
    sparse_dim, count = self.sparse_dim(), self.dim()
    dims = [d % count for d in dim]
    remaining = [d for d in range(sparse_dim) if d not in dims]
    if not is_coo(self) or grad.device != self.device:
        return NotImplemented
    values = self._values()
    # The dims of values that were summed come back as ones.
    shape = [1 if d in dims else self.shape[d] for d in range(sparse_dim, count)]
    if not remaining:
        gradients = grad.to_dense().reshape(1, *shape).expand(values.shape)
    elif is_coo(grad):
        gradients = _values_at(self._indices()[remaining], _coalesced(grad))
        gradients = gradients.reshape(self._nnz(), *shape).expand(values.shape)
    else:
        return NotImplemented
    return make(self._indices().clone(), gradients.clone(), self.shape, self.is_coalesced())


def product(rows: Tensor, columns: Tensor, values: Tensor, dense: Tensor, count: int) -> Tensor:
    """Return the product of a matrix of ``count`` rows, given by its entries, with a dense one."""
    wide = torch.float32 if values.dtype in HALF else values.dtype
    terms = values.to(wide).unsqueeze(1) * dense.index_select(0, columns).to(wide)
    return add_rows(count, rows, terms)


def combined(self: Tensor, product: Tensor, beta: Any, alpha: Any) -> Any:
    """Return ``beta * self + alpha * product`` in the dtype of ``self``; what 0 multiplies is not looked at."""
    # What 0 multiplies may be nan or infinite, so it is not even computed.
    product = product if alpha == 1 else product * alpha
    if beta != 0:
        product = product + (self if beta == 1 else self * beta)
    return product.to(self.dtype)


def _serves(self: Tensor, mat1: Tensor, mat2: Tensor, beta: Any, alpha: Any) -> bool:
    matrices = (
        is_coo(mat1) and mat1.sparse_dim() == 2 and mat1.dim() == 2 and is_dense(mat2) and mat2.dim() == 2
    )
    if not matrices or not is_dense(self) or mat1.shape[1] != mat2.shape[0] or self.dtype is torch.bool:
        return False
    size = (mat1.shape[0], mat2.shape[1])
    fits = self.dim() <= 2 and torch.broadcast_shapes(self.shape, size) == size
    whole = not (self.is_floating_point() or self.is_complex())
    exact = not (whole and (isinstance(beta, float) or isinstance(alpha, float)))
    return fits and exact and self.dtype == mat1.dtype == mat2.dtype


def _addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if not _serves(self, mat1, mat2, beta, alpha):
        return NotImplemented
    rows, columns = mat1._indices()
    values = mat1._values().to(torch.float32 if mat1.dtype in HALF else mat1.dtype)
    result = product(rows, columns, values, mat2, mat1.shape[0])
    return combined(self.expand(result.shape), result, beta, alpha)


def _addmm_(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    result = _addmm(self, mat1, mat2, beta=beta, alpha=alpha)
    return result if result is NotImplemented or result.shape != self.shape else self.copy_(result)


def _addmm_out(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Any:
    result = _addmm(self, mat1, mat2, beta=beta, alpha=alpha)
    if result is NotImplemented or not is_dense(out) or out.dtype != result.dtype:
        return NotImplemented
    return write_out(out, result)


def _bmm(self: Tensor, mat2: Tensor) -> Any:
    if not (is_coo(self) and is_dense(mat2) and self.sparse_dim() == 3 and mat2.dim() == 3):
        return NotImplemented
    # Batches one below another: one product of tall matrices.
    batch, count, inner = self.shape
    if mat2.shape[:2] != (batch, inner) or self.dtype != mat2.dtype or self.dtype is torch.bool:
        return NotImplemented
    where, rows, columns = self._indices()
    flat_rows = mat2.reshape(batch * inner, mat2.shape[2])
    result = product(where * count + rows, where * inner + columns, self._values(), flat_rows, batch * count)
    return result.reshape(batch, count, mat2.shape[2])


def _bmm_out(self: Tensor, mat2: Tensor, *, out: Tensor) -> Any:
    result = _bmm(self, mat2)
    if result is NotImplemented or not is_dense(out) or out.dtype != result.dtype:
        return NotImplemented
    return write_out(out, result)


def _sparse_sparse_matmul(self: Tensor, other: Tensor) -> Any:
    plain = all(is_coo(t) and t.dim() == t.sparse_dim() == 2 for t in (self, other))
    if not plain or self.shape[1] != other.shape[0] or self.dtype != other.dtype or self.dtype is torch.bool:
        return NotImplemented
    size = (self.shape[0], other.shape[1])
    left, right = _coalesced(self), _coalesced(other)
    # Of each entry of the left matrix: its row, and the row of the right one that it meets.
    rows, inner = left._indices()
    starts = torch.searchsorted(
        right._indices()[0].contiguous(), torch.arange(other.shape[0] + 1, device=self.device)
    )
    counts = starts[inner + 1] - starts[inner]
    # One term for each entry of the left matrix and each entry of the row of the right one that it meets.
    term, met = _joined(starts[inner], counts)
    wide = torch.float32 if self.dtype in HALF else self.dtype
    values = left._values()[term].to(wide) * right._values()[met].to(wide)
    terms = _coalesce(make(torch.stack([rows[term], right._indices()[1][met]]), values, size, False))
    return make(terms._indices(), terms._values().to(self.dtype), size, True)


def _index_select(self: Tensor, dim: int, index: Tensor) -> Any:
    if not is_coo(self) or not is_dense(index) or index.dim() != 1 or not -self.dim() <= dim < self.dim():
        return NotImplemented
    dim, sparse_dim, chosen = dim % self.dim(), self.sparse_dim(), index.shape[0]
    size = (*self.shape[:dim], chosen, *self.shape[dim + 1 :])
    indices, values = self._indices(), self._values()
    if dim >= sparse_dim:
        values = values.index_select(dim - sparse_dim + 1, index)
        return make(indices.clone(), values, size, self.is_coalesced())
    # Indices out of range are the CPU's to refuse; here they would pick nothing.
    if chosen and not bool(((index >= 0) & (index < self.shape[dim])).all()):
        return NotImplemented
    coordinate, order = indices[dim].sort(stable=True)
    starts = torch.searchsorted(coordinate, index.to(coordinate.dtype))
    counts = torch.searchsorted(coordinate, index.to(coordinate.dtype), right=True) - starts
    term, met = _joined(starts, counts)
    chosen_indices = indices[:, order[met]]
    chosen_indices[dim] = term
    values = values[order[met]]
    # Other dims were in order before; now only the picked one decides.
    if self.is_coalesced() and dim:
        places = flat(chosen_indices, size).argsort()
        chosen_indices, values = chosen_indices[:, places], values[places]
    return make(chosen_indices, values, size, self.is_coalesced() or chosen_indices.shape[1] < 2)


def _joined(starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each position of each of these ranges the number of its range, and the position."""
    term = torch.repeat_interleave(counts)
    within = torch.arange(term.shape[0], device=counts.device) - (counts.cumsum(0) - counts)[term]
    return term, starts[term] + within


KERNELS = {
    **{
        name: by_number(name)
        for name in (
            *(
                "mul.Tensor",
                "mul_.Tensor",
                "div.Tensor",
                "div_.Tensor",
                "div.Tensor_mode",
                "div_.Tensor_mode",
            ),
            *("floor_divide", "floor_divide_.Tensor", "div.out", "div.out_mode", "floor_divide.out"),
        )
    },
    "_coalesce": _coalesce,
    "_sparse_sparse_matmul": _sparse_sparse_matmul,
    "_sparse_mask_projection": _sparse_mask_projection,
    "_sparse_sum_backward": _sum_backward,
    "add.out": _add_out,
    "addmm": _addmm,
    "addmm_": _addmm_,
    "addmm.out": _addmm_out,
    "bmm": _bmm,
    "bmm.out": _bmm_out,
    "index_select": _index_select,
    "mul.out": _mul_out,
    "sparse_mask": _sparse_mask,
}
