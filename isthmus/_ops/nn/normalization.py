"""Normalization over layers, groups and batches: statistics and gradients in at least float32."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from isthmus._graph.names import aten
from isthmus._ops.common import Array, accumulation_dtype, cast, wrap_dim
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported


def moments(x: Array, dims: tuple[int, ...], eps: float) -> tuple[Array, Array, Array]:
    """Return mean, biased variance and reciprocal deviation over ``dims``, which stay as dims of size one."""
    # Two passes: the mean of squares less the square of the mean would cancel where the mean is large.
    mean = x.mean(dims, keepdims=True)
    var = jnp.square(x - mean).mean(dims, keepdims=True)
    return mean, var, jax.lax.rsqrt(var + eps)


def _scale_shift(x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _input_grad(grad: Array, normal: Array, rstd: Array, dims: tuple[int, ...]) -> Array:
    """Return the gradient through ``normal = (x - mean) * rstd`` with both statistics taken over ``dims``."""
    mean_grad = grad.mean(dims, keepdims=True)
    return rstd * (grad - mean_grad - normal * (grad * normal).mean(dims, keepdims=True))


@lowering(aten.native_layer_norm.default, accumulate=("input", None, None))
def layer_norm(
    input: Array, normalized_shape: list[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """Normalize over the last dims; also the mean and reciprocal deviation that backward needs."""
    dims = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    mean, _, rstd = moments(input, dims, eps)
    return _scale_shift((input - mean) * rstd, weight, bias), mean, rstd


@lowering(aten.native_layer_norm_backward.default, accumulate=("input", "weight", "bias"))
def layer_norm_backward(
    grad_out: Array,
    input: Array,
    normalized_shape: list[int],
    mean: Array,
    rstd: Array,
    weight: Array | None,
    bias: Array | None,
    output_mask: list[bool],
) -> tuple[Array | None, ...]:
    """The gradients of ``native_layer_norm`` for input, weight and bias."""
    axis = input.ndim - len(normalized_shape)
    outer, inner = tuple(range(axis)), tuple(range(axis, input.ndim))
    normal = (input - mean) * rstd
    scaled = grad_out if weight is None else grad_out * weight
    return (
        _input_grad(scaled, normal, rstd, inner) if output_mask[0] else None,
        (grad_out * normal).sum(outer) if output_mask[1] and weight is not None else None,
        grad_out.sum(outer) if output_mask[2] and bias is not None else None,
    )


@lowering(aten.native_group_norm.default, accumulate=True)
def group_norm(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    N: int,  # the schema's names
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Array, Array, Array]:
    """Normalize over groups of channels; also the statistics that backward needs."""
    x = input.reshape(N, group, C // group, HxW)
    mean, _, rstd = moments(x, (2, 3), eps)
    w, b = (None if p is None else p.reshape(1, group, C // group, 1) for p in (weight, bias))
    out = _scale_shift((x - mean) * rstd, w, b)
    # torch saves these statistics in the input's dtype, unlike those of layer norm.
    return out.reshape(input.shape), mean.reshape(N, group), rstd.reshape(N, group)


@lowering(aten.native_group_norm_backward.default)
def group_norm_backward(
    grad_out: Array,
    input: Array,
    mean: Array,
    rstd: Array,
    weight: Array | None,
    N: int,  # the schema's names
    C: int,
    HxW: int,
    group: int,
    output_mask: list[bool],
) -> tuple[Array | None, ...]:
    """The gradients of ``native_group_norm`` for input, weight and bias."""
    dtype, shape = accumulation_dtype(input.dtype), (N, group, C // group, HxW)
    g, x = (cast(a, dtype).reshape(shape) for a in (grad_out, input))
    mu, r = (cast(a, dtype).reshape(N, group, 1, 1) for a in (mean, rstd))
    normal = (x - mu) * r
    scaled = g if weight is None else g * cast(weight, dtype).reshape(1, group, C // group, 1)
    # As torch infers it: as wide as the widest, which are the statistics where the parameters are wider than the input.
    arrays = (grad_out, input, mean, rstd, *([] if weight is None else [weight]))
    result = functools.reduce(jnp.promote_types, [a.dtype for a in arrays])
    dx = cast(_input_grad(scaled, normal, r, (2, 3)).reshape(input.shape), result) if output_mask[0] else None
    dw = cast((g * normal).sum((0, 3)).reshape(C), result) if output_mask[1] else None
    db = cast(g.sum((0, 3)).reshape(C), result) if output_mask[2] else None
    return dx, dw, db


# Up to so many rows of a batch the error of ``_moments_at_once`` is far below the rounding of a half type.
_FEW_ROWS = 1024


def _moments_at_once(x: Array, dims: tuple[int, ...], eps: float) -> tuple[Array, Array, Array]:
    """Return the results of ``moments`` by one pass over a batch: a large one does not fit into a GPU's cache.

    The square of the mean is subtracted from the mean of squares, both of elements less the mean of the batch's first
    row. Of n rows the squared distance of that mean from the whole batch's is at most n times the variance, so the
    difference loses no more than log2(n) bits of float32, whatever the elements are.
    """
    shift = jax.lax.stop_gradient(x[:1].mean(dims, keepdims=True))
    centred = x - shift
    mean = centred.mean(dims, keepdims=True)
    var = jnp.maximum(jnp.square(centred).mean(dims, keepdims=True) - jnp.square(mean), 0.0)
    return mean + shift, var, jax.lax.rsqrt(var + eps)


def _channels(p: Array, ndim: int) -> Array:
    return p.reshape((1, -1) + (1,) * (ndim - 2))


def _batch_train(
    input: Array, weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array, Array]:
    """Return the normalized batch, then its mean, biased variance and reciprocal deviation per channel."""
    dtype, ndim = accumulation_dtype(input.dtype), input.ndim
    x = cast(input, dtype)
    find = _moments_at_once if dtype != input.dtype and 0 < input.shape[0] <= _FEW_ROWS else moments
    mean, var, rstd = find(x, (0, *range(2, ndim)), eps)
    w, b = (None if p is None else _channels(cast(p, dtype), ndim) for p in (weight, bias))
    out = _scale_shift((x - mean) * rstd, w, b)
    return cast(out, input.dtype), mean.reshape(-1), var.reshape(-1), rstd.reshape(-1)


def _batch_eval(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    eps: float,
) -> Array:
    dtype, ndim = accumulation_dtype(input.dtype), input.ndim
    mean, var = (_channels(cast(p, dtype), ndim) for p in (running_mean, running_var))
    w, b = (None if p is None else _channels(cast(p, dtype), ndim) for p in (weight, bias))
    out = _scale_shift((cast(input, dtype) - mean) * jax.lax.rsqrt(var + eps), w, b)
    return cast(out, input.dtype)


def _saved(input: Array, running_mean: Array, running_var: Array, eps: float) -> tuple[Array, Array]:
    """Return the statistics that evaluation saves, as torch infers them; backward reads the running ones."""
    mean, var = (cast(p, accumulation_dtype(input.dtype)) for p in (running_mean, running_var))
    return mean, jax.lax.rsqrt(var + eps)


@lowering(aten._native_batch_norm_legit_functional.default)
def batch_norm(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, ...]:
    """Normalize a batch per channel; in training by its own statistics, which move the running ones."""
    if not training:
        out = _batch_eval(input, weight, bias, running_mean, running_var, eps)
        stats = [
            cast(p, jnp.promote_types(accumulation_dtype(input.dtype), p.dtype))
            for p in (running_mean, running_var)
        ]
        return (out, *_saved(input, running_mean, running_var, eps), *stats)
    out, mean, var, rstd = _batch_train(input, weight, bias, eps)
    count = math.prod(input.shape) // max(input.shape[1], 1)
    # torch divides by count - 1, so the running variance of one element is nan.
    unbiased = var * (count / (count - 1)) if count > 1 else var * jnp.nan
    # As wide as torch's decomposition has them; what they are written to, of a half type say, rounds them.
    moved = [
        (1 - momentum) * cast(running, dtype) + momentum * cast(new, dtype)
        for running, new in ((running_mean, mean), (running_var, unbiased))
        for dtype in [jnp.promote_types(mean.dtype, running.dtype)]
    ]
    return (out, mean, rstd, *moved)


@lowering(aten._native_batch_norm_legit.no_stats, ignores=("training", "momentum"))
def batch_norm_no_stats(
    input: Array, weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """Normalize a batch per channel by its own statistics."""
    out, mean, _, rstd = _batch_train(input, weight, bias, eps)
    return out, mean, rstd


@lowering(aten._native_batch_norm_legit_no_training.default, ignores=("momentum",))
def batch_norm_no_training(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    eps: float,
) -> tuple[Array, Array, Array]:
    """Normalize a batch per channel by the running statistics."""
    out = _batch_eval(input, weight, bias, running_mean, running_var, eps)
    return (out, *_saved(input, running_mean, running_var, eps))


@lowering(aten._batch_norm_no_update.default, ignores=("momentum",))
def batch_norm_no_update(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    eps: float,
) -> tuple[Array, ...]:
    """Normalize a batch per channel by the running statistics, and return what cuDNN would reserve: nothing."""
    if running_mean is None or running_var is None:
        raise Unsupported("no running statistics, which torch refuses as well")
    results = batch_norm_no_training(input, weight, bias, running_mean, running_var, eps)
    return (*results, jnp.zeros((0,), jnp.uint8))


@lowering(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    grad_out: Array,
    input: Array,
    weight: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    save_mean: Array | None,
    save_invstd: Array | None,
    train: bool,
    eps: float,
    output_mask: list[bool],
) -> tuple[Array | None, ...]:
    """The gradients of batch normalization for input, weight and bias."""
    dtype, ndim = accumulation_dtype(input.dtype), input.ndim
    mean, scale = (save_mean, save_invstd) if train else (running_mean, running_var)
    if mean is None or scale is None:
        raise Unsupported("no statistics, which torch refuses as well")
    # In evaluation the running statistics are those that normalized.
    rstd = scale if train else jax.lax.rsqrt(cast(scale, dtype) + eps)
    dims = (0, *range(2, ndim))
    g, x = cast(grad_out, dtype), cast(input, dtype)
    mu, r = (_channels(cast(p, dtype), ndim) for p in (mean, rstd))
    normal = (x - mu) * r
    scaled = g if weight is None else g * _channels(cast(weight, dtype), ndim)
    dx = _input_grad(scaled, normal, r, dims) if train else scaled * r
    result = input.dtype if weight is None else weight.dtype
    return (
        cast(dx, input.dtype) if output_mask[0] else None,
        cast((g * normal).sum(dims), result) if output_mask[1] else None,
        cast(g.sum(dims), result) if output_mask[2] else None,
    )


# Batch norm over ranks: torch's SyncBatchNorm gathers the statistics of each rank between these ops. Statistics and
# sums are at least float32, whatever the batch is.
@lowering(aten.batch_norm_stats.default)
def batch_norm_stats(input: Array, eps: float) -> tuple[Array, Array]:
    """The mean and reciprocal deviation per channel of the batch of one rank."""
    mean, _, rstd = moments(cast(input, accumulation_dtype(input.dtype)), (0, *range(2, input.ndim)), eps)
    return mean.reshape(-1), rstd.reshape(-1)


@lowering(aten.batch_norm_elemt.default, ignores=("eps",), accumulate="input")
def batch_norm_by_statistics(
    input: Array, weight: Array | None, bias: Array | None, mean: Array, invstd: Array
) -> Array:
    """Normalize a batch per channel by given statistics."""
    mu, r = _channels(mean, input.ndim), _channels(invstd, input.ndim)
    w, b = (None if p is None else _channels(p, input.ndim) for p in (weight, bias))
    return _scale_shift((input - mu) * r, w, b)


@lowering(aten.batch_norm_backward_reduce.default)
def batch_norm_backward_reduce(
    grad_out: Array,
    input: Array,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Array | None, ...]:
    """The sums of one rank that the gradient of the batch needs of all, and the gradients of weight and bias."""
    dtype, dims = accumulation_dtype(input.dtype), (0, *range(2, input.ndim))
    g, x = cast(grad_out, dtype), cast(input, dtype)
    total = g.sum(dims)
    along = (g * (x - _channels(cast(mean, dtype), input.ndim))).sum(dims)
    result = dtype if weight is None else weight.dtype
    return (
        total if input_g else None,
        along if input_g else None,
        cast(along * cast(invstd, dtype), result) if weight_g else None,
        cast(total, result) if bias_g else None,
    )


@lowering(aten.batch_norm_backward_elemt.default, accumulate="input")
def batch_norm_backward_by_sums(
    grad_out: Array,
    input: Array,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    sum_dy: Array,
    sum_dy_xmu: Array,
    count: Array,
) -> Array:
    """The gradient of the batch of one rank, from the sums of all ranks and the elements that each has a channel."""
    # Counts are integers, so they are not among what arrives in the accumulation dtype.
    total = cast(count, input.dtype).sum()
    scale = invstd if weight is None else invstd * weight
    mu, mean_grad, along, scale = (
        _channels(p, input.ndim) for p in (mean, sum_dy / total, sum_dy_xmu / total * invstd * invstd, scale)
    )
    return (grad_out - mean_grad - (input - mu) * along) * scale


def _rms_eps(eps: float | None, dtype: DTypeLike) -> float:
    return float(jnp.finfo(dtype).eps) if eps is None else eps  # type: ignore[no-untyped-call]


@lowering(aten._fused_rms_norm.default)
def rms_norm(
    input: Array, normalized_shape: list[int], weight: Array | None, eps: float | None
) -> tuple[Array, Array]:
    """Divide by the root mean square over the last dims; also its reciprocal, which backward needs."""
    dtype = accumulation_dtype(input.dtype)
    x, dims = cast(input, dtype), tuple(range(input.ndim - len(normalized_shape), input.ndim))
    rstd = jax.lax.rsqrt(jnp.square(x).mean(dims, keepdims=True) + _rms_eps(eps, input.dtype))
    out = x * rstd if weight is None else x * rstd * cast(weight, dtype)
    return cast(out, input.dtype), rstd


@lowering(aten._fused_rms_norm_backward.default, accumulate=("input", "weight"))
def rms_norm_backward(
    grad_out: Array,
    input: Array,
    normalized_shape: list[int],
    rstd: Array,
    weight: Array | None,
    output_mask: list[bool],
) -> tuple[Array | None, Array | None]:
    """The gradients of ``_fused_rms_norm`` for input and weight."""
    axis = input.ndim - len(normalized_shape)
    outer, inner = tuple(range(axis)), tuple(range(axis, input.ndim))
    normal, scaled = input * rstd, grad_out if weight is None else grad_out * weight
    dx = rstd * (scaled - normal * (scaled * normal).mean(inner, keepdims=True))
    dw = (grad_out * normal).sum(outer) if output_mask[1] and weight is not None else None
    return dx if output_mask[0] else None, dw


@lowering(aten._weight_norm_interface_backward.default, accumulate=("saved_v", "saved_g"))
def weight_norm_backward(
    grad_w: Array, saved_v: Array, saved_g: Array, saved_norms: Array, dim: int
) -> tuple[Array, Array]:
    """The gradients of v and g for w = g * v / norm(v), the norm over every dim but ``dim``."""
    # The norm's own gradient: what of grad_w points along v goes to g, the rest to v.
    others = tuple(d for d in range(saved_v.ndim) if d != wrap_dim(dim, saved_v.ndim))
    along = jnp.sum(grad_w * saved_v, axis=others, keepdims=True)
    grad_v = saved_g / saved_norms * (grad_w - saved_v * along / (saved_norms * saved_norms))
    return grad_v, along / saved_norms
