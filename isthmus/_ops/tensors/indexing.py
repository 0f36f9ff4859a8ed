"""Indexing by tensors: reads and writes at positions known only at run time.

Indices are checked, then used: XLA clamps a read and drops a write that is out of range, torch raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import EllipsisType

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import Array, DType, Ints, Operand, Scalar, accumulation_dtype, cast, wrap_dim
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported

Indices = list[Array | None]
"""torch's list of index tensors, where None takes a whole dim."""


Place = Array | slice  # type: ignore[explicit-any]  # Python 3.11 has no slice of None alone
Position = tuple[Place, ...]
"""A numpy-style index."""
Write = Callable[[Array, Position | EllipsisType, Array], Array]
"""Returns an array with values written, added or reduced into it at a position."""


def wrapped(index: Array, size: int, error: type[Exception], message: str) -> Array:
    """Return an index counted from the front, after requiring that it is in range either way."""
    index = index.astype(jnp.int64)
    require((index >= -size) & (index < size), error, message)
    return jnp.where(index < 0, index + size, index)


def checked(index: Array, size: int, error: type[Exception], message: str) -> Array:
    """Return an index as int64, after requiring that it is in range and not negative."""
    index = index.astype(jnp.int64)
    require((index >= 0) & (index < size), error, message)
    return index


def outside(dim: int, size: int) -> str:
    """Return torch's words for an index out of range."""
    return f"index is out of bounds for dimension {dim} with size {size}"


def _positions(x: Array, indices: Indices, check: bool = True) -> Position:
    """Return a numpy-style index for torch's list of tensors, where None takes a whole dim."""
    positions: list[Place] = []
    for dim, index in enumerate(indices):
        if index is None:
            positions.append(slice(None))
            continue
        if index.dtype in (jnp.bool_, jnp.uint8):
            raise Unsupported("a mask has a size that depends on its values")
        size = x.shape[dim]
        # With no element to read or write torch does not look at the index.
        if check and x.size:
            positions.append(wrapped(index, size, IndexError, outside(dim, size)))
        else:
            positions.append(jnp.where(index < 0, index + size, index))
    return tuple(positions)


@lowering(aten.index.Tensor)
def index(self: Array, indices: Indices) -> Array:
    """The elements at the positions that tensors of indices name."""
    return self.at[_positions(self, indices)].get(mode="promise_in_bounds")


@lowering(aten._unsafe_index.Tensor)
def unsafe_index(self: Array, indices: Indices) -> Array:
    """The elements at positions that the caller promises are in range."""
    return self.at[_positions(self, indices, check=False)].get(mode="promise_in_bounds")


def put_at(x: Array, position: Position | EllipsisType, values: Array, accumulate: bool) -> Array:
    """Return ``x`` with values written or added at a position."""
    if values.dtype != x.dtype:
        raise Unsupported("values in another dtype, which torch refuses as well")
    if not accumulate:
        return x.at[position].set(values)
    if x.dtype == jnp.bool_:
        # A sum of booleans is whether any of them holds.
        return x.astype(jnp.uint8).at[position].max(values.astype(jnp.uint8)) != 0
    return x.at[position].add(values)


def _put_by_mask(x: Array, dim: int, mask: Array, values: Array, accumulate: bool) -> Array:
    """Return ``x`` with values written or added where a mask over the dims from ``dim`` on holds."""
    end = dim + mask.ndim
    if mask.shape != x.shape[dim:end]:
        raise Unsupported("a mask of another shape, which torch refuses as well")
    flat = x.reshape(*x.shape[:dim], mask.size, *x.shape[end:])
    axis = values.ndim - (flat.ndim - dim)
    if axis >= 0 and values.shape[axis] != 1:  # one value for each element that the mask picks
        message = (
            f"shape mismatch: value tensor of shape {list(values.shape)} does not fit what the mask picks"
        )
        require(mask.sum() == values.shape[axis], RuntimeError, message)
        if not values.size or not mask.size:
            return x
        values = jnp.take(values, _rank_in_mask(mask), axis=axis, mode="clip")
    written = put_at(flat, ..., jnp.broadcast_to(values, flat.shape), accumulate)
    holds = mask.reshape(mask.size, *(1,) * (x.ndim - end))
    return jnp.where(holds, written, flat).reshape(x.shape)


