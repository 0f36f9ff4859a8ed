"""New tensors of random numbers: one program where torch would take an ``empty`` and an in-place op."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import DTypeLike

from isthmus._graph.names import aten
from isthmus._ops.common import Array, DType, Scalar, cast
from isthmus._ops.random.sampling import between, integers, normal_numbers
from isthmus._ops.registry import lowering
from isthmus._runtime.dtypes import to_jax_dtype


def _float(dtype: DTypeLike | None) -> DType:
    return to_jax_dtype(torch.get_default_dtype()) if dtype is None else np.dtype(dtype)


def _integer(dtype: DTypeLike | int | None) -> DType:
    # The schema's default is torch's number for int64, which stands here where no dtype was given.
    return np.dtype(np.int64) if dtype is None or isinstance(dtype, int) else np.dtype(dtype)


def _like(array: Array, dtype: DTypeLike | None) -> DType:
    return array.dtype if dtype is None else np.dtype(dtype)


@lowering(aten.rand.default, aten.rand.generator, random=True)
def rand(size: list[int], rng: Array, dtype: DTypeLike | None = None) -> Array:
    """Uniform numbers in [0, 1)."""
    return between(rng, size, _float(dtype), 0.0, 1.0)


@lowering(aten.randn.default, aten.randn.generator, random=True)
def randn(size: list[int], rng: Array, dtype: DTypeLike | None = None) -> Array:
    """Standard normal numbers."""
    return normal_numbers(rng, size, _float(dtype), 0.0, 1.0)


@lowering(aten.randint.default, aten.randint.generator, random=True, dynamic=("high",))
def randint(high: Scalar, size: list[int], rng: Array, dtype: DTypeLike | int | None = None) -> Array:
    """Uniform integers in [0, high)."""
    return integers(rng, size, _integer(dtype), 0, high)


@lowering(aten.randint.low, aten.randint.low_generator, random=True, dynamic=("low", "high"))
def randint_low(
    low: Scalar, high: Scalar, size: list[int], rng: Array, dtype: DTypeLike | int | None = None
) -> Array:
    """Uniform integers in [low, high)."""
    return integers(rng, size, _integer(dtype), low, high)


@lowering(aten.randperm.default, aten.randperm.generator, random=True)
def randperm(n: int, rng: Array, dtype: DTypeLike | int | None = None) -> Array:
    """The integers below ``n`` in random order."""
    return cast(jax.random.permutation(rng, jnp.arange(n)), _integer(dtype))


@lowering(aten.rand_like.default, aten.rand_like.generator, random=True)
def rand_like(self: Array, rng: Array, dtype: DTypeLike | None = None) -> Array:
    """Uniform numbers in [0, 1) in the shape of ``self``."""
    return between(rng, self.shape, _like(self, dtype), 0.0, 1.0)


@lowering(aten.randn_like.default, aten.randn_like.generator, random=True)
def randn_like(self: Array, rng: Array, dtype: DTypeLike | None = None) -> Array:
    """Standard normal numbers in the shape of ``self``."""
    return normal_numbers(rng, self.shape, _like(self, dtype), 0.0, 1.0)


@lowering(aten.randint_like.default, aten.randint_like.generator, random=True, dynamic=("high",))
def randint_like(self: Array, high: Scalar, rng: Array, dtype: DTypeLike | None = None) -> Array:
    """Uniform integers in [0, high) in the shape of ``self``."""
    return integers(rng, self.shape, _like(self, dtype), 0, high)


@lowering(
    aten.randint_like.low_dtype,
    aten.randint_like.low_generator_dtype,
    random=True,
    dynamic=("low", "high"),
)
def randint_like_low(
    self: Array, low: Scalar, high: Scalar, rng: Array, dtype: DTypeLike | None = None
) -> Array:
    """Uniform integers in [low, high) in the shape of ``self``."""
    return integers(rng, self.shape, _like(self, dtype), low, high)
