"""Margin losses of one sample, unreduced: torch's Meta kernels give them a dim that its results do not have.

Such a call runs as a batch of one, whose dim is then dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus._device.core.dispatch import kernel_for

_aten = torch.ops.aten
_NONE, _MEAN = 0, 1


def multi_margin_loss(
    self: Tensor,
    target: Tensor,
    p: Any = 1,
    margin: Any = 1,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """Compute the loss, of a lone sample as a batch of one."""
    kernel = kernel_for(_aten.multi_margin_loss.default)
    if self.dim() > 1 or target.dim() > 0 or reduction != _NONE:
        found: Tensor = kernel(self, target, p, margin, weight, reduction)
        return found
    return kernel(self.reshape(1, -1), target.reshape(1), p, margin, weight, reduction).reshape(())  # type: ignore[no-any-return]


def multilabel_margin_loss_forward(self: Tensor, target: Tensor, reduction: int) -> Any:
    """Compute the loss and which classes are targets, of a lone sample as a batch of one."""
    kernel = kernel_for(_aten.multilabel_margin_loss_forward.default)
    if self.dim() > 1 or target.dim() > 1 or reduction != _NONE:
        return kernel(self, target, reduction)
    loss, is_target = kernel(self.reshape(1, -1), target.reshape(1, -1), reduction)
    return loss.reshape(()), is_target.reshape(target.shape)


KERNELS = {
    "multi_margin_loss": multi_margin_loss,
    "multilabel_margin_loss_forward": multilabel_margin_loss_forward,
}