def _index_put(check: bool, self: Array, indices: Indices, values: Array, accumulate: bool = False) -> Array:
    """Values written or added at the positions that tensors of indices, or one mask, name."""
    present = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if not present:
        return put_at(self, ..., values, accumulate)
    dim, index = present[0]
    # A mask picks as many elements as it holds true; written through a choice, the size stays static.
    if len(present) == 1 and index.dtype == jnp.bool_ and index.ndim:
        return _put_by_mask(self, dim, index, values, accumulate)
    return put_at(self, _positions(self, indices, check), values, accumulate)


lowering(aten.index_put.default)(functools.partial(_index_put, True))
lowering(aten._unsafe_index_put.default)(functools.partial(_index_put, False))


@lowering(aten._index_put_impl.default)
def index_put_impl(
    self: Array, indices: Indices, values: Array, accumulate: bool = False, unsafe: bool = False
) -> Array:
    """``index_put`` as autograd's backward of an index calls it."""
    return put_at(self, _positions(self, indices, not unsafe), values, accumulate)


@lowering(aten._unsafe_masked_index.default)
def unsafe_masked_index(self: Array, mask: Array, indices: Indices, fill: Scalar) -> Array:
    """The elements at positions, ``fill`` where the mask is false, whatever the position there."""
    if not self.size:
        return jnp.broadcast_to(cast(fill, self.dtype), _masked_shape(self, mask, indices))
    values = self.at[_clamped(self, indices)].get(mode="clip")
    return jnp.where(mask, values, cast(fill, self.dtype))


@lowering(aten._unsafe_masked_index_put_accumulate.default)
def unsafe_masked_index_put_accumulate(self: Array, mask: Array, indices: Indices, values: Array) -> Array:
    """Values added at positions where the mask holds."""
    if not self.size:
        return self
    masked = jnp.where(mask, values, jnp.zeros((), values.dtype))
    positions = _clamped(self, indices)
    shape = jax.eval_shape(lambda x: x[positions], self).shape
    # JAX casts values, and drops those that an empty index has no place for; torch refuses both.
    if values.dtype != self.dtype or jnp.broadcast_shapes(shape, masked.shape) != shape:
        raise Unsupported(f"no values {values.dtype}{masked.shape} for places {self.dtype}{shape}")
    place = self.at[positions]
    # The sum of bools is whether any holds.
    return place.max(masked) if self.dtype == jnp.bool_ else place.add(masked)


def _clamped(x: Array, indices: Indices) -> Position:
    positions = _positions(x, indices, check=False)
    sizes = enumerate(positions)
    return tuple(i if isinstance(i, slice) else jnp.clip(i, 0, x.shape[d] - 1) for d, i in sizes)


def _masked_shape(x: Array, mask: Array, indices: Indices) -> tuple[int, ...]:
    shape = jax.eval_shape(lambda a: a[_positions(a, indices, check=False)], jnp.zeros((1,) * x.ndim)).shape
    return jnp.broadcast_shapes(shape, mask.shape)


@lowering(aten.gather.default)
def gather(self: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    """The elements that an index along one dim picks, position by position in the others."""
    if not self.ndim or not index.ndim:
        flat = checked(index, max(self.size, 1), RuntimeError, outside(0, max(self.size, 1)))
        return jnp.take(self.reshape(-1), flat, mode="clip")
    axis = wrap_dim(dim, self.ndim)
    if not index.size:
        return jnp.zeros(index.shape, self.dtype)
    places = checked(index, self.shape[axis], RuntimeError, outside(axis, self.shape[axis]))
    # The index may be shorter than the tensor in the other dims.
    within = self[tuple(slice(None) if d == axis else slice(n) for d, n in enumerate(index.shape))]
    return jnp.take_along_axis(within, places, axis, mode="promise_in_bounds")


def scatter_position(x: Array, axis: int, index: Array) -> Position:
    """Return the numpy-style index of a scatter: ``index`` along one axis, its own place in the others."""
    places = checked(index, x.shape[axis], RuntimeError, outside(axis, x.shape[axis]))
    grid = [
        jax.lax.broadcasted_iota(jnp.int64, (1,) * d + (n,) + (1,) * (index.ndim - d - 1), d)
        for d, n in enumerate(index.shape)
    ]
    grid[axis] = places
    return tuple(grid)


def _scatter(x: Array, dim: int, index: Array, source: Operand, write: Write) -> Array:
    """Return ``x`` after ``write(flat or whole x, position, values)`` at the positions of a scatter."""
    if not index.size:
        return x
    grown = x.reshape(-1) if not x.ndim else x
    index = index.reshape(-1) if not index.ndim else index
    if isinstance(source, jax.Array):
        source = source.reshape(-1) if not source.ndim else source
        values = cast(source[tuple(slice(n) for n in index.shape)], x.dtype)
    else:
        values = jnp.broadcast_to(cast(source, x.dtype), index.shape)
    position = scatter_position(grown, wrap_dim(dim, grown.ndim), index)
    return write(grown, position, values).reshape(x.shape)


def _multiply_at(x: Array, position: Position | EllipsisType, values: Array) -> Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8).at[position].min(values.astype(jnp.uint8)) != 0
    return x.at[position].multiply(values)


