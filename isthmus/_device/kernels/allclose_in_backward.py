"""Questions about values that torch's backward formulas ask, answered where there are none: in a traced backward.

A complex ``svd`` asks whether the loss depends on the phase of its vectors. Tracing cannot know, and an error raised
inside the formula would abort the process: torch calls Python to leave the device while the error is set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus._device.core.buffer import buffer_if_any
from isthmus._device.torch_glue.private import below_autograd, in_backward, in_traced_backward


def allclose(
    self: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Return whether all elements are close; while backward is traced, that the formula's condition holds."""
    # In a backward that is being traced there are no values; the formula then goes its usual way.
    if in_traced_backward(self, other) or (in_backward() and _is_traced(self)):
        return True
    with below_autograd():
        return torch.ops.aten.allclose.default(self, other, rtol, atol, equal_nan)


def _is_traced(tensor: Tensor) -> bool:
    buffer = buffer_if_any(tensor)
    return buffer is not None and buffer.signature.traced


AUTOGRAD_KERNELS = {"allclose": allclose}
