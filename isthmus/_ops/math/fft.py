"""Discrete Fourier transforms: real to complex, complex to real, complex to complex."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import LAPACK, Array, cast, wrap_dim
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported

_DOUBLE = (jnp.float64, jnp.complex128)


def _check(x: Array, dim: Sequence[int]) -> tuple[int, ...]:
    """Return the dims from the front."""
    dims = tuple(wrap_dim(d, x.ndim) for d in dim)
    if len(set(dims)) != len(dims) or x.ndim == 0:
        raise Unsupported("a Fourier transform names each dim once")
    return dims


def _scaled(x: Array, normalization: int, sizes: Sequence[int]) -> Array:
    """Return ``x`` by torch's ``fft_norm_mode``: 0 as it is, 1 over the root of the size, 2 over the size."""
    count = math.prod(sizes)
    if normalization == 0 or count == 0:
        return x
    if normalization not in (1, 2):
        raise Unsupported(f"unknown normalization {normalization} of a Fourier transform")
    return x * cast(1 / math.sqrt(count) if normalization == 1 else 1 / count, x.dtype)


def _along(x: Array, dims: Sequence[int], forward: bool) -> Array:
    # One dim at a time: XLA transforms at most three, and only the last ones.
    for dim in reversed(dims):
        if x.size:
            x = jnp.fft.fft(x, axis=dim) if forward else jnp.fft.ifft(x, axis=dim, norm="forward")
    return x


@lowering(aten._fft_c2c.default, dtypes=LAPACK)
def fft_c2c(self: Array, dim: list[int], normalization: int, forward: bool) -> Array:
    """The complex transform over ``dim``, in either direction."""
    if not dim:
        return self
    dims = _check(self, dim)
    return _scaled(_along(self, dims, forward), normalization, [self.shape[d] for d in dims])


@lowering(aten._fft_r2c.default, dtypes=LAPACK)
def fft_r2c(self: Array, dim: list[int], normalization: int, onesided: bool) -> Array:
    """The transform of real values; ``onesided`` leaves out the mirrored half of the last of ``dim``."""
    dims = _check(self, dim)
    complex_dtype = jnp.complex128 if self.dtype in _DOUBLE else jnp.complex64
    sizes = [self.shape[d] for d in dims]
    if not onesided:
        return _scaled(_along(self.astype(complex_dtype), dims, forward=True), normalization, sizes)
    last = dims[-1]
    if self.size == 0:
        half = self.shape[last] // 2 + 1
        return jnp.zeros((*self.shape[:last], half, *self.shape[last + 1 :]), complex_dtype)
    half_spectrum = jnp.fft.rfft(self, axis=last).astype(complex_dtype)
    return _scaled(_along(half_spectrum, dims[:-1], forward=True), normalization, sizes)


@lowering(aten._fft_c2r.default, dtypes=LAPACK)
def fft_c2r(self: Array, dim: list[int], normalization: int, last_dim_size: int) -> Array:
    """The real values of which ``self`` is the onesided transform, ``last_dim_size`` of them along the last dim."""
    dims = _check(self, dim)
    last = dims[-1]
    if self.shape[last] != last_dim_size // 2 + 1:
        raise Unsupported(f"a half of size {self.shape[last]} for a signal of size {last_dim_size}")
    real_dtype = jnp.float64 if self.dtype in _DOUBLE else jnp.float32
    sizes = [*(self.shape[d] for d in dims[:-1]), last_dim_size]
    if self.size == 0:
        return jnp.zeros((*self.shape[:last], last_dim_size, *self.shape[last + 1 :]), real_dtype)
    # The last dim comes last: only there does the result become real.
    inner = _along(self, dims[:-1], forward=False)
    signal = jnp.fft.irfft(inner, n=last_dim_size, axis=last, norm="forward").astype(real_dtype)
    return _scaled(signal, normalization, sizes)