_WRITES = {
    "set": lambda x, position, values: x.at[position].set(values),
    "add": lambda x, position, values: put_at(x, position, values, True),
    "multiply": _multiply_at,
}


@lowering(aten.scatter.src, aten.scatter.reduce)
def scatter(self: Array, dim: int, index: Array, src: Array, reduce: str = "set") -> Array:
    """``src`` written, added or multiplied in where an index along one dim says."""
    return _scatter(self, dim, index, src, _WRITES[reduce])


@lowering(aten.scatter.value, aten.scatter.value_reduce)
def scatter_value(self: Array, dim: int, index: Array, value: Scalar, reduce: str = "set") -> Array:
    """One value written, added or multiplied in where an index along one dim says."""
    return _scatter(self, dim, index, value, _WRITES[reduce])


@lowering(aten.scatter_add.default)
def scatter_add(self: Array, dim: int, index: Array, src: Array) -> Array:
    """``src`` added where an index along one dim says."""
    return _scatter(self, dim, index, src, _WRITES["add"])


def _identity(reduce: str, dtype: DType) -> float:
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf if reduce == "amax" else jnp.inf
    if dtype == jnp.bool_:
        return reduce != "amax"
    limits = jnp.iinfo(dtype)
    return limits.min if reduce == "amax" else limits.max


def reduce_at(
    x: Array, position: Position | EllipsisType, values: Array, reduce: str, include_self: bool
) -> Array:
    """Return ``x`` with values reduced into it at a position, its own elements taking part or not."""
    if x.dtype == jnp.bool_:
        return reduce_at(x.astype(jnp.uint8), position, values.astype(jnp.uint8), reduce, include_self) != 0
    start = x
    if not include_self:
        touched = jnp.zeros(x.shape, bool).at[position].set(True)
        start = jnp.where(touched, jnp.array(_identity(reduce, x.dtype), x.dtype), x)
    target = start.at[position]
    if reduce == "prod":
        return target.multiply(values)
    if reduce in ("amax", "amin"):
        return target.max(values) if reduce == "amax" else target.min(values)
    added = target.add(values)
    if reduce == "sum":
        return added
    # A mean divides by how many values arrived, with or without the element that was there.
    hits = jnp.full(x.shape, int(include_self), jnp.int64).at[position].add(1)
    hits = jnp.maximum(hits, 1)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.floor_divide(added, hits.astype(x.dtype))
    dtype = accumulation_dtype(x.dtype)
    return cast(added.astype(dtype) / hits.astype(dtype), x.dtype)


@lowering(aten.scatter_reduce.two)
def scatter_reduce(
    self: Array, dim: int, index: Array, src: Array, reduce: str, include_self: bool = True
) -> Array:
    """``src`` reduced into ``self`` where an index along one dim says."""
    return _scatter(
        self, dim, index, src, lambda x, position, v: reduce_at(x, position, v, reduce, include_self)
    )


def _along(axis: int, index: Array) -> Position:
    return (slice(None),) * axis + (index,)


def _lined_up(x: Array, dim: int) -> tuple[Array, int]:
    grown = x.reshape(-1) if not x.ndim else x
    return grown, wrap_dim(dim, grown.ndim)


@lowering(aten.index_select.default)
def index_select(self: Array, dim: int, index: Array) -> Array:
    """The slices that an index along one dim picks."""
    whole, axis = _lined_up(self, dim)
    places = checked(index.reshape(-1), whole.shape[axis], IndexError, "index out of range in self")
    slices = whole.at[_along(axis, places)].get(mode="promise_in_bounds")
    return slices if self.ndim else slices.reshape(())


def _index_write(
    x: Array,
    dim: int,
    index: Array,
    source: Operand,
    message: str,
    write: Write,
    error: type[Exception] = IndexError,
) -> Array:
    """Return ``x`` after ``write(x, position, values)`` on slices along a dim."""
    whole, axis = _lined_up(x, dim)
    places = checked(index.reshape(-1), whole.shape[axis], error, message)
    values = cast(source, x.dtype)
    shape = tuple(places.size if d == axis else n for d, n in enumerate(whole.shape))
    values = values.reshape(shape) if values.size == np.prod(shape) else jnp.broadcast_to(values, shape)
    return write(whole, _along(axis, places), values).reshape(x.shape)


