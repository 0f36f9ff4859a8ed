"""Pooling over windows: maxima with torch's choice of index, averages with torch's divisors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.names import aten
from isthmus._ops.common import accumulation_dtype, cast, keyword_signature
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus.errors import Unsupported

Array = Any
_NOWHERE = np.iinfo(np.int32).max


def _each(value: Sequence[int], n: int) -> list[int]:
    """Return one value per spatial dim: torch lets one stand for all."""
    return list(value) * n if len(value) == 1 else list(value)


def _strides(stride: Sequence[int], kernel: Sequence[int], n: int) -> list[int]:
    return _each(stride, n) if len(stride) else list(kernel)


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Return how many windows fit; with ``ceil_mode`` the last may hang over, but starts inside."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (room + stride - 1 if ceil_mode else room) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


def _margins(
    sizes: Sequence[int], counts: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any
) -> list[tuple[int, int]]:
    """Return the padding below and above each dim that makes room for exactly ``counts`` windows."""
    found = []
    for size, count, k, s, p, d in zip(sizes, counts, kernel, stride, padding, dilation, strict=True):
        found.append((p, max((count - 1) * s + d * (k - 1) + 1 - size - p, 0)))
    return found


def better(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the larger (value, index) pair: of equals the first, of nans the last, as torch scans."""
    (x, i), (y, j) = a, b
    if jnp.issubdtype(x.dtype, jnp.floating):
        nan_x, nan_y = jnp.isnan(x), jnp.isnan(y)
        take = (y > x) & ~nan_x | (nan_y & ~nan_x) | ((x == y) & (j < i)) | (nan_x & nan_y & (j > i))
    else:
        take = (y > x) | ((x == y) & (j < i))
    return jnp.where(take, y, x), jnp.where(take, j, i)


def _lowest(dtype: Any) -> Any:
    floating = jnp.issubdtype(dtype, jnp.floating)
    return np.asarray(-np.inf if floating else np.iinfo(dtype).min, dtype)


def _positions(x: Array, n: int) -> Array:
    """Return for each element where it is in its flattened spatial dims."""
    spatial = x.shape[x.ndim - n :]
    flat = jnp.arange(math.prod(spatial), dtype=jnp.int32).reshape(spatial)
    return jnp.broadcast_to(flat, x.shape)


