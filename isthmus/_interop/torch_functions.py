"""Torch code as JAX functions: its ops run on tracers in buffers, so every transformation of JAX's applies."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch

from isthmus._device.core import generator
from isthmus._interop import x64_primitive
from isthmus._interop.arrays import from_jax, to_jax
from isthmus._interop.autograd_functions import respected
from isthmus._interop.containers import teach
from isthmus._runtime.compiler import has_x64
from isthmus._runtime.private import is_traced
from isthmus.errors import IsthmusError

Function = Callable[..., Any]


def torch_function(function: Function) -> Function:
    """Return a torch function as a function of JAX arrays, to be used under any transformation of JAX's.

    Autograd may be used inside; a ``torch.autograd.Function`` keeps its own gradient.

    Arguments:
        function: a function of tensors, in pytrees if need be.

    Returns:
        A function of arrays with one more keyword argument, ``rng``: the JAX key that random numbers are drawn from.

    Example:
        >>> import jax, jax.numpy as jnp, torch, isthmus
        >>> loss = isthmus.torch_function(lambda x: torch.nn.functional.softplus(x).sum())
        >>> jax.grad(loss)(jnp.zeros(2)).tolist()
        [0.5, 0.5]
    """

    def run(rng: Any, args: Any, kwargs: Any) -> Any:
        with inside_jax(rng):
            return function(*from_jax(args), **from_jax(kwargs))

    @functools.wraps(function)
    def call(*args: Any, rng: Any = None, **kwargs: Any) -> Any:
        return on_arrays(run, rng, args, kwargs)

    return call


def on_arrays(function: Function, *args: Any) -> Any:
    """Return what a function that returns tensors computes, as arrays of dtypes that the user's JAX has."""
    leaves, spec = jax.tree.flatten(to_jax(args))
    at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    rest: list[Any] = []
    is_narrow = not has_x64()

    def run(*arrays: Any) -> list[Any]:
        given = list(leaves)
        for n, array in zip(at, arrays, strict=True):
            given[n] = array
        found = function(*jax.tree.unflatten(spec, given))
        teach(found)
        results, shape = jax.tree.flatten(to_jax(found))
        rest[:] = [shape, [None if isinstance(r, jax.Array) else (r,) for r in results]]
        return [_narrow(r) if is_narrow else r for r in results if isinstance(r, jax.Array)]

    arrays = [leaves[n] for n in at]
    found = iter(x64_primitive.call(run, *arrays) if is_narrow and is_traced(arrays) else run(*arrays))
    shape, others = rest
    return jax.tree.unflatten(shape, [next(found) if other is None else other[0] for other in others])


@contextlib.contextmanager
def inside_jax(rng: Any) -> Iterator[None]:
    """Run torch code as JAX needs it: on this thread, with random numbers from a key."""
    # Autograd's own threads know nothing of the trace on this one.
    with torch.autograd.set_multithreading_enabled(False), _draws(rng), respected():
        yield


def _draws(rng: Any) -> contextlib.AbstractContextManager[None]:
    return generator.drawing_from(_words(rng), is_traced([rng]))


def _words(rng: Any) -> Callable[[int], Any]:
    """Return what a random op draws, given how many were drawn before."""

    def words(offset: int) -> Any:
        if rng is None:
            raise IsthmusError(
                "torch code inside JAX draws random numbers: pass a key, as in rng=jax.random.key(0)"
            )
        return jax.numpy.concatenate([_seed(rng), np.array([offset >> 32, offset & 0xFFFFFFFF], np.uint32)])

    return words


def _seed(rng: Any) -> Any:
    """Return a key, of whatever kind, as two words."""
    if not isinstance(rng, jax.Array):
        raise TypeError(f"rng is {rng!r}, not a key of JAX's, such as jax.random.key(0)")
    key = rng if jax.numpy.issubdtype(rng.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(rng)
    data = jax.random.key_data(key)
    return data if data.shape == (2,) else jax.random.bits(key, (2,), "uint32")


def _narrow(array: Any) -> Any:
    return array.astype(NARROW[array.dtype]) if array.dtype in NARROW else array


NARROW = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}
