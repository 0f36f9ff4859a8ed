"""View ops as pure functions of arrays, for graphs: on the device views are torch's own and need no lowering.

A function takes the arguments of its op in order. ``aten.as_strided`` is not among them: it reads the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch._ops import OpOverload

from isthmus._graph.names import Missing, aten, prims
from isthmus._ops.common import Array, wrap_dim, wrap_dims
from isthmus._ops.tensors.reinterpret import reinterpret
from isthmus._runtime.dtypes import to_jax_dtype


def same(x: Array, *ignored: object) -> Array:
    """Return the array itself."""
    return x


def view(x: Array, size: Sequence[int]) -> Array:
    """Return the elements in another shape, one size of which may be -1."""
    return x.reshape(tuple(size))


def transpose(x: Array, dim0: int, dim1: int) -> Array:
    """Exchange two dims."""
    return jnp.swapaxes(x, wrap_dim(dim0, x.ndim), wrap_dim(dim1, x.ndim)) if x.ndim else x


def t(x: Array) -> Array:
    """Exchange the dims of a matrix."""
    return x.T


def permute(x: Array, dims: Sequence[int]) -> Array:
    """Put the dims in this order."""
    return x.transpose([wrap_dim(d, x.ndim) for d in dims])


def expand(x: Array, size: Sequence[int], implicit: bool = False) -> Array:
    """Repeat along dims of size one; -1 keeps a size."""
    missing = len(size) - x.ndim
    sizes = [x.shape[d - missing] if n == -1 else n for d, n in enumerate(size)]
    return jnp.broadcast_to(x, sizes)


def select(x: Array, dim: int, index: int) -> Array:
    """Return one position of a dim."""
    dim = wrap_dim(dim, x.ndim)
    return lax.index_in_dim(x, index % max(x.shape[dim], 1), dim, keepdims=False)


def slice_(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    """Return a range of a dim, cut to what there is as torch does."""
    dim = wrap_dim(dim, x.ndim)
    begin, stop, _ = slice(start, end).indices(x.shape[dim])
    return lax.slice_in_dim(x, begin, max(begin, stop), step, dim)


def squeeze(x: Array, dim: int | Sequence[int] | None = None) -> Array:
    """Drop dims of size one."""
    dims = range(x.ndim) if dim is None else wrap_dims(dim, x.ndim)
    return lax.squeeze(x, [d for d in dims if x.ndim and x.shape[d] == 1])


def unsqueeze(x: Array, dim: int) -> Array:
    """Add a dim of size one."""
    return jnp.expand_dims(x, dim)


def unbind(x: Array, dim: int = 0) -> list[Array]:
    """Return every position of a dim."""
    dim = wrap_dim(dim, x.ndim)
    return [lax.index_in_dim(x, n, dim, keepdims=False) for n in range(x.shape[dim])]


def split(x: Array, split_size: int, dim: int = 0) -> list[Array]:
    """Cut a dim into pieces of one size, the last of which may be shorter."""
    dim = wrap_dim(dim, x.ndim)
    length = x.shape[dim]
    starts = range(0, length, split_size) if length else [0]
    return [lax.slice_in_dim(x, start, min(start + split_size, length), 1, dim) for start in starts]


def split_with_sizes(x: Array, split_sizes: Sequence[int], dim: int = 0) -> list[Array]:
    """Cut a dim into pieces of these sizes."""
    dim = wrap_dim(dim, x.ndim)
    ends = np.cumsum(split_sizes).tolist()
    return [lax.slice_in_dim(x, end - n, end, 1, dim) for n, end in zip(split_sizes, ends, strict=True)]


def diagonal(x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """Return a diagonal of two dims, as the last dim."""
    return jnp.diagonal(x, offset, wrap_dim(dim1, x.ndim), wrap_dim(dim2, x.ndim))


def unfold(x: Array, dimension: int, size: int, step: int) -> Array:
    """Return the windows of a dim, their elements as the last dim."""
    if not x.ndim:
        return jnp.broadcast_to(x, (size,))
    dim = wrap_dim(dimension, x.ndim)
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=dim)
    return jnp.moveaxis(windows, dim + 1, -1)


def view_dtype(x: Array, dtype: torch.dtype) -> Array:
    """Return the bits as another dtype; the last dim grows or shrinks with the size of an element."""
    target = to_jax_dtype(dtype)
    if not x.ndim:
        return reinterpret(x, target).reshape(())
    last = x.shape[-1] * x.dtype.itemsize // target.itemsize
    return reinterpret(x, target).reshape(*x.shape[:-1], last)


def view_as_real(x: Array) -> Array:
    """Return real and imaginary parts as the last dim."""
    return jnp.stack([x.real, x.imag], axis=-1)


def view_as_complex(x: Array) -> Array:
    """Return the pairs of the last dim as complex numbers."""
    return lax.complex(x[..., 0], x[..., 1])


def broadcast_in_dim(x: Array, shape: Sequence[int], broadcast_dimensions: Sequence[int]) -> Array:
    """Repeat along new dims and dims of size one."""
    return lax.broadcast_in_dim(x, tuple(shape), tuple(broadcast_dimensions))


def collapse(x: Array, start: int, end: int) -> Array:
    """Join the dims from ``start`` to ``end``, both included."""
    return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :]) if x.ndim else x.reshape(1)


def split_dim(x: Array, dim: int, outer_length: int) -> Array:
    """Split one dim in two."""
    return x.reshape(*x.shape[:dim], outer_length, x.shape[dim] // outer_length, *x.shape[dim + 1 :])


_TABLE: dict[OpOverload | Missing, Callable[..., Array | list[Array]]] = {
    aten._conj.default: jnp.conj,
    aten._neg_view.default: jnp.negative,
    aten._reshape_alias.default: lambda x, size, stride: x.reshape(tuple(size)),
    aten._unsafe_view.default: view,
    aten.alias.default: same,
    aten.detach.default: same,
    aten.diagonal.default: diagonal,
    aten.expand.default: expand,
    aten.lift_fresh.default: same,
    aten.lift_fresh_copy.default: same,
    aten.permute.default: permute,
    aten.select.int: select,
    aten.slice.Tensor: slice_,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split_with_sizes,
    aten.squeeze.default: squeeze,
    aten.squeeze.dim: squeeze,
    aten.squeeze.dims: squeeze,
    aten.t.default: t,
    aten.transpose.int: transpose,
    aten.unbind.int: unbind,
    aten.unfold.default: unfold,
    aten.unsqueeze.default: unsqueeze,
    aten.view.default: view,
    aten.view.dtype: view_dtype,
    aten.view_as_complex.default: view_as_complex,
    aten.view_as_real.default: view_as_real,
    prims.broadcast_in_dim.default: broadcast_in_dim,
    prims.collapse_view.default: collapse,
    prims.split_dim.default: split_dim,
    prims.squeeze.default: squeeze,
    prims.transpose.default: permute,
}
VIEWS = {op: function for op, function in _TABLE.items() if not isinstance(op, Missing)}
