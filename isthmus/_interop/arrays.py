"""Tensors as arrays and arrays as tensors, without a copy.

Arrays never change, and a tensor's memory is given away only where nobody else holds its array; so a later write to the
tensor is not seen through the array, whichever way it crossed.
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
from isthmus._runtime.compiler import default_device
from isthmus._runtime.dtypes import to_torch_dtype
from isthmus._runtime.host_arrays import from_numpy
from isthmus.errors import IsthmusError


def to_jax(tree: Any) -> Any:
    """Return a tensor, or every tensor of a pytree, as a ``jax.Array``.

    Nothing is copied where a tensor on "jax" shows all of its storage; a view of another layout is one program.

    Arguments:
        tree: a tensor on "jax" or on the CPU, or dicts, lists and tuples of tensors; other leaves stay what they are.

    Returns:
        The same containers with arrays in them.

    Example:
        >>> import torch, isthmus
        >>> array = isthmus.to_jax(torch.arange(3.0, device="jax"))
        >>> type(array).__name__, array.sum().item()
        ('ArrayImpl', 3.0)
    """
    return jax.tree.map(_array, tree, is_leaf=lambda value: isinstance(value, Tensor))


def from_jax(tree: Any) -> Any:
    """Return a ``jax.Array``, or every array of a pytree, as a tensor on "jax", without a copy.

    Arguments:
        tree: a ``jax.Array``, a numpy array (which is copied), or dicts, lists and tuples of them.

    Returns:
        The same containers with tensors in them. Writing to such a tensor does not change the array.

    Example:
        >>> import jax.numpy as jnp, isthmus
        >>> x = isthmus.from_jax(jnp.arange(3.0))
        >>> x.device.type, (x * 2).tolist()
        ('jax', [0.0, 2.0, 4.0])
    """
    return jax.tree.map(_tensor, tree)


def _array(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "jax":
        return array_of(value)
    if value.device.type == "cpu":
        return array_from_cpu(value)
    raise IsthmusError(
        f'isthmus.to_jax: a tensor on {value.device} is neither on "jax" nor on the CPU; move it first'
    )


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return wrap(from_numpy(value))
    if not isinstance(value, jax.Array):
        return value
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
        raise TypeError(f"isthmus.from_jax: torch has no dtype {value.dtype}; pass jax.random.key_data(key)")
    if not isinstance(value, jax.core.Tracer):
        value = _here(value)
        if mode.current.capture is not None:
            mode.current.capture.reason = "it takes an array of JAX's, which may be another at the next call"
    return wrap(value, to_torch_dtype(value.dtype))


def _here(array: Any) -> Any:
    """Return an array on the device tensors live on."""
    devices = array.devices()
    if len(devices) > 1:
        raise IsthmusError(
            f'isthmus.from_jax: the array is spread over {len(devices)} devices, and "jax" is one; gather it first, '
            f"with jax.device_put(array, jax.devices()[0])"
        )
    return array if devices == {default_device()} else jax.device_put(array, default_device())
