"""Arrays of zeros, which new tensors begin with: small ones are shared until a tensor is written to.

A program that makes zeros costs more than the memory of small ones, so ``zeros`` hands out the same array again. It
must never be donated, which donation sees by its reference count. A write would then need a program without donation,
for the first write to a tensor alone, and one with it for all later ones: the second one of an optimizer's state would
be compiled in the second step, that of the buckets which ``DistributedDataParallel`` makes anew in the second step in
the third. So a write takes zeros of its own (``own_zeros``), and only the program with donation is ever compiled::

    m = torch.zeros_like(w)     # the shared array
    m.lerp_(g, 0.1)             # own_zeros, then the program that donates
    m.lerp_(g, 0.1)             # the same program
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from isthmus._device.core.plan_cache import Generations
from isthmus._runtime import compiler, memory

# Zeros of up to so many bytes are kept and shared.
_SHARED_BYTES = 1 << 16
_shared, _programs = Generations(), Generations()


def zeros(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
    """Return an array of zeros; small ones are shared, which is safe because arrays never change."""
    key = (shape, dtype, sharding)
    # ``young`` directly: this runs for every new tensor.
    shared = _shared.young.get(key)
    if shared is not None:
        return shared
    program = _programs.young.get(key)
    if program is None:
        if memory.nbytes(shape, dtype) > memory.LARGEST:
            raise RuntimeError(f"Storage size calculation overflowed with sizes={list(shape)}")
        memory.require(memory.nbytes(shape, dtype))  # before JAX counts the elements, in an int64
        program = _programs.find(
            key, lambda: compiler.compile(lambda: jnp.zeros(shape, dtype), [], sharding=sharding)
        )
    # An array is shared by all tensors that hold it; the first write gives a tensor its own.
    if math.prod(shape) * dtype.itemsize <= _SHARED_BYTES:
        return _shared.find(key, program)
    return program()


def own_zeros(arrays: list[Any], index: int) -> bool:
    """Replace the shared zeros at this place by zeros that nothing else holds; return False for any other array."""
    array = arrays[index]
    if not isinstance(array, jax.Array):
        return False  # a marker in place of an array (donation.py)
    # Arrays that are split over a mesh are found under their sharding, others under None.
    for sharding in (None, array.sharding):
        key = (array.shape, array.dtype, sharding)
        if _shared.young.get(key) is array:
            program = _programs.young.get(key) or _programs.old.get(key)
            if program is not None:
                arrays[index] = program()
                return True
    return False
