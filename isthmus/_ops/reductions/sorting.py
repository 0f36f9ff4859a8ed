"""Order: sorting, selecting by rank, searching; nan counts as greater than every number."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import NO_OPMATH, Array, Operand, Scalar, cast, promote, wrap_dim
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require


def sort_with_indices(x: Array, axis: int, descending: bool = False) -> tuple[Array, Array]:
    """Return the elements in order and where each was; equal elements keep their order."""
    if not _is_narrow(x):
        return _sort_pairs(x, axis, descending)
    fixed = jax.lax.stop_gradient(x)
    indices = jax.lax.platform_dependent(
        fixed,
        cpu=lambda x: _sort_packed(x, axis, descending),
        default=lambda x: _sort_pairs(x, axis, descending)[1],
    )
    return jnp.take_along_axis(x, indices, axis, mode="promise_in_bounds"), indices


def _is_narrow(x: Array) -> bool:
    """Return whether an element's rank is known, and fits into half of an int64."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x.dtype in (jnp.float16, jnp.bfloat16, jnp.float32)
    return x.dtype.itemsize <= 4 and x.dtype != jnp.uint32


def _sort_packed(x: Array, axis: int, descending: bool) -> Array:
    """Return where each element in order was: XLA's CPU sorts one array of integers several times as fast as two."""
    keys = _rank_keys(x)
    places = jax.lax.broadcasted_iota(jnp.int64, x.shape, axis)
    # The complement reverses the order of integers without overflow, and leaves ties to the index below.
    packed = (~keys if descending else keys).astype(jnp.int64) << 32 | places
    return jax.lax.sort(packed, dimension=axis) & 0xFFFFFFFF


def _sort_pairs(x: Array, axis: int, descending: bool) -> tuple[Array, Array]:
    keys = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    places = jax.lax.broadcasted_iota(jnp.int64, x.shape, axis)
    if descending:
        # Reversed before and after, a stable ascending sort leaves equal elements as they were.
        keys, places = jnp.flip(keys, axis), jnp.flip(places, axis)
    values, indices = jax.lax.sort((keys, places), dimension=axis, is_stable=True, num_keys=1)
    if descending:
        values, indices = jnp.flip(values, axis), jnp.flip(indices, axis)
    return values.astype(x.dtype), indices


