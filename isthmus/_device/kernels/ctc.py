"""The CTC loss of lengths given as numbers: they enter its program as tensors, so that it serves all lengths.

The overload with tensors has the lowering. Targets in one row are laid out one row per sequence, as wide as the
longest, and that width alone is compiled in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus._device.core.dispatch import kernel_for
from isthmus._device.core.inference import infer

_aten = torch.ops.aten


def _tensor(numbers: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(like.device)


def _rows(targets: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the targets one row a sequence, as wide as the longest; that width alone is compiled in."""
    width = max(lengths, default=0)
    if targets.dim() == 2:
        return targets[:, :width]
    if not targets.numel():
        return targets.new_zeros(len(lengths), width)
    count = torch.tensor(lengths, dtype=torch.int64)
    places = (count.cumsum(0) - count)[:, None] + torch.arange(width)
    return targets[places.clamp_(max=targets.numel() - 1).to(targets.device)]


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> Any:
    """Compute the loss of each sequence, after torch's own checks of the lengths."""
    arguments = (log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    infer(_aten._ctc_loss.default, arguments)
    lengths = (_tensor(input_lengths, log_probs), _tensor(target_lengths, log_probs))
    rows = _rows(targets, target_lengths)
    return kernel_for(_aten._ctc_loss.Tensor)(log_probs, rows, *lengths, blank, zero_infinity)


def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Tensor:
    """Compute the gradient of the loss for the log probabilities."""
    lengths = (_tensor(input_lengths, log_probs), _tensor(target_lengths, log_probs))
    rest = (neg_log_likelihood, log_alpha, blank, zero_infinity)
    rows = _rows(targets, target_lengths)
    found: Tensor = kernel_for(_aten._ctc_loss_backward.Tensor)(grad, log_probs, rows, *lengths, *rest)
    return found


KERNELS = {"_ctc_loss": ctc_loss, "_ctc_loss_backward": ctc_loss_backward}
