"""``parameter.data = other`` across devices: ``module.to("jax")`` keeps its parameters the objects they were.

``nn.Module._apply``, which is behind ``Module.to``, ``cpu``, ``jax`` and their like, asks torch whether a parameter can
take the new tensor's place in memory. torch says so for the devices it knows; for "jax" it would make a new parameter
instead: weights tied by identity would come apart, and an optimizer made before the move would update the old ones.
A tensor of the device is as plain as one on CUDA, so the answer is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isthmus._device.torch_glue.private import is_plain_in_memory

_op = getattr(torch.ops.aten, "_has_compatible_shallow_copy_type", None)
# What torch itself calls dense (c10/core/TensorImpl.h), and this device.
_DENSE = frozenset({"cpu", "cuda", "mps", "xpu", "hpu", "mtia", "jax"})


def has_compatible_type(self: torch.Tensor, from_: torch.Tensor) -> bool:
    """Return whether ``self.data = from_`` can be done."""
    return (_is_dense(self) and _is_dense(from_)) or bool(_torchs_own(self, from_))


def _torchs_own(self: torch.Tensor, from_: torch.Tensor) -> Any:
    assert _op is not None
    return _op.default.decompose(self, from_)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type in _DENSE and is_plain_in_memory(tensor)


# Autograd's key too: without a kernel there torch would take its own answer apart before it asks the device.
KERNELS: dict[str, Callable[..., Any]] = (
    # Older torch has no such op, and asks elsewhere.
    {} if _op is None else {"_has_compatible_shallow_copy_type": has_compatible_type}
)
AUTOGRAD_KERNELS = KERNELS
