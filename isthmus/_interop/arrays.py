"""``isthmus.to_jax`` and ``isthmus.from_jax``: tensors as arrays and arrays as tensors, without a copy.

A tensor on "jax" is a layout on a buffer that holds a ``jax.Array``. ``to_jax`` returns that array where the tensor
shows all of it in order, else the result of one program that reads the view; ``from_jax`` makes a buffer for the array.

Sharing is safe in both directions. A write to a tensor gives its buffer a new array, and the old array's memory is
donated to the write only if nothing else refers to it, so an array taken out of a tensor never changes.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from torch import Tensor

from isthmus._device.core import mode
from isthmus._device.core.buffer import wrap
from isthmus._device.core.host_tensors import array_from_cpu
from isthmus._device.core.transfers import array_of
from isthmus._runtime import placement
from isthmus._runtime.compiler import default_device
from isthmus._runtime.dtypes import to_torch_dtype
from isthmus._runtime.host_arrays import from_numpy
from isthmus.errors import IsthmusError

Array = jax.Array


def to_jax(tree: Any) -> Any:
    """Return a tensor, or every tensor of a pytree, as a ``jax.Array``.

    Arguments:
        tree: tensors on "jax" or on the CPU, in a pytree of JAX's if need be. Other leaves are returned as they are.

    Returns:
        The same tree with arrays. Nothing is copied where a tensor on "jax" shows all of its storage; another view is
        computed by one program. int64 stays int64, also with JAX's 64-bit types off.

    Example:
        >>> import torch, isthmus
        >>> isthmus.to_jax({"x": torch.ones(2, device="jax")})
        {'x': Array([1., 1.], dtype=float32)}
    """
    # A tensor is no leaf to JAX, which might look inside a subclass.
    return jax.tree.map(_to_array, tree, is_leaf=lambda value: isinstance(value, Tensor))


def from_jax(tree: Any) -> Any:
    """Return a ``jax.Array``, or every array of a pytree, as a tensor on "jax".

    Arguments:
        tree: arrays of JAX or numpy, in a pytree if need be. Other leaves are returned as they are.

    Returns:
        The same tree with tensors, which share the memory of arrays that are on the device already.

    Example:
        >>> import jax.numpy as jnp, isthmus
        >>> isthmus.from_jax(jnp.arange(3.0)).sum().item()
        3.0
    """
    return jax.tree.map(_to_tensor, tree)


def _to_array(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "jax":
        if type(value) is not Tensor and hasattr(value, "to_local"):
            raise IsthmusError(
                "isthmus.to_jax: of a DTensor each rank has a part\n"
                "  to go on     its .to_local() or .full_tensor() is one tensor; torch.distributed.checkpoint saves "
                "parts"
            )
        return array_of(value)
    if value.device.type == "cpu":
        return array_from_cpu(value)
    raise IsthmusError(
        f'isthmus.to_jax: a tensor on {value.device} is neither on "jax" nor on the CPU; move it first'
    )


def _to_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return wrap(from_numpy(value))
    if not isinstance(value, jax.Array):
        return value
    # Random keys have an extended dtype.
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
        raise TypeError(f"isthmus.from_jax: torch has no dtype {value.dtype}; pass jax.random.key_data(key)")
    if not isinstance(value, jax.core.Tracer):
        value = _at_home(value)
        if mode.current.capture is not None:
            # isthmus.jit would compile this array in as a constant: the recording is given up, with this reason.
            mode.current.capture.reason = "it takes an array of JAX's, which may be another at the next call"
    return wrap(value, to_torch_dtype(value.dtype))


def _at_home(array: Array) -> Array:
    """Return an array on the device or mesh that tensors live on, moved there if it is elsewhere."""
    # An array of another device, or of several, is moved to where tensors live.
    devices = array.devices()
    if placement.home is not None:
        return array if devices == placement.home.device_set else placement.move(array)
    if len(devices) > 1:
        raise IsthmusError(
            f'isthmus.from_jax: the array is spread over {len(devices)} devices, and "jax" is one; gather it first, '
            f"with jax.device_put(array, jax.devices()[0]), or let tensors live on all of them, with "
            f"isthmus.distributed.init_device_mesh"
        )
    return array if devices == {default_device()} else jax.device_put(array, default_device())
