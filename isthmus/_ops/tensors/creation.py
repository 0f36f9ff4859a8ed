"""Copies, casts, fills and new tensors: ops whose result is a constant or another tensor's elements."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.typing import DTypeLike

from isthmus._graph.arguments import Value
from isthmus._graph.names import aten, prims
from isthmus._ops.common import (
    Array,
    DType,
    Ints,
    Number,
    Operand,
    Scalar,
    accumulation_dtype,
    cast,
    divide,
    is_dimension,
)
from isthmus._ops.registry import lowering
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus.errors import Unsupported


@lowering(aten.clone.default)
def clone(self: Array) -> Array:
    """The same elements in memory of their own; the memory format is the result's strides."""
    return self


@lowering(aten._to_copy.default)
def to_copy(self: Array, dtype: DTypeLike | None = None) -> Array:
    """The same elements in another dtype."""
    return self if dtype is None else cast(self, dtype)


@lowering(aten.copy.default)
def copy(self: Array, src: Array) -> Array:
    """``src`` in the shape and dtype of ``self``."""
    return jnp.broadcast_to(cast(src, self.dtype), self.shape)


@lowering(aten.fill.Scalar, aten.fill.Tensor)
def fill(self: Array, value: Operand) -> Array:
    """Every element ``value``, a number or a 0-dim tensor."""
    return jnp.broadcast_to(cast(value, self.dtype), self.shape)


@lowering(aten.zero.default)
def zero(self: Array) -> Array:
    """Every element zero."""
    return jnp.zeros_like(self)


def _default_dtype() -> DType:
    return to_jax_dtype(torch.get_default_dtype())


def _dtype_of(value: Scalar) -> DType:
    """Return the dtype ``torch.full`` gives a number."""
    kind = value.kind if isinstance(value, Number) else type(value)
    if kind is complex:
        return np.dtype(np.complex128 if _default_dtype() == np.float64 else np.complex64)
    return {bool: np.dtype(np.bool_), int: np.dtype(np.int64)}.get(kind, _default_dtype())


@lowering(aten.full.default)
def full(size: Ints, fill_value: Scalar, dtype: DTypeLike | None = None) -> Array:
    """A new tensor of one number."""
    return jnp.broadcast_to(cast(fill_value, _dtype_of(fill_value) if dtype is None else dtype), tuple(size))


@lowering(aten.full_like.default, aten.new_full.default)
def full_like(
    self: Array, fill_value: Scalar, size: Ints | None = None, dtype: DTypeLike | None = None
) -> Array:
    """A new tensor of one number in the dtype of another, and in its shape unless a size is named."""
    shape = self.shape if size is None else tuple(size)
    return jnp.broadcast_to(cast(fill_value, self.dtype if dtype is None else dtype), shape)


@lowering(aten.zeros.default)
def zeros(size: Ints, dtype: DTypeLike | None = None) -> Array:
    """A new tensor of zeros."""
    return jnp.zeros(tuple(size), _default_dtype() if dtype is None else dtype)


def count(length: int, start: Operand, step: Scalar, dtype: DType) -> Array:
    """Count ``length`` steps; torch counts float32 in double, half types in float and every integer in int64."""
    compute_dtype = accumulation_dtype(dtype) if dtype.itemsize == 2 else jnp.float64
    compute_dtype = compute_dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.int64
    return cast(
        cast(start, compute_dtype) + cast(step, compute_dtype) * jnp.arange(length, dtype=compute_dtype),
        dtype,
    )


@lowering(aten.arange.start_step, static=("start", "end", "step"))
def arange(start: Operand, end: Operand, step: Scalar = 1, dtype: DTypeLike | None = None) -> Array:
    """The numbers from ``start`` to ``end``; torch says how many they are and of which dtype."""
    if is_dimension(start) or is_dimension(end):
        return _symbolic_arange(start, end, step, dtype)
    asked = None if dtype is None else to_torch_dtype(dtype)
    shadow = torch.ops.aten.arange.start_step(start, end, step, dtype=asked, device="meta")
    if shadow.dtype is torch.bool or shadow.dtype.is_complex:
        raise Unsupported(f"torch has no kernel for {shadow.dtype} and says so")
    return count(shadow.shape[0], start, step, to_jax_dtype(shadow.dtype))