def _max_pool(n: int, op: Any) -> None:
    @lowering(op)
    def max_pool(
        self: Array,
        kernel_size: list[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> tuple[Array, Array]:
        """The largest element of each window and its place in the flattened spatial dims."""
        kernel, pad, spread = _each(kernel_size, n), _each(padding, n), _each(dilation, n)
        steps = _strides(stride, kernel, n)
        lead, sizes = self.shape[:-n], self.shape[-n:]
        counts = [pooled_size(*a, ceil_mode) for a in zip(sizes, kernel, steps, pad, spread, strict=True)]
        if 0 in lead:
            shape = (*lead, *counts)
            return jnp.zeros(shape, self.dtype), jnp.zeros(shape, jnp.int64)
        ones, none = (1,) * len(lead), [(0, 0)] * len(lead)
        values, indices = jax.lax.reduce_window(
            (self, _positions(self, n)),
            (_lowest(self.dtype), np.asarray(_NOWHERE, np.int32)),
            better,
            (*ones, *kernel),
            (*ones, *steps),
            [*none, *_margins(sizes, counts, kernel, steps, pad, spread)],
            window_dilation=(*ones, *spread),
        )
        return values, indices.astype(jnp.int64)


def scatter_grad(grad: Array, like: Array, indices: Array, n: int) -> Array:
    """Return each gradient added at its index in the flattened spatial dims of ``like``."""
    if grad.size == 0:
        return jnp.zeros(like.shape, like.dtype)
    wide = accumulation_dtype(grad.dtype)
    rows, area = math.prod(like.shape[:-n]), math.prod(like.shape[-n:])
    at = (jnp.arange(rows)[:, None], indices.reshape(rows, -1))
    total = jnp.zeros((rows, area), wide).at[at].add(cast(grad, wide).reshape(rows, -1))
    return cast(total.reshape(like.shape), like.dtype)


def _max_pool_backward(n: int, op: Any) -> None:
    @lowering(op)
    def max_pool_backward(
        grad_output: Array,
        self: Array,
        kernel_size: list[int],
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        ceil_mode: bool,
        indices: Array,
    ) -> Array:
        """Each window's gradient, added where its maximum was."""
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise Unsupported(f"torch has no kernel for {self.dtype} and says so")
        return scatter_grad(grad_output, self, indices, n)


_max_pool(2, aten.max_pool2d_with_indices.default)
_max_pool(3, aten.max_pool3d_with_indices.default)
_max_pool_backward(2, aten.max_pool2d_with_indices_backward.default)
_max_pool_backward(3, aten.max_pool3d_with_indices_backward.default)


def _divisor(
    sizes: Any, counts: Any, kernel: Any, stride: Any, padding: Any, include_pad: bool, override: int | None
) -> Any:
    """Return what each window's sum is divided by, as torch counts it."""
    if override is not None:
        return np.full(counts, override)
    lengths = []
    for size, count, k, s, p in zip(sizes, counts, kernel, stride, padding, strict=True):
        start = np.arange(count) * s - p
        end = np.minimum(start + k, size + p)
        if not include_pad:
            start, end = np.maximum(start, 0), np.minimum(end, size)
        lengths.append(end - start)
    found = lengths[0]
    for length in lengths[1:]:
        found = found[..., None] * length
    return found


def avg_pool(
    x: Array,
    n: int,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    include_pad: bool,
    override: int | None,
) -> Array:
    """Return the average of each window in the dtype of ``x``, in which it is accumulated."""
    steps = _strides(stride, kernel, n)
    lead, sizes = x.shape[:-n], x.shape[-n:]
    counts = [pooled_size(*a, 1, ceil_mode) for a in zip(sizes, kernel, steps, padding, strict=True)]
    if 0 in lead:
        return jnp.zeros((*lead, *counts), x.dtype)
    ones, none = (1,) * len(lead), [(0, 0)] * len(lead)
    margins = [*none, *_margins(sizes, counts, kernel, steps, padding, [1] * n)]
    zero = np.zeros((), x.dtype)
    total = jax.lax.reduce_window(x, zero, jax.lax.add, (*ones, *kernel), (*ones, *steps), margins)
    if override == 0:
        raise Unsupported("a divisor of zero")
    divisor = _divisor(sizes, counts, kernel, steps, padding, include_pad, override)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return total / divisor.astype(x.dtype)
    return jax.lax.div(total, jnp.broadcast_to(jnp.asarray(divisor, x.dtype), total.shape))


def _transpose(function: Any, shape: tuple[int, ...], dtype: Any, grad: Array) -> Array:
    """Return the transpose of a linear function applied to ``grad``."""
    like = jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
    (found,) = jax.linear_transpose(function, like)(grad)
    return found


def _avg_pools(n: int, op: Any, backward: Any) -> None:
    @lowering(op)
    def forward_lowering(
        self: Array,
        kernel_size: list[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        """The average of each window."""
        kernel, pad = _each(kernel_size, n), _each(padding, n)
        x = cast(self, accumulation_dtype(self.dtype))
        found = avg_pool(x, n, kernel, stride, pad, ceil_mode, count_include_pad, divisor_override)
        return cast(found, self.dtype)

    @lowering(backward)
    def backward_lowering(
        grad_output: Array,
        self: Array,
        kernel_size: list[int],
        stride: list[int],
        padding: list[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Array:
        """Each window's gradient, shared by its elements."""
        kernel, pad, wide = _each(kernel_size, n), _each(padding, n), accumulation_dtype(self.dtype)
        options = (n, kernel, stride, pad, ceil_mode, count_include_pad, divisor_override)
        if 0 in self.shape:
            return jnp.zeros(self.shape, self.dtype)
        found = _transpose(lambda x: avg_pool(x, *options), self.shape, wide, cast(grad_output, wide))
        return cast(found, self.dtype)


_avg_pools(2, aten.avg_pool2d.default, aten.avg_pool2d_backward.default)
_avg_pools(3, aten.avg_pool3d.default, aten.avg_pool3d_backward.default)


def _unpool(op: Any, n: int, names: tuple[str, ...]) -> None:
    def lowered(**values: Any) -> Array:
        x, indices, size = values["self"], values["indices"], values["output_size"]
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise Unsupported(f"torch has no kernel for {x.dtype} and says so")
        rows, area = math.prod(x.shape[:-n]), math.prod(size)
        flat = indices.reshape(rows, math.prod(x.shape[-n:]))
        require(
            (flat >= 0) & (flat < area),
            RuntimeError,
            f"Found an invalid max index (output volumes are of size {'x'.join(map(str, size))})",
        )
        out = jnp.zeros((rows, area), x.dtype).at[jnp.arange(rows)[:, None], flat].set(x.reshape(flat.shape))
        return out.reshape(*x.shape[:-n], *size)

    lowered.__doc__ = "Zeros, with each element put back at its index."
    lowered.__signature__ = keyword_signature(["self", "indices", "output_size", *names])  # type: ignore[attr-defined]
    lowering(op)(lowered)


_unpool(aten.max_unpool2d.default, 2, ())
_unpool(aten.max_unpool3d.default, 3, ("stride", "padding"))
