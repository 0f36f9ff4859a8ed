"""Fused RNN cells with one bias or none: torch's Meta kernels know only cells that have both, or none at all.

Zeros stand in for a bias that is not there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus._device.core.dispatch import kernel_for
from isthmus._graph.names import aten as _aten


def _with_biases(cell: Any) -> Any:
    def run(
        input_gates: Tensor,
        hidden_gates: Tensor,
        state: Tensor,
        input_bias: Tensor | None = None,
        hidden_bias: Tensor | None = None,
    ) -> Any:
        """Run the cell with zeros for a bias that is not there."""
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
    "_thnn_fused_lstm_cell": _with_biases(_aten._thnn_fused_lstm_cell.default),
    "_thnn_fused_gru_cell": _with_biases(_aten._thnn_fused_gru_cell.default),
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}
