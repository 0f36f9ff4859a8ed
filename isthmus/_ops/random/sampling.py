"""Random numbers: each lowering gets ``rng``, a JAX key made from the seed and the offset of the call."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import DTypeLike

from isthmus._graph.names import aten
from isthmus._ops.common import (
    INEXACT,
    Array,
    DType,
    Ints,
    Operand,
    Scalar,
    accumulation_dtype,
    cast,
    promote,
)
from isthmus._ops.registry import lowering
from isthmus._ops.value_checks import require
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus.errors import Unsupported

_BERNOULLI_RANGE = (
    "Expected p_in >= 0 && p_in <= 1 to be true, but got false.  (Could this error message be improved?  "
    "If so, please report an enhancement request to PyTorch.)"
)


def digits(dtype: DTypeLike) -> int:
    """Return how many binary digits the significand of a floating dtype has."""
    return int(jnp.finfo(dtype).nmant) + 1


def unit(rng: Array, shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Return uniform numbers in [0, 1), all exact in ``dtype``, in the dtype torch computes it in."""
    # As many random bits as the significand holds: one more would round up to 1.
    width = 64 if digits(dtype) > 32 else 32
    bits = jax.random.bits(rng, tuple(shape), jnp.uint64 if width == 64 else jnp.uint32)
    return (bits >> (width - digits(dtype))).astype(accumulation_dtype(dtype)) * 2.0 ** -digits(dtype)


def between(rng: Array, shape: Sequence[int], dtype: DTypeLike, low: Scalar, high: Scalar) -> Array:
    """Return uniform numbers of ``dtype`` in [low, high)."""
    dtype = np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = between(rng, (*shape, 2), jnp.finfo(dtype).dtype, low, high)
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    _floating(dtype)
    acc_dtype = accumulation_dtype(dtype)
    a, b = cast(low, acc_dtype), cast(high, acc_dtype)
    out = cast(unit(rng, shape, dtype) * (b - a) + a, dtype)
    # Rounding may reach the upper end, which the interval does not include.
    end = cast(b, dtype)
    return jnp.where(out < end, out, jnp.nextafter(end, cast(a, dtype)))