@lowering(aten.sort.default, aten.sort.stable)
def sort(
    self: Array, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> tuple[Array, Array]:
    """The elements in order along a dim, and their indices; the sort is stable whether asked to be or not."""
    if not self.ndim:
        return self, jnp.zeros((), jnp.int64)
    return sort_with_indices(self, wrap_dim(dim, self.ndim), descending)


_INTEGERS = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


def _plain_bits(x: Array) -> Array:
    """Return the bits of floating numbers, with one zero and one nan.

    Compared by their bits: a denormal number, which the CPU flushes when it computes, is no zero.
    """
    integer = _INTEGERS[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, integer)
    size = bits & np.iinfo(integer).max
    nan, infinity = (np.array(value, x.dtype).view(integer) for value in (np.nan, np.inf))
    return jnp.where(size > infinity, nan, jnp.where(size == 0, size, bits))


def _rank_keys(x: Array) -> Array:
    """Return integers in the order of ``x``, nan the greatest."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.int32)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    bits = _plain_bits(x)
    # Negative floats order backwards as integers: all bits but the sign are turned.
    return jnp.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def _top(x: Array, k: int, largest: bool) -> Array:
    """Return where the k greatest or least elements of each row are."""
    if x.dtype != jnp.float32 and x.dtype.itemsize > 2:
        return _top_of_keys(x, k, largest)
    return jax.lax.platform_dependent(
        x, cpu=lambda x: _top_of_floats(x, k, largest), default=lambda x: _top_of_keys(x, k, largest)
    )


def _top_of_keys(x: Array, k: int, largest: bool) -> Array:
    keys = _rank_keys(x)
    return jax.lax.top_k(keys if largest else ~keys, k)[1]


def _top_of_floats(x: Array, k: int, largest: bool) -> Array:
    """Find them in float32: of that XLA's CPU does without sorting, by bits: nan is the greatest, turned the least."""
    bits = _plain_bits(x.astype(jnp.float32))
    turned = bits if largest else bits ^ np.iinfo(np.int32).min
    return jax.lax.top_k(jax.lax.bitcast_convert_type(turned, jnp.float32), k)[1]


@lowering(aten.topk.default)
def topk(
    self: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, Array]:
    """The k greatest or least elements along a dim in order, and their indices."""
    if not self.ndim:
        return self, jnp.zeros((), jnp.int64)
    axis = wrap_dim(dim, self.ndim)
    places = _top(jnp.moveaxis(jax.lax.stop_gradient(self), axis, -1), k, largest)
    indices = jnp.moveaxis(places, -1, axis).astype(jnp.int64)
    return jnp.take_along_axis(self, indices, axis, mode="promise_in_bounds"), indices


def _at_rank(x: Array, k: Array | int, axis: int, keepdim: bool) -> tuple[Array, Array]:
    """Return the element with rank ``k``, counted from 0, along an axis and its index."""
    values, indices = sort_with_indices(x, axis)
    place = jnp.broadcast_to(k, tuple(1 if d == axis else n for d, n in enumerate(x.shape)))
    picked = [jnp.take_along_axis(a, place, axis, mode="promise_in_bounds") for a in (values, indices)]
    return (picked[0], picked[1]) if keepdim else (picked[0].squeeze(axis), picked[1].squeeze(axis))


@lowering(aten.kthvalue.default)
def kthvalue(self: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The k-th least element along a dim and its index."""
    if not self.ndim:
        return self, jnp.zeros((), jnp.int64)
    return _at_rank(self, k - 1, wrap_dim(dim, self.ndim), keepdim)


def median_rank(x: Array, axis: int, ignore_nan: bool) -> Array:
    """Return the rank of the lower median along an axis; where there is a nan, of the first nan."""
    count = x.shape[axis]
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.asarray((count - 1) // 2)
    nans = jnp.isnan(x).sum(axis, keepdims=True)
    if ignore_nan:
        return jnp.maximum(count - nans - 1, 0) // 2
    return jnp.where(nans > 0, count - nans, (count - 1) // 2)


def _median_of_all(ignore_nan: bool, self: Array) -> Array:
    flat = self.reshape(-1)
    if not flat.size:
        if jnp.issubdtype(self.dtype, jnp.inexact):
            return jnp.full((), jnp.nan, self.dtype)
        return jnp.full((), np.iinfo(self.dtype).min, self.dtype)
    return _at_rank(flat, median_rank(flat, 0, ignore_nan), 0, False)[0]


def _median_along(ignore_nan: bool, self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    if not self.ndim:
        return self, jnp.zeros((), jnp.int64)
    axis = wrap_dim(dim, self.ndim)
    return _at_rank(self, median_rank(self, axis, ignore_nan), axis, keepdim)


for _packet, _ignore_nan in ((aten.median, False), (aten.nanmedian, True)):
    lowering(_packet.default)(functools.partial(_median_of_all, _ignore_nan))
    lowering(_packet.dim)(functools.partial(_median_along, _ignore_nan))


@lowering(aten.mode.default)
def mode(self: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The least of the most frequent elements along a dim, and the last index that has it."""
    if not self.ndim:
        return self, jnp.zeros((), jnp.int64)
    axis = wrap_dim(dim, self.ndim)
    values, indices = (jnp.moveaxis(a, axis, -1) for a in sort_with_indices(self, axis))
    starts = jnp.concatenate([jnp.ones_like(values[..., :1], bool), values[..., 1:] != values[..., :-1]], -1)
    place = jax.lax.broadcasted_iota(jnp.int64, values.shape, values.ndim - 1)
    # How far into its run of equal elements each one is: the longest run ends where this is largest.
    run = place - jax.lax.cummax(jnp.where(starts, place, 0), values.ndim - 1)
    longest = jax.lax.argmax(run, values.ndim - 1, jnp.int64)[..., None]
    picked = [jnp.moveaxis(jnp.take_along_axis(a, longest, -1), -1, axis) for a in (values, indices)]
    return (picked[0], picked[1]) if keepdim else (picked[0].squeeze(axis), picked[1].squeeze(axis))


def search(sequence: Array, values: Array, right: bool) -> Array:
    """Return where each value would be inserted; leading dims of the two are batches."""
    if not sequence.size or not values.size:  # in nothing, the place is the first
        return jnp.zeros(values.shape, jnp.int64)
    if sequence.ndim <= 1:
        return _halve(sequence.reshape(-1), values, right)
    rows = sequence.reshape(-1, sequence.shape[-1])
    queries = values.reshape(rows.shape[0], values.shape[-1])
    return jax.vmap(lambda s, v: _halve(s, v, right))(rows, queries).reshape(values.shape)


def _halve(sequence: Array, values: Array, right: bool) -> Array:
    """Search by halving, as torch does: a comparison with nan is false, and what is not reached moves the start."""

    def step(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        start, end = ends
        middle = (start + end) // 2
        element = sequence.at[middle].get(mode="clip")
        reached = (element > values if right else element >= values) | (start >= end)
        return jnp.where(reached, start, middle + 1), jnp.where(reached, middle, end)

    size = sequence.shape[0]
    ends = jnp.zeros(values.shape, jnp.int64), jnp.full(values.shape, size, jnp.int64)
    return jax.lax.fori_loop(0, int(size).bit_length(), step, ends)[0]


@lowering(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    sorted_sequence: Array,
    self: Operand,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    """Where each value would be inserted into a sorted sequence."""
    dtype, _ = promote(sorted_sequence, self, kind=NO_OPMATH)
    sequence = cast(sorted_sequence, dtype)
    if sorter is not None:
        inside = (sorter >= 0) & (sorter < sequence.shape[-1])
        require(inside, RuntimeError, "torch.searchsorted(): sorter index out of range")
        sequence = jnp.take_along_axis(sequence, sorter, -1)
    places = search(sequence, cast(self, dtype), right or side == "right")
    return places.astype(jnp.int32 if out_int32 else jnp.int64)


@lowering(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(self: Operand, boundaries: Array, out_int32: bool = False, right: bool = False) -> Array:
    """Which of the buckets between boundaries each value falls into."""
    return searchsorted(boundaries, self, out_int32, right)


def _isin(elements: Operand, test_elements: Operand, invert: bool) -> Array:
    dtype, _ = promote(elements, test_elements, kind=NO_OPMATH)
    values, known = cast(elements, dtype), cast(test_elements, dtype).reshape(-1)
    if known.size == 0:
        member = jnp.zeros(values.shape, bool)
    else:
        known = jnp.sort(known.astype(jnp.uint8) if dtype == np.bool_ else known)
        values = values.astype(known.dtype)
        place = jnp.searchsorted(known, values)
        member = known[jnp.minimum(place, known.size - 1)] == values
    return ~member if invert else member


@lowering(aten.isin.Tensor_Tensor)
def isin(elements: Array, test_elements: Array, assume_unique: bool = False, invert: bool = False) -> Array:
    """Whether each element is among those of the other tensor."""
    return _isin(elements, test_elements, invert)


@lowering(aten.isin.Tensor_Scalar)
def isin_scalar(
    elements: Array, test_element: Scalar, assume_unique: bool = False, invert: bool = False
) -> Array:
    """Whether each element is the number."""
    return _isin(elements, test_element, invert)


@lowering(aten.isin.Scalar_Tensor)
def scalar_isin(
    element: Scalar, test_elements: Array, assume_unique: bool = False, invert: bool = False
) -> Array:
    """Whether a number is among the elements."""
    return _isin(element, test_elements, invert)
