"""Embeddings: rows of a table by index, or summed, averaged and maximised over bags of indices, and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import Array, accumulation_dtype, cast
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported


def _require_rows(indices: Array, rows: int) -> None:
    # XLA clamps an index that is out of range, where torch raises.
    require((indices >= 0) & (indices < rows), IndexError, "index out of range in self")


@lowering(aten.embedding.default, ignores=("padding_idx", "scale_grad_by_freq", "sparse"))
def embedding(weight: Array, indices: Array) -> Array:
    """The rows of ``weight`` that ``indices`` name; the other arguments concern the gradient."""
    _require_rows(indices, weight.shape[0])
    if weight.shape[0] == 0:
        return jnp.zeros((*indices.shape, *weight.shape[1:]), weight.dtype)
    return jnp.take(weight, indices, axis=0, mode="clip")


@lowering(aten.embedding_dense_backward.default, accumulate=True)
def embedding_dense_backward(
    grad_output: Array, indices: Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Array:
    """Each row's gradients summed, or averaged by frequency; none for the padding row."""
    width, rows = grad_output.shape[indices.ndim :], indices.reshape(-1)
    grad = grad_output.reshape(rows.shape[0], *width)
    if scale_grad_by_freq:
        counts = jnp.zeros((num_weights,), jnp.int64).at[rows].add(1)
        grad = grad / counts[rows].astype(grad.dtype).reshape((-1,) + (1,) * len(width))
    # An index outside the table is dropped: the padding row is sent there.
    rows = jnp.where(rows == padding_idx, num_weights, rows)
    return jnp.zeros((num_weights, *width), grad.dtype).at[rows].add(grad, mode="drop")


@lowering(aten.embedding_renorm.default, accumulate=True)
def embedding_renorm(self: Array, indices: Array, max_norm: float, norm_type: float) -> Array:
    """The table with each named row scaled down to ``max_norm`` where its norm is larger."""
    rows = indices.reshape(-1)
    _require_rows(rows, self.shape[0])
    # Norms of all rows, though few are named: a gather of the named ones could hold one twice.
    norms = jnp.linalg.norm(self, ord=norm_type, axis=1, keepdims=True)
    named = jnp.zeros((self.shape[0], 1), bool).at[rows].set(True, mode="drop")
    scaled = self * (max_norm / (norms + 1e-7))  # torch's guard against a norm of zero
    return jnp.where(named & (norms > max_norm), scaled, self)


# Bags: stretches of the indices, given by where each begins

SUM, MEAN, MAX = 0, 1, 2


def _require_offsets(offsets: Array, count: int, include_last_offset: bool) -> None:
    where = "the first sequence in the mini-batch has to start from position 0"
    require(offsets[0] == 0, RuntimeError, f"offsets[0] has to be 0, i.e., {where}.")
    greater = f"offsets[-1] can not be greater than input's length {count}"
    require(offsets[-1] <= count, RuntimeError, greater)
    require(offsets[1:] >= offsets[:-1], RuntimeError, "embedding_bag: offsets have to be in ascending order")
    if include_last_offset:
        # torch's own kernels disagree whether indices after the last offset belong to the last bag.
        last = f"embedding_bag: with include_last_offset the last offset has to be input's length {count}"
        require(offsets[-1] == count, RuntimeError, last)


def _bag_of_each(offsets: Array, count: int) -> Array:
    """Return the bag each index is in, given where each bag starts."""
    # Empty bags begin where the next one does; from the right, an index goes to the last of them.
    return jnp.searchsorted(offsets, jnp.arange(count, dtype=offsets.dtype), side="right") - 1


def _check_bags(weight: Array, indices: Array, per_sample_weights: Array | None, bags: int) -> None:
    if weight.ndim != 2 or indices.ndim != 1 or weight.shape[0] == 0 or bags <= 0:
        raise Unsupported(f"bags of a table {list(weight.shape)} with indices {list(indices.shape)}")
    if per_sample_weights is not None and per_sample_weights.dtype != weight.dtype:
        raise Unsupported(f"per_sample_weights of {per_sample_weights.dtype} for a table of {weight.dtype}")
    message = "embedding_bag: Expected idx >= 0 && idx < num_embeddings"
    require((indices >= 0) & (indices < weight.shape[0]), RuntimeError, message)


def _maxima(rows: Array, bag: Array, bags: int, counted: Array, indices: Array) -> tuple[Array, Array]:
    """Return the maximum of each bag and the index it came from; 0 and 0 for an empty bag."""
    count = rows.shape[0]
    shape = (bags, rows.shape[1])
    if count == 0:
        return jnp.zeros(shape, rows.dtype), jnp.zeros(shape, indices.dtype)
    places = jnp.where(counted, jnp.arange(count), count)
    first = jax.ops.segment_min(places, bag, bags)
    filled = (first < count)[:, None]
    # torch starts from a bag's first row and moves on to what is greater, so only a nan there stays.
    start = jnp.arange(count) == first[bag]
    stays = (start[:, None] & jnp.isnan(rows)).astype(jnp.int32)
    poisoned = (jax.ops.segment_max(stays, bag, bags) > 0) & filled
    usable = counted[:, None] & ~jnp.isnan(rows)
    top = jax.ops.segment_max(jnp.where(usable, rows, -jnp.inf), bag, bags)
    hits = jnp.where(usable & (rows == top[bag]), jnp.arange(count)[:, None], count)
    place = jnp.where(poisoned, first[:, None], jax.ops.segment_min(hits, bag, bags))
    rows_of_maxima = jnp.where(filled, indices[jnp.clip(place, 0, count - 1)], 0)
    return jnp.where(filled, jnp.where(poisoned, jnp.nan, top), 0), rows_of_maxima


