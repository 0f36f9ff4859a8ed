"""Batch norm: ``native_batch_norm`` updates the running statistics, though its schema does not say so.

The call is passed to the overload whose schema names what it mutates, so that plans rebind the statistics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus._device.core.dispatch import kernel_for
from isthmus._device.kernels.factories import empty, write_out

_aten = torch.ops.aten


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


KERNELS = {
    "native_batch_norm": native_batch_norm,
    "native_batch_norm.out": native_batch_norm_out,
    "_native_batch_norm_legit": native_batch_norm,
    "_native_batch_norm_legit.out": native_batch_norm_out,
}
