"""Indexing by masks and by tensors of the CPU: both become indices on the device before a program runs.

A mask picks as many elements as it has true ones, so its indices are found first and their number read. Where
one value is written through one mask nothing needs to be read: that is a ``masked_fill``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus._device.core.dispatch import kernel_for
from isthmus._graph.names import aten as _aten
from isthmus._graph.private import OpOverload
from isthmus._runtime.user_frames import warn_user

_MASKS = (torch.bool, torch.uint8)
_UINT8 = "indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead."
_nonzero = kernel_for(_aten.nonzero.default)


def _filling(op: OpOverload) -> Any:
    kernel = kernel_for(op)

    def masked_fill(self: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        """Write one value, which may be on the CPU, where the mask holds."""
        return kernel(self, mask, value if value.device.type == "jax" else value.to("jax"))

    return masked_fill


_masked_fill = _filling(_aten.masked_fill.Tensor)
_masked_fill_ = _filling(_aten.masked_fill_.Tensor)


def _plain(indices: Any) -> bool:
    """Return whether every index is already what a program takes."""
    return all(i is None or (i.dtype not in _MASKS and i.device.type == "jax") for i in indices)


def expanded(self: Tensor, indices: Any) -> list[Any]:
    """Return the indices with every mask replaced by the index tensors of its true elements."""
    # Before masks are expanded: each index covers at least one dim.
    if len(indices) > self.dim():
        raise IndexError(f"too many indices for tensor of dimension {self.dim()} (got {len(indices)})")
    expanded_indices: list[Any] = []
    for index in indices:
        if index is not None and index.device.type != "jax":
            index = index.to("jax")
        if index is None or index.dtype not in _MASKS:
            expanded_indices.append(index)
            continue
        # torch warns once per index.
        if index.dtype == torch.uint8:
            warn_user(UserWarning, _UINT8)
        # A mask covers as many dims as it has; its shape must be that of those dims.
        _check_mask(self, index, len(expanded_indices))
        expanded_indices += _nonzero(index).unbind(1)
    return expanded_indices


def _check_mask(self: Tensor, mask: Tensor, start: int) -> None:
    covered = list(self.shape[start : start + mask.dim()])
    for at, (n, m) in enumerate(zip(covered, mask.shape, strict=False)):
        if n != m:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {at} does not match the shape of the "
                f"indexed tensor {list(self.shape)} at index {start + at}"
            )
    if len(covered) < mask.dim():
        raise IndexError(f"too many indices for tensor of dimension {self.dim()}")


def _takes(self: Tensor, value: Tensor) -> bool:
    """Return whether a value is written as it is: of another dtype, torch takes one of the CPU for a number."""
    # torch takes a number on the CPU for a Python number, whatever its dtype.
    number = value.device.type == "cpu" and (self.is_complex() or not value.is_complex())
    return value.dtype == self.dtype or number


def _single_mask(self: Tensor, indices: Any, values: Tensor, accumulate: bool) -> Tensor | None:
    """Return the mask, shaped to broadcast over ``self``, if just one mask and one value are given."""
    present = [(first, i) for first, i in enumerate(indices) if i is not None]
    if len(present) != 1 or accumulate or values.numel() != 1 or not _takes(self, values):
        return None
    first, mask = present[0]
    # A mask without dims, or one that does not fit, is left to the general path and its errors.
    if (
        mask.dtype not in _MASKS
        or not mask.dim()
        or mask.device.type != "jax"
        or self.dim() < first + mask.dim()
    ):
        return None
    if mask.shape != self.shape[first : first + mask.dim()]:
        return None
    # Trailing dims of length one broadcast the mask over what it does not cover.
    return mask.reshape(mask.shape + (1,) * (self.dim() - first - mask.dim()))


def _reading(op: OpOverload) -> Any:
    kernel = kernel_for(op)

    def index(self: Tensor, indices: Any) -> Tensor:
        """Return the elements that indices and masks name."""
        return kernel(self, indices if _plain(indices) else expanded(self, indices))

    return index


def _writing(op: OpOverload, fill: Any) -> Any:
    kernel = kernel_for(op)

    def index_put(
        self: Tensor, indices: Any, values: Tensor, accumulate: bool = False, unsafe: bool = False
    ) -> Tensor:
        """Write values to the elements that indices and masks name."""
        more = (unsafe,) if unsafe else ()
        if _plain(indices):
            return kernel(self, indices, values, accumulate, *more)
        mask = _single_mask(self, indices, values, accumulate)
        if mask is not None:
            value = values.reshape(())
            return fill(self, mask, value if value.dtype == self.dtype else value.to("jax").to(self.dtype))
        return kernel(self, expanded(self, indices), values, accumulate, *more)

    return index_put


KERNELS = {
    "masked_fill.Tensor": _masked_fill,
    "masked_fill_.Tensor": _masked_fill_,
    "index.Tensor": _reading(_aten.index.Tensor),
    "index_put": _writing(_aten.index_put.default, _masked_fill),
    "index_put_": _writing(_aten.index_put_.default, _masked_fill_),
    "_index_put_impl_": _writing(_aten._index_put_impl_.default, _masked_fill_),
}