def standard_normal(rng: Array, shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Return normal numbers of mean 0 and variance 1 in the dtype torch computes ``dtype`` in."""
    _floating(dtype)
    return jax.random.normal(rng, tuple(shape), accumulation_dtype(dtype))


def normal_numbers(rng: Array, shape: Sequence[int], dtype: DTypeLike, mean: Operand, std: Operand) -> Array:
    """Return normal numbers of ``dtype``; a complex one has ``mean`` in both its parts, as in torch."""
    acc_dtype = accumulation_dtype(dtype)
    center = cast(mean, acc_dtype)
    if jnp.issubdtype(acc_dtype, jnp.complexfloating) and not hasattr(mean, "ndim"):
        center = center * (1 + 1j)
    return cast(standard_normal(rng, shape, dtype) * cast(std, acc_dtype) + center, dtype)


def exponential_numbers(rng: Array, shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Return exponential numbers of rate 1, never 0, in the dtype torch computes ``dtype`` in."""
    acc_dtype = accumulation_dtype(dtype)
    u = unit(rng, shape, acc_dtype)
    # Zero would divide to infinity in `multinomial`; torch puts the smallest step there too.
    return jnp.where(u == 0, jnp.finfo(acc_dtype).eps / 2, -jnp.log1p(-u))


def integers(rng: Array, shape: Sequence[int], dtype: DTypeLike, low: Scalar, high: Scalar | None) -> Array:
    """Return uniform integers in [low, high) as ``dtype``; without ``high``, up to the dtype's largest."""
    dtype = np.dtype(dtype)
    start = cast(low, jnp.int64)
    span = (_last(dtype) - start + 1 if high is None else cast(high, jnp.int64) - start).astype(jnp.uint64)
    # The remainder of 64 bits is uneven by less than 2**-32 for every span torch's CPU draws from 32 bits.
    bits = jax.random.bits(rng, tuple(shape), jnp.uint64)
    # A span of 2**64 wraps to 0.
    drawn = start + jnp.where(span == 0, bits, bits % jnp.maximum(span, 1)).astype(jnp.int64)
    out = cast(drawn, dtype)
    if high is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 8:
        return out
    # Rounding to a narrow float may reach the upper end, which the interval does not include.
    beyond = out.astype(jnp.float64) >= cast(high, jnp.float64)
    return jnp.where(beyond, jnp.nextafter(out, jnp.full((), -jnp.inf, dtype)), out)


def _last(dtype: DType) -> int:
    """Return the largest value ``random_`` gives: for floats, the last of the integers they all hold."""
    if dtype == np.bool_:
        return 1
    if jnp.issubdtype(dtype, jnp.floating):
        return 1 << digits(dtype)
    if dtype == np.uint64:
        raise Unsupported("random_ without an end on uint64")
    return int(jnp.iinfo(dtype).max)


def _floating(dtype: DTypeLike) -> None:
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise Unsupported(f"a continuous distribution of {np.dtype(dtype)}")


def _dtype(dtype: DTypeLike | None) -> DType:
    return to_jax_dtype(torch.get_default_dtype()) if dtype is None else np.dtype(dtype)


@lowering(aten.uniform.default, random=True, dynamic=("from", "to"))
def uniform(self: Array, rng: Array, from_: Scalar = 0.0, to: Scalar = 1.0) -> Array:
    """Uniform numbers in [from, to)."""
    return between(rng, self.shape, self.dtype, from_, to)


@lowering(aten.normal_functional.default, random=True, dynamic=("mean", "std"))
def normal_functional(self: Array, rng: Array, mean: Operand = 0.0, std: Operand = 1.0) -> Array:
    """Normal numbers in the shape of ``self``."""
    return normal_numbers(rng, self.shape, self.dtype, mean, std)


@lowering(aten.normal.Tensor_float, random=True, dynamic=("std",))
def normal_tensor_float(mean: Array, rng: Array, std: Operand = 1.0) -> Array:
    """Normal numbers around each mean."""
    return normal_numbers(rng, mean.shape, mean.dtype, mean, std)


@lowering(aten.normal.float_Tensor, random=True, dynamic=("mean",))
def normal_float_tensor(mean: Operand, std: Array, rng: Array) -> Array:
    """Normal numbers of each deviation."""
    require(std >= 0, RuntimeError, "normal expects all elements of std >= 0.0")
    return normal_numbers(rng, std.shape, std.dtype, mean, std)


@lowering(aten.normal.Tensor_Tensor, random=True)
def normal_tensor_tensor(mean: Array, std: Array, rng: Array) -> Array:
    """Normal numbers around each mean, of each deviation."""
    if promote(mean, std)[1] != mean.dtype:
        raise Unsupported(
            "a deviation of a wider dtype than the mean: torch's shape rules and its CPU differ"
        )
    require(std >= 0, RuntimeError, "normal expects all elements of std >= 0.0")
    return normal_numbers(rng, jnp.broadcast_shapes(mean.shape, std.shape), mean.dtype, mean, std)


@lowering(aten.normal.float_float, random=True, dynamic=("mean", "std"))
def normal_float_float(
    mean: Operand, std: Operand, size: list[int], rng: Array, dtype: DTypeLike | None = None
) -> Array:
    """Normal numbers in a new tensor."""
    return normal_numbers(rng, size, _dtype(dtype), mean, std)


@lowering(aten.exponential.default, random=True, dynamic=("lambd",), accumulate=True, dtypes=INEXACT)
def exponential(self: Array, rng: Array, lambd: Scalar = 1.0) -> Array:
    """Exponential numbers of rate ``lambd``."""
    return exponential_numbers(rng, self.shape, self.dtype) / cast(lambd, self.dtype)


@lowering(aten.log_normal.default, random=True, dynamic=("mean", "std"), accumulate=True)
def log_normal(self: Array, rng: Array, mean: Operand = 1.0, std: Operand = 2.0) -> Array:
    """Numbers whose logarithms are normal."""
    return jnp.exp(normal_numbers(rng, self.shape, self.dtype, mean, std))


@lowering(aten.cauchy.default, random=True, dynamic=("median", "sigma"), accumulate=True, dtypes=INEXACT)
def cauchy(self: Array, rng: Array, median: Scalar = 0.0, sigma: Scalar = 1.0) -> Array:
    """Cauchy numbers around ``median``."""
    angle = math.pi * (unit(rng, self.shape, self.dtype) - 0.5)
    return cast(median, self.dtype) + cast(sigma, self.dtype) * jnp.tan(angle)


@lowering(aten.geometric.default, random=True, dynamic=("p",))
def geometric(self: Array, p: Scalar, rng: Array) -> Array:
    """How many trials of probability ``p`` it takes to succeed."""
    floating = jnp.issubdtype(self.dtype, jnp.floating)
    acc_dtype = accumulation_dtype(self.dtype) if floating else np.dtype(np.float64)
    # An exponential waiting time, rounded up, is geometric.
    waits = exponential_numbers(rng, self.shape, acc_dtype) / -jnp.log1p(-cast(p, acc_dtype))
    return cast(jnp.ceil(waits), self.dtype)


def _successes(rng: Array, shape: Sequence[int], p: Array) -> Array:
    dtype = p.dtype if p.dtype == np.float64 else np.dtype(np.float32)
    return unit(rng, shape, dtype) < cast(p, dtype)


@lowering(aten.bernoulli.default, random=True, dtypes=INEXACT)
def bernoulli(self: Array, rng: Array) -> Array:
    """1 with the probability each element says, else 0."""
    require((self >= 0) & (self <= 1), RuntimeError, _BERNOULLI_RANGE)
    return cast(_successes(rng, self.shape, self), self.dtype)


@lowering(aten.bernoulli.p, random=True, dynamic=("p",))
def bernoulli_p(self: Array, p: Scalar, rng: Array) -> Array:
    """1 with probability ``p``, else 0."""
    return cast(_successes(rng, self.shape, cast(p, np.float64).astype(np.float32)), self.dtype)


@lowering(aten.bernoulli.Tensor, random=True)
def bernoulli_tensor(self: Array, p: Array, rng: Array) -> Array:
    """1 with the probability the element of ``p`` says, else 0."""
    _floating(p.dtype)
    require((p >= 0) & (p <= 1), RuntimeError, _BERNOULLI_RANGE)
    return cast(_successes(rng, self.shape, jnp.broadcast_to(p, self.shape)), self.dtype)


@lowering(
    aten.random.default, getattr(aten.random, "from"), aten.random.to, random=True, dynamic=("from", "to")
)
def random(self: Array, rng: Array, from_: Scalar = 0, to: Scalar | None = None) -> Array:
    """Uniform integers in [from, to), or up to the dtype's largest value."""
    return integers(rng, self.shape, self.dtype, from_, to)


@lowering(aten.poisson.default, random=True, accumulate=True, dtypes=INEXACT)
def poisson(self: Array, rng: Array) -> Array:
    """Poisson counts of each rate."""
    require(self >= 0, RuntimeError, "invalid Poisson rate, expected rate to be non-negative")
    return jax.random.poisson(rng, self, self.shape, jnp.int64)


@lowering(aten.binomial.default, random=True, accumulate=True, dtypes=INEXACT)
def binomial(count: Array, prob: Array, rng: Array) -> Array:
    """How many of ``count`` trials of probability ``prob`` succeed."""
    counts, odds = jnp.broadcast_arrays(count, prob)
    return jax.random.binomial(rng, counts, odds, counts.shape, counts.dtype)


@lowering(aten._standard_gamma.default, random=True)
def standard_gamma(self: Array, rng: Array) -> Array:
    """Gamma numbers of each shape parameter, at least the smallest normal number as in torch."""
    acc_dtype = accumulation_dtype(self.dtype)
    out = cast(jax.random.gamma(rng, self.astype(acc_dtype), self.shape, acc_dtype), self.dtype)
    return jnp.maximum(out, jnp.finfo(self.dtype).tiny)


@lowering(aten._sample_dirichlet.default, random=True, accumulate=True)
def sample_dirichlet(self: Array, rng: Array) -> Array:
    """Dirichlet numbers along the last dim."""
    # In logarithms: a gamma number of a small parameter underflows, and a row of zeros has no sum to divide by.
    return jax.nn.softmax(jax.random.loggamma(rng, self, self.shape, self.dtype), axis=-1)


@lowering(aten.multinomial.default, random=True)
def multinomial(self: Array, num_samples: int, rng: Array, replacement: bool = False) -> Array:
    """Draw categories with the weights of each row, with or without putting them back."""
    weights = self.astype(accumulation_dtype(self.dtype))
    if replacement and num_samples > 1:
        return _with_replacement(weights, num_samples, rng)
    bad = "probability tensor contains either `inf`, `nan` or element < 0"
    require((weights >= 0) & (weights < jnp.inf), RuntimeError, bad)
    require(weights.sum(-1) > 0, RuntimeError, "invalid multinomial distribution (sum of probabilities <= 0)")
    # The largest weight / exponential is a category with its probability, the next one given the first, …
    races = weights / exponential_numbers(rng, weights.shape, weights.dtype)
    return jax.lax.top_k(races, num_samples)[1].astype(jnp.int64)


def _with_replacement(weights: Array, count: int, rng: Array) -> Array:
    """Draw by finding uniform numbers among the running sums of the weights."""
    refused = "invalid multinomial distribution (encountering probability entry {})"
    require(weights >= 0, RuntimeError, refused.format("< 0"))
    require(weights < jnp.inf, RuntimeError, refused.format("= infinity or NaN"))
    require(weights.sum(-1) > 0, RuntimeError, "invalid multinomial distribution (sum of probabilities <= 0)")
    rows = weights.reshape(-1, weights.shape[-1])
    sums = jnp.cumsum(rows, -1)
    points = unit(rng, (rows.shape[0], count), rows.dtype) * sums[:, -1:]
    categories = jax.vmap(lambda s, u: jnp.searchsorted(s, u, side="right"))(sums, points)
    # Rounding may reach the total, beyond the last category that has a weight.
    last = rows.shape[-1] - 1 - jnp.argmax(rows[:, ::-1] > 0, -1)
    return jnp.minimum(categories, last[:, None]).reshape(*weights.shape[:-1], count).astype(jnp.int64)


@lowering(aten.native_dropout.default, random=True, dynamic=("p",))
def native_dropout(input: Array, p: Scalar, train: bool | None, rng: Array) -> tuple[Array, Array]:
    """Zero elements with probability ``p`` and scale the rest; also where they were kept."""
    if train is False:
        return input, jnp.ones(input.shape, bool)
    # In double precision, as torch: the scale of p = 1/3 rounds once.
    keep = 1 - cast(p, np.float64)
    mask = _successes(rng, input.shape, keep.astype(np.float32))
    acc_dtype = accumulation_dtype(input.dtype)
    scale = cast(jnp.where(keep == 0, 0.0, 1 / keep), acc_dtype)
    return cast(jnp.where(mask, input.astype(acc_dtype) * scale, 0), input.dtype), mask


@lowering(aten.native_dropout_backward.default, dynamic=("scale",))
def native_dropout_backward(grad_output: Array, mask: Array, scale: Scalar) -> Array:
    """The gradient where elements were kept."""
    inexact = jnp.issubdtype(grad_output.dtype, jnp.inexact)
    result = grad_output.dtype if inexact else np.dtype(np.float32)
    acc_dtype = accumulation_dtype(result)
    return cast(jnp.where(mask, cast(grad_output, acc_dtype) * cast(scale, acc_dtype), 0), result)


# New tensors: one program where torch would take an ``empty`` and an in-place op


def _integer(dtype: DTypeLike | int | None) -> DType:
    # The schema's default is torch's number for int64, which stands here where no dtype was given.
    return np.dtype(np.int64) if dtype is None or isinstance(dtype, int) else np.dtype(dtype)


def _like(array: Array, dtype: DTypeLike | None) -> DType:
    return array.dtype if dtype is None else np.dtype(dtype)


@lowering(aten.rand.default, aten.rand.generator, random=True)
def rand(size: list[int], rng: Array, dtype: DTypeLike | None = None) -> Array:
    """Uniform numbers in [0, 1)."""
    return between(rng, size, _dtype(dtype), 0.0, 1.0)


@lowering(aten.randn.default, aten.randn.generator, random=True)
def randn(size: list[int], rng: Array, dtype: DTypeLike | None = None) -> Array:
    """Standard normal numbers."""
    return normal_numbers(rng, size, _dtype(dtype), 0.0, 1.0)


@lowering(
    aten.randint.default,
    aten.randint.generator,
    aten.randint.low,
    aten.randint.low_generator,
    random=True,
    dynamic=("low", "high"),
)
def randint(
    high: Scalar, size: Ints, rng: Array, low: Scalar = 0, dtype: DTypeLike | int | None = None
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


@lowering(
    aten.randint_like.default,
    aten.randint_like.generator,
    aten.randint_like.low_dtype,
    aten.randint_like.low_generator_dtype,
    random=True,
    dynamic=("low", "high"),
)
def randint_like(
    self: Array, high: Scalar, rng: Array, low: Scalar = 0, dtype: DTypeLike | None = None
) -> Array:
    """Uniform integers in [low, high) in the shape of ``self``."""
    return integers(rng, self.shape, _like(self, dtype), low, high)
