"""View ops as pure functions of arrays, for graphs: on the device views are torch's own and need no lowering.

A function takes the arguments of its op in order. ``aten.as_strided`` is not among them: it reads the storage.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.typing import DTypeLike

from isthmus._graph.arguments import AnyFunction
from isthmus._graph.names import Missing, aten, prims
from isthmus._graph.private import Op
from isthmus._ops.common import Array, DType, wrap_dim, wrap_dims
from isthmus._ops.value_checks import require
from isthmus._runtime.dtypes import to_jax_dtype


def same(x: Array, *ignored: object) -> Array:
    """Return the array itself."""
    return x


def transpose(x: Array, dim0: int, dim1: int) -> Array:
    """Exchange two dims."""
    return jnp.swapaxes(x, wrap_dim(dim0, x.ndim), wrap_dim(dim1, x.ndim)) if x.ndim else x


def permute(x: Array, dims: Sequence[int]) -> Array:
    """Put the dims in this order."""
    return x.transpose([wrap_dim(d, x.ndim) for d in dims])


def expand(x: Array, size: Sequence[int], implicit: bool = False) -> Array:
    """Repeat along dims of size one; -1 keeps a size."""
    missing = len(size) - x.ndim
    sizes = [x.shape[d - missing] if n == -1 else n for d, n in enumerate(size)]
    return jnp.broadcast_to(x, sizes)


def select(x: Array, dim: int, index: int | Array) -> Array:
    """Return one position of a dim; its index may be computed, where a loop counts."""
    dim = wrap_dim(dim, x.ndim)
    count = x.shape[dim]
    if isinstance(index, Array):
        index = index.reshape(())
        require((index >= -count) & (index < count), IndexError, "select(): index out of range")
        return lax.dynamic_index_in_dim(x, jnp.where(index < 0, index + count, index), dim, keepdims=False)
    at = index + count if isinstance(index, int) and index < 0 else index
    return lax.squeeze(lax.slice_in_dim(x, at, at + 1, 1, dim), [dim])


def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    """Return a range of a dim, cut to what there is as torch does."""
    dim = wrap_dim(dim, x.ndim)
    length = x.shape[dim]
    begin = _within(0 if start is None else start, length)
    stop = _within(length if end is None else end, length)
    return lax.slice_in_dim(x, begin, jax.core.max_dim(begin, stop), step, dim)


def _within(index: int, length: int) -> int:
    """Return an index counted from the front and cut to a length; each may be a dimension of an exported program."""
    if isinstance(index, int) and index < 0:
        return jax.core.max_dim(length + index, 0)
    # The end that stands for "all" is too large for JAX to compare with a dimension.
    return length if isinstance(index, int) and index >= sys.maxsize else jax.core.min_dim(index, length)


def squeeze(x: Array, dim: int | Sequence[int] | None = None) -> Array:
    """Drop dims of size one."""
    dims = range(x.ndim) if dim is None else wrap_dims(dim, x.ndim)
    return lax.squeeze(x, [d for d in dims if x.ndim and x.shape[d] == 1])


def unbind(x: Array, dim: int = 0) -> list[Array]:
    """Return every position of a dim."""
    dim = wrap_dim(dim, x.ndim)
    return [lax.index_in_dim(x, n, dim, keepdims=False) for n in range(x.shape[dim])]


def split(x: Array, split_size: int, dim: int = 0) -> list[Array]:
    """Cut a dim into pieces of one size, the last of which may be shorter."""
    dim = wrap_dim(dim, x.ndim)
    length = x.shape[dim]
    # Sizes that vary have a quotient that is a number where they are multiples of one another.
    count = operator.index(-(-length // split_size)) if length else 1
    starts = [n * split_size for n in range(count)]
    ends = [*starts[1:], length]
    return [lax.slice_in_dim(x, start, end, 1, dim) for start, end in zip(starts, ends, strict=True)]


def split_with_sizes(x: Array, split_sizes: Sequence[int], dim: int = 0) -> list[Array]:
    """Cut a dim into pieces of these sizes."""
    dim = wrap_dim(dim, x.ndim)
    ends = np.cumsum(split_sizes).tolist()
    return [lax.slice_in_dim(x, end - n, end, 1, dim) for n, end in zip(split_sizes, ends, strict=True)]


def unfold(x: Array, dimension: int, size: int, step: int) -> Array:
    """Return the windows of a dim, their elements as the last dim."""
    if not x.ndim:
        return jnp.broadcast_to(x, (size,))
    dim = wrap_dim(dimension, x.ndim)
    starts = step * lax.iota(np.int32, (x.shape[dim] - size) // step + 1)
    windows = jnp.take(x, starts[:, None] + np.arange(size, dtype=np.int32), axis=dim, mode="clip")
    return jnp.moveaxis(windows, dim + 1, -1)


def reinterpret(value: Array, dtype: DTypeLike) -> Array:
    """Return the elements of ``value``, in row-major order, with their bytes read as ``dtype``."""
    dtype = np.dtype(dtype)
    if value.dtype == dtype:
        return value
    parts = _plain(value.reshape(-1))
    real = _real_of(dtype)
    # XLA bitcasts neither booleans nor complex numbers.
    plain = np.dtype(np.uint8) if real == np.bool_ else real
    parts = _bitcast(parts, plain)
    if real == np.bool_:
        return parts != 0
    if dtype != real:
        pairs = parts.reshape(-1, 2)
        return lax.complex(pairs[:, 0], pairs[:, 1])
    return parts


def _plain(flat: Array) -> Array:
    """Return complex numbers as pairs of floats and booleans as bytes."""
    if flat.dtype == np.bool_:
        return flat.astype(jnp.uint8)
    if jnp.issubdtype(flat.dtype, jnp.complexfloating):
        return jnp.stack([flat.real, flat.imag], -1).reshape(-1)
    return flat


def _real_of(dtype: DType) -> DType:
    """Return the dtype of the real and imaginary parts, or the dtype itself."""
    return np.zeros((), dtype).real.dtype if dtype.kind == "c" else dtype


def _bitcast(flat: Array, dtype: DType) -> Array:
    if flat.dtype == dtype:
        return flat
    # XLA merges the last dim into a wider type, and splits a wider type into a new last dim.
    ratio = dtype.itemsize // flat.dtype.itemsize
    if ratio > 1:
        flat = flat.reshape(-1, ratio)
    return lax.bitcast_convert_type(flat, dtype).reshape(-1)


def view_dtype(x: Array, dtype: torch.dtype) -> Array:
    """Return the bits as another dtype; the last dim grows or shrinks with the size of an element."""
    target = to_jax_dtype(dtype)
    if not x.ndim:
        return reinterpret(x, target).reshape(())
    last = x.shape[-1] * x.dtype.itemsize // target.itemsize
    return reinterpret(x, target).reshape(*x.shape[:-1], last)


def collapse(x: Array, start: int, end: int) -> Array:
    """Join the dims from ``start`` to ``end``, both included."""
    return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :]) if x.ndim else x.reshape(1)


_TABLE: dict[Op | Missing, AnyFunction] = {
    aten._conj.default: jnp.conj,
    aten._neg_view.default: jnp.negative,
    aten._reshape_alias.default: lambda x, size, stride: x.reshape(tuple(size)),
    aten._unsafe_view.default: lambda x, size: x.reshape(tuple(size)),
    aten.alias.default: same,
    aten.detach.default: same,
    aten.diagonal.default: lambda x, offset=0, dim1=0, dim2=1: jnp.diagonal(x, offset, dim1, dim2),
    aten.expand.default: expand,
    aten.lift_fresh.default: same,
    aten.lift_fresh_copy.default: same,
    aten.permute.default: permute,
    aten.select.int: select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split_with_sizes,
    aten.squeeze.default: squeeze,
    aten.squeeze.dim: squeeze,
    aten.squeeze.dims: squeeze,
    aten.t.default: lambda x: x.T,
    aten.transpose.int: transpose,
    aten.unbind.int: unbind,
    aten.unfold.default: unfold,
    aten.unsqueeze.default: lambda x, dim: jnp.expand_dims(x, dim),
    aten.view.default: lambda x, size: x.reshape(tuple(size)),
    aten.view.dtype: view_dtype,
    aten.view_as_complex.default: lambda x: lax.complex(x[..., 0], x[..., 1]),
    aten.view_as_real.default: lambda x: jnp.stack([x.real, x.imag], axis=-1),
    prims.broadcast_in_dim.default: lambda x, shape, broadcast_dimensions: lax.broadcast_in_dim(
        x, tuple(shape), tuple(broadcast_dimensions)
    ),
    prims.collapse_view.default: collapse,
    prims.split_dim.default: lambda x, dim, outer_length: x.reshape(
        *x.shape[:dim], outer_length, x.shape[dim] // outer_length, *x.shape[dim + 1 :]
    ),
    prims.squeeze.default: squeeze,
    prims.transpose.default: permute,
}
VIEWS = {op: function for op, function in _TABLE.items() if not isinstance(op, Missing)}