def _symbolic_arange(start: Value, end: Value, step: Scalar, dtype: DTypeLike | None) -> Array:
    """Return the integers between ends of which one is a size that only the exported program knows."""
    if not isinstance(step, int) or isinstance(start, float) or isinstance(end, float):
        raise Unsupported(f"the numbers from {start} to {end} by {step}")
    length = jax.core.max_dim((end - start + step - (1 if step > 0 else -1)) // step, 0)
    return count(length, jnp.asarray(start, jnp.int64), step, np.dtype(dtype or np.int64))


@lowering(aten.ones.default)
def ones(size: Ints, dtype: DTypeLike | None = None) -> Array:
    """A new tensor of ones."""
    return jnp.ones(tuple(size), _default_dtype() if dtype is None else dtype)


@lowering(aten.ones_like.default, aten.new_ones.default)
def ones_like(self: Array, size: Ints | None = None, dtype: DTypeLike | None = None) -> Array:
    """A new tensor of ones in the dtype of another, and in its shape unless a size is named."""
    return jnp.ones(self.shape if size is None else tuple(size), self.dtype if dtype is None else dtype)


@lowering(aten.scalar_tensor.default)
def scalar_tensor(s: Scalar, dtype: DTypeLike | None = None) -> Array:
    """A number as a 0-dim tensor."""
    return cast(s, _default_dtype() if dtype is None else dtype)


@lowering(aten.eye.default, aten.eye.m)
def eye(n: int, m: int | None = None, dtype: DTypeLike | None = None) -> Array:
    """Ones on the main diagonal of a matrix."""
    return jnp.eye(n, m, dtype=_default_dtype() if dtype is None else dtype)


def _spaced(start: Operand, end: Operand, steps: int, result: DType) -> Array:
    """Return evenly spaced numbers, counted from whichever end is nearer so that both ends are exact."""
    if jnp.issubdtype(result, jnp.integer):  # torch makes the ends integers first
        start, end = cast(start, result), cast(end, result)
    compute_dtype = _compute_dtype(result)
    first, last = cast(start, compute_dtype), cast(end, compute_dtype)
    if steps <= 1:
        return jnp.broadcast_to(first, (steps,))
    step = divide(last - first, jnp.asarray(steps - 1, compute_dtype))
    index = jnp.arange(steps)
    return jnp.where(index < steps // 2, first + step * index, last - step * (steps - 1 - index)).astype(
        compute_dtype
    )


def _result_dtype(dtype: DTypeLike | None, *ends: Operand) -> DType:
    if dtype is not None:
        return np.dtype(dtype)
    return _dtype_of(1j) if any(_is_complex(e) for e in ends) else _default_dtype()


def _is_complex(end: Operand) -> bool:
    return end.kind is complex if isinstance(end, Number) else bool(jnp.iscomplexobj(end))


def _compute_dtype(dtype: DType) -> DType:
    return accumulation_dtype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else np.dtype(np.float64)


@lowering(
    aten.linspace.default,
    aten.linspace.Tensor_Tensor,
    aten.linspace.Tensor_Scalar,
    aten.linspace.Scalar_Tensor,
)
def linspace(start: Operand, end: Operand, steps: int, dtype: DTypeLike | None = None) -> Array:
    """Evenly spaced numbers from ``start`` to ``end``."""
    result = _result_dtype(dtype, start, end)
    return cast(_spaced(start, end, steps, result), result)


@lowering(
    aten.logspace.default,
    aten.logspace.Tensor_Tensor,
    aten.logspace.Tensor_Scalar,
    aten.logspace.Scalar_Tensor,
)
def logspace(
    start: Operand, end: Operand, steps: int, base: float = 10.0, dtype: DTypeLike | None = None
) -> Array:
    """Powers of ``base`` with evenly spaced exponents."""
    result = _result_dtype(dtype, start, end)
    exponents = _spaced(start, end, steps, result)
    return cast(jnp.power(jnp.asarray(base, exponents.dtype), exponents), result)


@lowering(aten.kaiser_window.default, aten.kaiser_window.periodic, aten.kaiser_window.beta)
def kaiser_window(
    window_length: int, periodic: bool = True, beta: float = 12.0, dtype: DTypeLike | None = None
) -> Array:
    """A Kaiser window; a periodic one is the front of one that is longer by one."""
    result = _result_dtype(dtype)
    if window_length < 2:
        return jnp.ones((window_length,), result)
    half = (window_length if periodic else window_length - 1) / 2
    x = (jnp.arange(window_length, dtype=_compute_dtype(result)) - half) / half
    inner = beta * jnp.sqrt(jnp.maximum(1 - x * x, 0))
    # Scaled by exponentials: the plain functions of a large beta would overflow.
    ratio = lax.bessel_i0e(inner) / lax.bessel_i0e(jnp.asarray(beta, inner.dtype))
    return cast(ratio * jnp.exp(jnp.abs(inner) - abs(beta)), result)


# Primitive ops that torch's decompositions leave in a graph


@lowering(prims.iota.default)
def iota(length: int, start: int, step: int, dtype: DTypeLike, requires_grad: bool = False) -> Array:
    """Return ``length`` numbers from ``start`` on."""
    return (jnp.arange(length, dtype=jnp.int64) * step + start).astype(dtype)


@lowering(prims.convert_element_type.default)
def convert_element_type(a: Array, dtype: DTypeLike) -> Array:
    """Convert as torch does."""
    return cast(a, dtype)


@lowering(prims.device_put.default)
def device_put(a: Array) -> Array:
    """Return the same elements; where they live is not a program's concern."""
    return a
