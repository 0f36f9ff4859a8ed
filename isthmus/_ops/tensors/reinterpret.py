"""The bytes of a storage seen as another dtype: ``view(dtype)``, ``view_as_real``, ``real``, ``imag``."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from isthmus._ops.common import Array, DType


def reinterpret(value: Array, dtype: DTypeLike) -> Array:
    """Return the elements of ``value``, in row-major order, with their bytes read as ``dtype``."""
    dtype = np.dtype(dtype)
    if value.dtype == dtype:
        return value
    parts = _plain(value.reshape(-1))
    real = _real_of(dtype)
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
    ratio = dtype.itemsize // flat.dtype.itemsize
    if ratio > 1:
        flat = flat.reshape(-1, ratio)
    return lax.bitcast_convert_type(flat, dtype).reshape(-1)
