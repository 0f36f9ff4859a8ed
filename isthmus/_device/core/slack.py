"""``Slack``: what a buffer holds while its array is larger than its storage.

A program for a range of sizes (``_runtime/padding``) returns padded arrays. A buffer takes such an array as it is,
inside of a ``Slack``, and the next program of that kind takes it from there: nothing is cut and padded again between
two steps, and a cache that grows by a token is updated in place.

``Slack`` is a marker (``donation.MARKERS``): no other program takes it for an array. A read or a write of the buffer by
any other way (an eager op, ``Buffer.value``, ``Buffer.bind``, a transfer, an exact program of lazy mode) settles the
marker first, which puts the exact array into the buffer. So only lazy mode's leaves (``_lazy/trace.py``), compiled
graphs (``_dynamo/ranged.py``) and eager plans for a range of sizes (``_lazy/eager_ranges.py``) know of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._runtime import compiler, counters, private

Array = jax.Array
# Arrays of at most so many bytes go through the host, which needs no program; larger ones only on the CPU.
# On the CPU device memory is the host's, so cutting there is a copy and no transfer.
_THROUGH_HOST = 2**20


class Slack:
    """An array whose first elements along every axis are the contents of a storage of this shape."""

    __slots__ = ("array", "shape", "unpadded")

    def __init__(self, array: Array, shape: Sequence[int]) -> None:
        self.array, self.shape = array, tuple(shape)
        # What ``exact`` has made; a buffer that was settled holds it too (``donation.is_unshared``).
        self.unpadded: Array | None = None

    def exact(self) -> Array:
        """Return the contents without padding; made once, and again where a program that failed has taken it."""
        if self.unpadded is None or self.unpadded.is_deleted():
            # ``isthmus.metrics`` shows how often padding is taken off: often means that a mode does not know
            # it.
            counters.count("padding removed")
            self.unpadded = cut(self.array, self.shape)
        return self.unpadded

    def is_deleted(self) -> bool:
        """Return whether a program has taken the memory."""
        return self.array.is_deleted()


def cut(array: Array, shape: tuple[int, ...]) -> Array:
    """Return the first elements of an array along every axis."""
    if _through_host(array):
        part = np.asarray(array)[tuple(slice(0, n) for n in shape)]
        return private.putter(compiler.default_device())(part.copy())
    with compiler.scoped_x64():
        return jax.lax.slice(array, [0] * len(shape), shape)


def padded(array: Array, shape: tuple[int, ...]) -> Array:
    """Return a new array with zeros past the end of every axis."""
    counters.count("padding added")
    if _through_host(array):
        host = np.zeros(shape, array.dtype)
        host[tuple(slice(0, n) for n in array.shape)] = np.asarray(array)
        return private.putter(compiler.default_device())(host)
    with compiler.scoped_x64():
        config = [(0, m - n, 0) for n, m in zip(array.shape, shape, strict=True)]
        return jax.lax.pad(array, jnp.zeros((), array.dtype), config)


def _through_host(array: Array) -> bool:
    return compiler.platform() == "cpu" or array.nbytes <= _THROUGH_HOST
