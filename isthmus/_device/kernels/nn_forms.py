"""Calls of ``torch.nn``'s ops that torch's schemas or Meta kernels misdescribe, passed on in a form that they describe.

Batch norm's schema does not name the running statistics that it rewrites; the lengths of the CTC loss are numbers,
which would be compiled in; the Meta kernels of margin losses and of fused RNN cells know fewer forms than the CPU has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus._device.core.dispatch import kernel_for
from isthmus._device.core.inference import infer
from isthmus._device.kernels.factories import empty, write_out
from isthmus._graph.names import aten as _aten

_NONE, _MEAN = 0, 1  # torch's numbers for a loss's reduction


# ``native_batch_norm`` updates the running statistics, though its schema does not say so. The call goes to the overload
# whose schema names what it mutates, so that plans rebind the statistics.
def native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Run the overload that says what it mutates."""
    affine = (input, weight, bias)
    if running_mean is not None and running_var is not None:
        if training:
            legit = _aten._native_batch_norm_legit.default
            return kernel_for(legit)(*affine, running_mean, running_var, training, momentum, eps)
        frozen = _aten._native_batch_norm_legit_no_training.default
        out = kernel_for(frozen)(*affine, running_mean, running_var, momentum, eps)[0]
        # torch's Meta kernel says the statistics are saved here; the CPU saves nothing, and backward asks none.
        return out, empty((0,), dtype=out.dtype), empty((0,), dtype=out.dtype)
    if running_mean is None and running_var is None and training:
        return kernel_for(_aten._native_batch_norm_legit.no_stats)(*affine, training, momentum, eps)
    if training:
        # One statistic without the other: a stand-in takes updates that are dropped.
        stand_in = torch.zeros_like(running_mean if running_mean is not None else running_var)  # type: ignore[arg-type]
        mean = stand_in if running_mean is None else running_mean
        var = stand_in if running_var is None else running_var
        return native_batch_norm(*affine, mean, var, training, momentum, eps)
    raise RuntimeError("Expected running_mean and running_var to be defined when training=False")


def native_batch_norm_out(*args: Any, out: Tensor, save_mean: Tensor, save_invstd: Tensor) -> Any:
    """Write the results to given tensors, resized if they must be."""
    targets = (out, save_mean, save_invstd)
    return tuple(
        write_out(target, result) for target, result in zip(targets, native_batch_norm(*args), strict=True)
    )


# SyncBatchNorm's ops that move the running statistics, which their schemas do not say either.
def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the mean and reciprocal deviation of all ranks, given each rank's in a row, and move the running ones."""
    rows = counts.to(mean.dtype).reshape(-1, 1)
    total = rows.sum()
    overall = (mean * rows).sum(0) / total
    var = ((invstd.pow(-2) - eps + (mean - overall).square()) * rows).sum(0) / total
    # torch divides by total - 1, so the running variance of one element is nan.
    for running, new in ((running_mean, overall), (running_var, var * (total / (total - 1)))):
        if running is not None:
            running.copy_((1 - momentum) * running.to(new.dtype) + momentum * new)
    return overall, (var + eps).rsqrt()


def batch_norm_gather_stats(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Tensor, Tensor]:
    """As with counts, where every rank has as many elements a channel."""
    counts = torch.full((mean.shape[0],), float(count), dtype=mean.dtype, device=mean.device)
    return batch_norm_gather_stats_with_counts(
        input, mean, invstd, running_mean, running_var, momentum, eps, counts
    )


# The overload of the CTC loss with tensors has the lowering, so that one program serves all lengths. Targets in one row
# are laid out one row per sequence, as wide as the longest.
def _tensor(numbers: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(like.device)


def _rows(targets: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the targets one row a sequence, as wide as the longest; that width alone is compiled in."""
    width = max(lengths, default=0)
    if targets.dim() == 2:
        return targets[:, :width]
    if not targets.numel():
        return targets.new_zeros(len(lengths), width)
    # Where each sequence begins in the row of all targets.
    count = torch.tensor(lengths, dtype=torch.int64)
    places = (count.cumsum(0) - count)[:, None] + torch.arange(width)
    # Places past the end are never read by the loss; they only have to exist.
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
    # Meta's checks of the lengths, which are numbers here and tensors below.
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
    gradient: Tensor = kernel_for(_aten._ctc_loss_backward.Tensor)(grad, log_probs, rows, *lengths, *rest)
    return gradient


# The Meta kernels of margin losses give the unreduced loss of one sample a dim that its result does not have. Such a
# call runs as a batch of one, whose dim is then dropped.
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
        loss: Tensor = kernel(self, target, p, margin, weight, reduction)
        return loss
    return kernel(self.reshape(1, -1), target.reshape(1), p, margin, weight, reduction).reshape(())  # type: ignore[no-any-return]


def multilabel_margin_loss_forward(self: Tensor, target: Tensor, reduction: int) -> Any:
    """Compute the loss and which classes are targets, of a lone sample as a batch of one."""
    kernel = kernel_for(_aten.multilabel_margin_loss_forward.default)
    if self.dim() > 1 or target.dim() > 1 or reduction != _NONE:
        return kernel(self, target, reduction)
    loss, is_target = kernel(self.reshape(1, -1), target.reshape(1, -1), reduction)
    return loss.reshape(()), is_target.reshape(target.shape)


# The Meta kernels of fused RNN cells know only cells with both biases, or with none at all.
def _with_biases(cell: Any) -> Any:
    def run(
        input_gates: Tensor,
        hidden_gates: Tensor,
        state: Tensor,
        input_bias: Tensor | None = None,
        hidden_bias: Tensor | None = None,
    ) -> Any:
        """Run the cell with zeros for a bias that is not there."""
        # A bias of zeros, as wide as the gates.
        if input_bias is None or hidden_bias is None:
            zeros = torch.zeros(input_gates.shape[1:], dtype=input_gates.dtype, device=input_gates.device)
            input_bias = zeros if input_bias is None else input_bias
            hidden_bias = zeros if hidden_bias is None else hidden_bias
        return kernel_for(cell)(input_gates, hidden_gates, state, input_bias, hidden_bias)

    return run


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    """Run the gradient as if there were biases, and return theirs only if there are."""
    gradients = kernel_for(_aten._thnn_fused_gru_cell_backward.default)(grad_hy, workspace, True)
    return gradients if has_bias else (*gradients[:3], None, None)


KERNELS = {
    "native_batch_norm": native_batch_norm,
    "native_batch_norm.out": native_batch_norm_out,
    "_native_batch_norm_legit": native_batch_norm,
    "_native_batch_norm_legit.out": native_batch_norm_out,
    "batch_norm_gather_stats": batch_norm_gather_stats,
    "batch_norm_gather_stats_with_counts": batch_norm_gather_stats_with_counts,
    "_ctc_loss": ctc_loss,
    "_ctc_loss_backward": ctc_loss_backward,
    "multi_margin_loss": multi_margin_loss,
    "multilabel_margin_loss_forward": multilabel_margin_loss_forward,
    "_thnn_fused_lstm_cell": _with_biases(_aten._thnn_fused_lstm_cell.default),
    "_thnn_fused_gru_cell": _with_biases(_aten._thnn_fused_gru_cell.default),
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}
