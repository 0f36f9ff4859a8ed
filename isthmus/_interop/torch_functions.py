"""``isthmus.torch_function``: torch code as a JAX function, under any of JAX's transformations.

The torch code runs as Python, with tensors on "jax" whose buffers hold JAX's tracers. Each op runs its lowering on the
tracers (plans run their program inline), so that JAX sees the jaxpr it would see of the same code in ``jax.numpy``::

    f = isthmus.torch_function(lambda x: torch.softmax(x, -1))
    jax.jit(jax.grad(lambda x: f(x)[0]))(jnp.ones(3))

Three things differ from torch code that runs on values, and ``inside_jax`` sets them up: random numbers come from a JAX
key (``rng=``), an ``autograd.Function`` brings its own gradient to JAX (``autograd_functions.py``), and
``torch.autograd`` runs on the calling thread. torch's 64-bit integers are the fourth: with JAX's 64-bit types off, the
traced code becomes one primitive (``x64_primitive.py``) and results become 32-bit.

``functional.py`` runs modules the same way. Code that needs a value (``.item()``, ``if x > 0``) cannot be traced and
raises an error that names the line. A tensor from outside that the code writes to holds a tracer afterwards.
"""

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
from isthmus._interop.autograd_functions import differentiated_by_jax
from isthmus._interop.pytrees import Static, register_containers, without_static
from isthmus._runtime.compiler import has_x64
from isthmus._runtime.private import is_traced
from isthmus.errors import IsthmusError

Array = jax.Array
Function = Callable[..., Any]
NARROW = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}
"""The dtype that JAX has for each 64-bit one while its 64-bit types are off."""


def torch_function(function: Function) -> Function:
    """Return a torch function that takes and returns arrays, under any transformation of JAX's.

    Arguments:
        function: a function of tensors, in pytrees if need be. In-place ops and ``torch.autograd`` may be used inside,
            and a ``torch.autograd.Function`` keeps its own gradient.

    Returns:
        A function of arrays, with the further argument ``rng``: the JAX key that random numbers are drawn from, needed
        only by functions that draw some. Results are arrays; values that are no tensors are returned as they are.

    Example:
        >>> import jax, jax.numpy as jnp, torch, isthmus
        >>> f = isthmus.torch_function(lambda x: torch.relu(x).square().sum())
        >>> jax.grad(f)(jnp.array([-1.0, 2.0])).tolist()
        [0.0, 4.0]
    """

    def run(rng: Any, args: Any, kwargs: Any) -> Any:
        with inside_jax(rng):
            return function(*from_jax(args), **from_jax(kwargs))

    @functools.wraps(function)
    def call(*args: Any, rng: Any = None, **kwargs: Any) -> Any:
        return on_arrays(run, rng, args, kwargs)

    return call


def on_arrays(function: Function, *args: Any) -> Any:
    """Call a function that returns tensors, and return arrays of dtypes that the user's JAX has.

    ``function`` gets ``args`` with tensors as arrays. What else its result has beside tensors is returned unchanged.
    """
    leaves, tree = jax.tree.flatten(to_jax(args))
    positions = [n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    is_x64 = has_x64()

    def result(leaf: Any) -> Array | Static:
        if not isinstance(leaf, jax.Array):
            return Static(leaf)
        return leaf if is_x64 or leaf.dtype not in NARROW else leaf.astype(NARROW[leaf.dtype])

    def run(*arrays: Array) -> Any:
        arguments = list(leaves)
        for n, array in zip(positions, arrays, strict=True):
            arguments[n] = array
        out = function(*jax.tree.unflatten(tree, arguments))
        register_containers(out)
        return jax.tree.map(result, to_jax(out))

    arrays = [leaves[n] for n in positions]
    if is_x64 or not is_traced(arrays):
        return without_static(run(*arrays))
    return without_static(x64_primitive.call(run, *arrays))


@contextlib.contextmanager
def inside_jax(rng: Array | None) -> Iterator[None]:
    """Run torch code on tracers: on this thread, with random numbers from a key and autograd functions for JAX."""
    # JAX's trace belongs to this thread: ops of a backward on autograd's own threads would not be part of it.
    with (
        torch.autograd.set_multithreading_enabled(False),
        generator.drawing_from(_words(rng), is_traced([rng])),
        differentiated_by_jax(),
    ):
        yield


def _words(rng: Array | None) -> Callable[[int], Array]:
    """Return a function of the number of random ops so far that gives the next one's four words: seed and offset."""

    def words(offset: int) -> Array:
        if rng is None:
            raise IsthmusError(
                "torch code inside JAX draws random numbers: pass a key, as in rng=jax.random.key(0)"
            )
        return jax.numpy.concatenate([_seed(rng), np.array([offset >> 32, offset & 0xFFFFFFFF], np.uint32)])

    return words


def _seed(rng: Array) -> Array:
    """Return a key, of whatever generator, as the two 32-bit words of a seed."""
    if not isinstance(rng, jax.Array):
        raise TypeError(f"rng is {rng!r}, not a key of JAX's, such as jax.random.key(0)")
    # Keys of the old style, jax.random.PRNGKey, are plain uint32 arrays.
    key = rng if jax.numpy.issubdtype(rng.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(rng)
    data = jax.random.key_data(key)
    # threefry, JAX's default, has two words; the keys of other generators are drawn from.
    return data if data.shape == (2,) else jax.random.bits(key, (2,), "uint32")
