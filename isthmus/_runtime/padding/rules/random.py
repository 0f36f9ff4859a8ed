"""Random bits: the generator counts true elements, so that the numbers are those of the exact program."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import random as generators
from jax.extend.core import JaxprEqn

from isthmus._runtime.padding.interpreter import Interpreter, out_shape, rule
from isthmus._runtime.padding.layout import PaddedArray, length
from isthmus._runtime.padding.sizes import MOST_ELEMENTS, Refused


@rule("random_bits")
def random_bits(run: Interpreter, eqn: JaxprEqn, key: PaddedArray) -> PaddedArray:
    """Return the bits that Threefry makes of each element's number in the true shape.

    JAX's partitionable Threefry numbers the elements of the result; rbg and others depend on the shape as a whole.
    """
    shape, width = out_shape(eqn), eqn.params["bit_width"]
    partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    if "fry" not in str(key.array.dtype) or not partitionable or key.shape:
        raise Refused("random_bits", "of another generator than Threefry")
    axes = tuple(run.layout(n) for n in shape)
    lengths = [length(axis) for axis in axes]
    if math.prod(lengths) > MOST_ELEMENTS:
        raise Refused("random_bits", "more than 2^31")
    number, stride = jnp.zeros(lengths, jnp.uint32), jnp.ones((), jnp.uint32)
    for i in reversed(range(len(shape))):
        number = number + lax.broadcasted_iota(jnp.uint32, lengths, i) * stride
        stride = stride * run.sizes.true(shape[i], jnp.uint32)
    words = jax.random.key_data(key.array)
    first, second = (jnp.broadcast_to(word, lengths) for word in (words[0], words[1]))
    high, low = generators.threefry2x32_p.bind(first, second, jnp.zeros_like(number), number)
    if width == 64:
        bits = (high.astype(jnp.uint64) << jnp.uint64(32)) | low.astype(jnp.uint64)
    else:
        bits = (high ^ low).astype(f"uint{width}")
    return PaddedArray(bits, shape, axes)
