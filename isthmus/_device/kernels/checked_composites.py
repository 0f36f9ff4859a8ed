"""Composite ops whose values torch checks on the CPU only: here they are checked in the programs that run them.

Without the check another condition would fail later, in words about an index the user never gave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isthmus._device.checks import ask_cpu
from isthmus._graph.private import OpOverload
from isthmus._ops import requirements  # noqa: F401  # defines the op

_aten = torch.ops.aten


def _require(self: Tensor, holds: Tensor, message: str) -> Tensor:
    """Return ``self``; where ``holds`` has a false element, the program that computes it raises."""
    checked: Tensor = torch.ops.isthmus.require(self.detach(), holds, message)
    # The gradient goes to ``self`` alone: what was checked is added and taken away again.
    return self + (checked - self.detach()) if self.requires_grad else checked


def one_hot(self: Tensor, num_classes: int = -1) -> Tensor:
    """Return a vector for each class, of zeros and a one."""
    infer = num_classes == -1
    # Wrong calls go to the CPU, which says so in torch's words.
    if self.dtype != torch.int64 or not self.numel() or (num_classes <= 0 and not infer):
        ask_cpu.raise_cpu_error(_aten.one_hot.default, (self, num_classes))
    if not self.numel():
        return self.new_empty((*self.shape, num_classes))
    if infer:
        least, most = torch.stack(torch.aminmax(self)).tolist()  # one read: the result's size depends on it
        if least < 0:
            ask_cpu.raise_cpu_error(_aten.one_hot.default, (self, num_classes))
        classes = self
    else:
        most = num_classes - 1
        classes = _require(self, self >= 0, "Class values must be non-negative.")
        classes = _require(classes, self < num_classes, "Class values must be smaller than num_classes.")
    return (classes.unsqueeze(-1) == torch.arange(most + 1, device=self.device)).to(torch.int64)


def _checking_q(op: OpOverload) -> Callable[..., Any]:
    """Return a quantile that requires its ``q`` to be within bounds."""

    def quantile(self: Tensor, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        if q.device.type == "jax" and q.is_floating_point():
            inside = (q >= 0) & (q <= 1)
            q = _require(q, inside.detach(), "quantile() q values must be in the range [0, 1]")
        return op.decompose(self, q, *args, **kwargs)

    return quantile


KERNELS = {
    "one_hot": one_hot,
    "quantile": _checking_q(_aten.quantile.default),
    "nanquantile": _checking_q(_aten.nanquantile.default),
}
AUTOGRAD_KERNELS = KERNELS
