"""New tensors of random numbers: one program where torch would take an ``empty`` and an in-place op."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isthmus._graph.names import aten
from isthmus._ops.common import cast
from isthmus._ops.random.sampling import between, integers, normal_numbers
from isthmus._ops.registry import lowering
from isthmus._runtime.dtypes import to_jax_dtype

Array = Any


def _float(dtype: Any) -> np.dtype[Any]:
    return to_jax_dtype(torch.get_default_dtype()) if dtype is None else np.dtype(dtype)


def _integer(dtype: Any) -> np.dtype[Any]:
    # The schema's default is torch's number for int64, which stands here where no dtype was given.
    return np.dtype(np.int64) if dtype is None or isinstance(dtype, int) else np.dtype(dtype)


def _rand(op: Any) -> None:
    @lowering(op, random=True)
    def rand(size: list[int], rng: Any, dtype: Any = None) -> Array:
        """Uniform numbers in [0, 1)."""
        return between(rng, size, _float(dtype), 0.0, 1.0)


def _randn(op: Any) -> None:
    @lowering(op, random=True)
    def randn(size: list[int], rng: Any, dtype: Any = None) -> Array:
        """Standard normal numbers."""
        return normal_numbers(rng, size, _float(dtype), 0.0, 1.0)


def _randint(op: Any) -> None:
    @lowering(op, random=True, dynamic=("high",))
    def randint(high: Any, size: list[int], rng: Any, dtype: Any = None) -> Array:
        """Uniform integers in [0, high)."""
        return integers(rng, size, _integer(dtype), 0, high)


def _randint_low(op: Any) -> None:
    @lowering(op, random=True, dynamic=("low", "high"))
    def randint(low: Any, high: Any, size: list[int], rng: Any, dtype: Any = None) -> Array:
        """Uniform integers in [low, high)."""
        return integers(rng, size, _integer(dtype), low, high)


def _randperm(op: Any) -> None:
    @lowering(op, random=True)
    def randperm(n: int, rng: Any, dtype: Any = None) -> Array:
        """The integers below ``n`` in random order."""
        return cast(jax.random.permutation(rng, jnp.arange(n)), _integer(dtype))


def _like(array: Array, dtype: Any) -> np.dtype[Any]:
    return array.dtype if dtype is None else np.dtype(dtype)


def _rand_like(op: Any) -> None:
    @lowering(op, random=True)
    def rand_like(self: Array, rng: Any, dtype: Any = None) -> Array:
        """Uniform numbers in [0, 1) in the shape of ``self``."""
        return between(rng, self.shape, _like(self, dtype), 0.0, 1.0)


def _randn_like(op: Any) -> None:
    @lowering(op, random=True)
    def randn_like(self: Array, rng: Any, dtype: Any = None) -> Array:
        """Standard normal numbers in the shape of ``self``."""
        return normal_numbers(rng, self.shape, _like(self, dtype), 0.0, 1.0)


def _randint_like(op: Any) -> None:
    @lowering(op, random=True, dynamic=("high",))
    def randint_like(self: Array, high: Any, rng: Any, dtype: Any = None) -> Array:
        """Uniform integers in [0, high) in the shape of ``self``."""
        return integers(rng, self.shape, _like(self, dtype), 0, high)


def _randint_like_low(op: Any) -> None:
    @lowering(op, random=True, dynamic=("low", "high"))
    def randint_like(self: Array, low: Any, high: Any, rng: Any, dtype: Any = None) -> Array:
        """Uniform integers in [low, high) in the shape of ``self``."""
        return integers(rng, self.shape, _like(self, dtype), low, high)


for _file, *_ops in (
    (_rand, aten.rand.default, aten.rand.generator),
    (_randn, aten.randn.default, aten.randn.generator),
    (_randint, aten.randint.default, aten.randint.generator),
    (_randint_low, aten.randint.low, aten.randint.low_generator),
    (_randperm, aten.randperm.default, aten.randperm.generator),
    (_rand_like, aten.rand_like.default, aten.rand_like.generator),
    (_randn_like, aten.randn_like.default, aten.randn_like.generator),
    (_randint_like, aten.randint_like.default, aten.randint_like.generator),
    (_randint_like_low, aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype),
):
    for _op in _ops:
        _file(_op)