@lowering(
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    ignores=("scale_grad_by_freq", "sparse"),
)
def embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    mode: int = 0,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Array, ...]:
    """The bags, and for the gradient: the bag of each index, the size of each bag, the rows of the maxima."""
    count, bags = indices.shape[0], offsets.shape[0] - include_last_offset
    _check_bags(weight, indices, per_sample_weights, bags)
    _require_offsets(offsets, count, include_last_offset)
    bag, counted = _bag_of_each(offsets[:bags], count), indices != padding_idx
    # Rows are widened after they are taken: a float32 copy of the table would be far larger than the bags.
    rows = cast(jnp.take(weight, indices, axis=0, mode="clip"), accumulation_dtype(weight.dtype))
    sizes = jax.ops.segment_sum(counted.astype(indices.dtype), bag, bags)
    maxima = jnp.zeros((0,), indices.dtype)
    if mode == MAX:
        out, maxima = _maxima(rows, bag, bags, counted, indices)
    else:
        if per_sample_weights is not None:
            rows = rows * cast(per_sample_weights, rows.dtype)[:, None]
        out = jax.ops.segment_sum(jnp.where(counted[:, None], rows, 0), bag, bags)
        if mode == MEAN:
            out = out / jnp.maximum(sizes, 1).astype(rows.dtype)[:, None]
        else:
            sizes = jnp.zeros_like(sizes)  # torch counts only where the gradient needs it
    # The end of the last bag has an entry among the sizes too.
    sizes = jnp.pad(sizes, (0, offsets.shape[0] - bags))
    return cast(out, weight.dtype), bag.astype(indices.dtype), sizes, maxima


def _dense_gradient(
    grad: Array,
    indices: Array,
    bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Array | None,
    padding_idx: int,
) -> Array:
    """Return each bag's gradient added to the rows it was made of."""
    width = grad.shape[1]
    total = jnp.zeros((num_weights, width), grad.dtype)
    if mode == MAX:
        if scale_grad_by_freq:
            raise Unsupported("the gradient of a maximum is not scaled by frequency")
        filled = bag_size[: grad.shape[0], None] != 0
        rows = jnp.where(filled, maximum_indices, num_weights)
        return total.at[rows, jnp.arange(width)[None, :]].add(grad, mode="drop")
    scale = jnp.ones(indices.shape, grad.dtype) if per_sample_weights is None else per_sample_weights
    if scale_grad_by_freq:
        counts = jnp.zeros((num_weights,), jnp.int64).at[indices].add(1, mode="drop")
        scale = scale / counts[indices].astype(grad.dtype)
    if mode == MEAN:
        scale = scale / jnp.maximum(bag_size[bag], 1).astype(grad.dtype)
    # An index outside the table is dropped: the padding row is sent there.
    rows = jnp.where(indices == padding_idx, num_weights, indices)
    return total.at[rows].add(grad[bag] * scale[:, None], mode="drop")


@lowering(aten._embedding_bag_backward.default, accumulate=True)
def embedding_bag_backward(
    grad: Array,
    indices: Array,
    offsets: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    """The gradient of the table; a sparse one is torch's own to make."""
    if sparse:
        raise Unsupported("a sparse gradient")
    bag = _given_bags(offset2bag, offsets[: grad.shape[0]], indices)
    return _dense_gradient(
        grad, indices, bag, bag_size, maximum_indices,
        num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx,
    )  # fmt: skip


@lowering(aten._embedding_bag_dense_backward.default, accumulate=True)
def embedding_bag_dense_backward(
    grad: Array,
    indices: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    """The gradient of the table, given the bag of each index."""
    if offset2bag.shape != indices.shape:
        raise Unsupported("the bag of each index is not known")
    return _dense_gradient(
        grad, indices, offset2bag, bag_size, maximum_indices,
        num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx,
    )  # fmt: skip


def _given_bags(offset2bag: Array, offsets: Array, indices: Array) -> Array:
    # The CPU's fast path does not write down the bag of each index.
    return offset2bag if offset2bag.shape == indices.shape else _bag_of_each(offsets, indices.shape[0])


@lowering(aten._embedding_bag_per_sample_weights_backward.default, ignores=("mode",))
def embedding_bag_per_sample_weights_backward(
    grad: Array,
    weight: Array,
    indices: Array,
    offsets: Array,
    offset2bag: Array,
    padding_idx: int = -1,
) -> Array:
    """The gradient of each sample's weight: its row times its bag's gradient; none for padding."""
    if weight.shape[0] == 0 or grad.shape[0] == 0:
        raise Unsupported("bags of an empty table")
    bag = _given_bags(offset2bag, offsets[: grad.shape[0]], indices)
    acc_dtype = accumulation_dtype(grad.dtype)
    rows = cast(jnp.take(weight, indices, axis=0, mode="clip"), acc_dtype)
    products = (cast(grad, acc_dtype)[bag] * rows).sum(-1)
    return cast(jnp.where(indices == padding_idx, 0, products), grad.dtype)
