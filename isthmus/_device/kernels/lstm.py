"""LSTMs as one op for each layer and direction; packed sequences, projections, GRUs and others stay torch's.

torch takes an LSTM apart into some ten ops for each time step; ``aten.mkldnn_rnn_layer``, which CPU torch uses, is a
whole layer, has a derivative that can be differentiated again, and a lowering: one scan (``_ops/nn/rnn.py``).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from isthmus import config
from isthmus._device.core import mode
from isthmus._device.torch_glue.private import composite
from isthmus._graph.names import aten as _aten
from isthmus._ops.registry import registry

_LSTM = 2  # oneDNN's number for this kind of network
_LAYER = _aten.mkldnn_rnn_layer.default
_GRADIENTS = _aten.mkldnn_rnn_layer_backward.default
_WHOLE = _aten.lstm.input
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def lstm(
    input: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Run every layer and direction of an LSTM as one op, or all of it step by step as torch takes it apart."""
    arguments = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    if not _fits(input, hx, params, has_biases, num_layers * (2 if bidirectional else 1)):
        return composite(_WHOLE, input, hx, params, *arguments)
    directions = 2 if bidirectional else 1
    each = 4 if has_biases else 2
    x = input.transpose(0, 1) if batch_first else input
    hidden, cells = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            weights = params[place * each : place * each + each]
            weights = weights if has_biases else [*weights, *[_no_bias(weights[0])] * 2]
            states = (hx[0][place], hx[1][place])
            options: tuple[Any, ...] = (
                direction == 1,
                [],
                _LSTM,
                hx[0].size(2),
                1,
                has_biases,
                False,
                False,
                train,
            )
            y, h, c, _ = _LAYER(x, *weights, *states, *options)
            outputs.append(y)
            hidden.append(h)
            cells.append(c)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return x.transpose(0, 1) if batch_first else x, torch.stack(hidden), torch.stack(cells)


def _no_bias(weight: Tensor) -> Tensor:
    return torch.zeros(weight.shape[:1], dtype=weight.dtype, device=weight.device)


def _fits(input: Tensor, hx: list[Tensor], params: list[Tensor], has_biases: bool, layers: int) -> bool:
    """Return whether a layer is what the one op computes; everything else, errors included, is torch's."""
    if input.dim() != 3 or 0 in input.shape or len(hx) != 2 or not _is_served(input.dtype):
        return False
    if mode.current.lazy and config.backend != "xla":
        return False  # a graph for another backend is to have ops that any backend knows
    tensors = [input, *hx, *params]
    if not all(t.dtype == input.dtype and t.device == input.device for t in tensors):
        return False
    # A projection makes the hidden state narrower than the cell's, and is a fifth weight.
    if len(params) != layers * (4 if has_biases else 2) or hx[0].shape != hx[1].shape or hx[0].dim() != 3:
        return False
    width = hx[0].size(2)
    whole = all(w.dim() < 2 or tuple(w.shape) == (4 * width, w.size(1)) for w in params)
    # The layer's gradients are float32, as oneDNN's are: too coarse for float64.
    return input.dtype in _DTYPES and hx[0].size(0) == layers and whole


@functools.cache
def _is_served(dtype: torch.dtype) -> bool:
    """Return whether this torch can say of which shapes and dtypes a layer's results and gradients are."""
    if _LAYER not in registry or _GRADIENTS not in registry:
        return False
    x, state = torch.empty(1, 1, 1, dtype=dtype, device="meta"), torch.empty(1, 1, dtype=dtype, device="meta")
    weights = [torch.empty(4, 1, dtype=dtype, device="meta")] * 2
    weights += [torch.empty(4, dtype=dtype, device="meta")] * 2
    try:
        y, h, c, workspace = _LAYER(
            x, *weights, state, state, False, [], _LSTM, 1, 1, True, False, False, True
        )
        _GRADIENTS(
            x,
            *weights,
            state,
            state,
            y,
            h,
            c,
            y,
            h,
            c,
            False,
            _LSTM,
            1,
            1,
            True,
            True,
            False,
            [],
            False,
            workspace,
        )
    except Exception:  # of any kind: a Meta kernel that this release lacks, or that checks other things
        return False
    return True


AUTOGRAD_KERNELS = {"lstm.input": lstm}