@lowering(aten.index_add.default)
def index_add(self: Array, dim: int, index: Array, source: Array, alpha: Scalar = 1) -> Array:
    """Slices added to those an index along one dim names."""
    if source.ndim != self.ndim and self.ndim and source.ndim:
        raise Unsupported(f"a source of {source.ndim} dims added to {self.ndim}")
    scaled = source if isinstance(alpha, int) and alpha == 1 else source * cast(alpha, source.dtype)
    if self.ndim <= 1:
        return _index_write(self, dim, index, scaled, "index out of range in self", _WRITES["add"])
    message = outside(wrap_dim(dim, self.ndim), self.shape[dim])
    return _index_write(self, dim, index, scaled, message, _WRITES["add"], RuntimeError)


@lowering(aten.index_copy.default)
def index_copy(self: Array, dim: int, index: Array, source: Array) -> Array:
    """Slices written over those an index along one dim names."""
    size = self.shape[wrap_dim(dim, self.ndim)] if self.ndim else 1
    message = "index_copy_(): " + outside(wrap_dim(dim, self.ndim), size)
    return _index_write(self, dim, index, source, message, _WRITES["set"])


@lowering(aten.index_reduce.default)
def index_reduce(
    self: Array, dim: int, index: Array, source: Array, reduce: str, include_self: bool = True
) -> Array:
    """Slices reduced into those an index along one dim names."""

    def write(x: Array, position: Position | EllipsisType, values: Array) -> Array:
        return reduce_at(x, position, values, reduce, include_self)

    return _index_write(self, dim, index, source, "index out of range in self", write)


@lowering(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(self: Array, dim: int, index: Array, value: Operand) -> Array:
    """One value written over the slices that an index along one dim names."""
    whole, axis = _lined_up(self, dim)
    size = whole.shape[axis]
    places = wrapped(index.reshape(-1), size, IndexError, outside(axis, size))
    return whole.at[_along(axis, places)].set(cast(value, self.dtype)).reshape(self.shape)


def _flat_position(x: Array, index: Array) -> Array:
    message = f"out of range: tried to access an index beyond a tensor of {x.size} elements."
    return wrapped(index, x.size, IndexError, message)


@lowering(aten.take.default)
def take(self: Array, index: Array) -> Array:
    """The elements at positions in row-major order."""
    if not index.size:
        return jnp.zeros(index.shape, self.dtype)
    return self.reshape(-1).at[_flat_position(self, index)].get(mode="promise_in_bounds")


@lowering(aten.put.default)
def put(self: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    """Elements written or added at positions in row-major order."""
    if not index.size:
        return self
    position = _flat_position(self, index).reshape(-1)
    return put_at(self.reshape(-1), (position,), source.reshape(-1), accumulate).reshape(self.shape)


def _rank_in_mask(mask: Array) -> Array:
    return jnp.cumsum(mask.reshape(-1).astype(jnp.int64)) - 1


@lowering(aten.masked_scatter.default)
def masked_scatter(self: Array, mask: Array, source: Array) -> Array:
    """The elements of ``source``, one after another, where the mask holds."""
    if mask.dtype != np.bool_:
        raise Unsupported(f"a mask of {mask.dtype}")
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    whole, holds = jnp.broadcast_to(self, shape), jnp.broadcast_to(mask, shape)
    message = "Number of elements of source < number of ones in mask"
    require(holds.sum() <= source.size, RuntimeError, message)
    if not source.size or not whole.size:
        return whole
    taken = source.reshape(-1).at[_rank_in_mask(holds)].get(mode="clip").reshape(shape)
    return jnp.where(holds, cast(taken, self.dtype), whole)


@lowering(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad_output: Array, mask: Array, sizes: Ints) -> Array:
    """The gradient of ``masked_scatter`` for its source: what the mask let through, then zeros."""
    shape = jnp.broadcast_shapes(grad_output.shape, mask.shape)
    holds = jnp.broadcast_to(mask, shape)
    count = int(np.prod(sizes))
    # Elements that the mask leaves out are sent past the end, where the write is dropped.
    place = jnp.where(holds.reshape(-1), _rank_in_mask(holds), count)
    grad = jnp.broadcast_to(grad_output, shape).reshape(-1)
    return jnp.zeros(count, grad.dtype).at[place].set(grad, mode="drop").reshape(tuple(sizes))
