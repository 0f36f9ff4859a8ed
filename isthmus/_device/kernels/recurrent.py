"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as one op for each layer and direction.

torch takes a recurrent network apart into some ten ops for each time step. ``isthmus::rnn_layer`` (defined and lowered
in ``_ops/nn/rnn.py``) is a whole layer in one direction: one scan, and one more for its gradients. The kernels here
answer ``aten::lstm.input`` and its relatives before torch composes them, so eager mode, lazy mode, ``isthmus.jit`` and
graphs of ``torch.compile`` all have the layers:

    nn.LSTM(3, 4, 2)(x)     y0, h0, c0 = isthmus::rnn_layer(x, [w_ih, w_hh, b_ih, b_hh], [h, c], "lstm", False)
                            y1, h1, c1 = isthmus::rnn_layer(y0, ...)

Packed sequences (``lstm.data``), projections, mixed dtypes and all errors are torch's: it takes such a call apart. What
the op cannot do (forward mode, ``torch.func``, gradients of gradients) is computed step by step, and so are recorded
graphs on the CPU (``_composed``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus import config
from isthmus._device.core import mode
from isthmus._device.torch_glue.private import composite, in_forward_mode, in_function_transform
from isthmus._graph.names import aten as _aten
from isthmus._ops.nn.rnn import GATES, LAYER, LAYER_BACKWARD

_WHOLE = {
    "lstm": _aten.lstm.input,
    "gru": _aten.gru.input,
    "tanh": _aten.rnn_tanh.input,
    "relu": _aten.rnn_relu.input,
}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _network(kind: str) -> Callable[..., Any]:
    def run(
        input: Tensor,
        hx: Any,  # two tensors for an LSTM, one for the others
        params: list[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        """Run every layer and direction as one op, or all of it step by step as torch takes it apart."""
        states = list(hx) if kind == "lstm" else [hx]
        directions = 2 if bidirectional else 1
        each = 4 if has_biases else 2
        x = input.transpose(0, 1) if batch_first and input.dim() == 3 else input
        if not _fits(kind, x, states, params, each, num_layers, directions):
            arguments = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
            return composite(_WHOLE[kind], input, hx, params, *arguments)
        # The op's derivative is a Python function that knows neither forward mode nor the levels of torch.func.
        layer_op = _composed if in_forward_mode() or in_function_transform() else LAYER
        lasts = []
        for layer in range(num_layers):
            outputs = []
            for direction in range(directions):
                place = layer * directions + direction
                weights = params[place * each : place * each + each]
                y, *last = layer_op(x, weights, [state[place] for state in states], kind, direction == 1)
                outputs.append(y)
                lasts.append(last)
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            # Not after the last layer, as the documentation of ``nn.LSTM`` says.
            if dropout and train and layer < num_layers - 1:
                x = torch.dropout(x, dropout, True)
        y = x.transpose(0, 1) if batch_first else x
        return y, *map(torch.stack, zip(*lasts, strict=True))

    return run


def _fits(
    kind: str,
    input: Tensor,
    states: list[Tensor],
    params: list[Tensor],
    each: int,
    num_layers: int,
    directions: int,
) -> bool:
    """Return whether every layer is what the one op computes; everything else, errors included, is torch's.

    ``input`` is (length, batch, features), ``each`` the number of parameters of a layer and direction.
    """
    if input.dim() != 3 or 0 in input.shape or input.dtype not in _DTYPES:
        return False
    if mode.current.lazy and config.backend != "xla":
        return False  # a graph for another backend is to have ops that any backend knows
    tensors = [input, *states, *params]
    if not all(t.dtype == input.dtype and t.device == input.device for t in tensors):
        return False
    width = params[1].size(-1) if len(params) > 1 and params[1].dim() else 0
    # The states of a projection are narrower than its cells.
    if width == 0 or any(tuple(s.shape) != (num_layers * directions, input.size(1), width) for s in states):
        return False
    gates = GATES[kind] * width
    expected: list[tuple[int, ...]] = []
    for layer in range(num_layers):
        taken = input.size(2) if layer == 0 else width * directions
        expected += [(gates, taken), (gates, width), (gates,), (gates,)][:each] * directions
    return [tuple(p.shape) for p in params] == expected


def _composed(
    input: Tensor, weights: Sequence[Tensor], states: Sequence[Tensor], kind: str, reverse: bool
) -> list[Tensor]:
    """Run a layer step by step, by ops that every device has and torch differentiates as often as asked, both ways."""
    from_input, from_hidden, *biases = weights
    of_input, of_hidden = biases or (0.0, 0.0)
    hidden, *cell = states
    steps = (input @ from_input.t() + of_input).unbind(0)
    outputs: list[Tensor] = []
    for gates in reversed(steps) if reverse else steps:
        recurrent = hidden @ from_hidden.t() + of_hidden
        if kind == "lstm":
            enter, forget, new, leave = (gates + recurrent).chunk(4, 1)
            cell = [forget.sigmoid() * cell[0] + enter.sigmoid() * new.tanh()]
            hidden = leave.sigmoid() * cell[0].tanh()
        elif kind == "gru":
            (reset, update, new), (r, u, n) = gates.chunk(3, 1), recurrent.chunk(3, 1)
            new = (new + (reset + r).sigmoid() * n).tanh()
            hidden = new + (update + u).sigmoid() * (hidden - new)
        else:
            hidden = (gates + recurrent).tanh() if kind == "tanh" else (gates + recurrent).relu()
        outputs.append(hidden)
    return [torch.stack(outputs[::-1] if reverse else outputs), hidden, *cell]


def _composed_gradients(
    grads: Sequence[Tensor],
    input: Tensor,
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    kind: str,
    reverse: bool,
) -> list[Tensor]:
    """Return the gradients of a layer step by step, on devices without a lowering."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (input, *weights, *states)]
        count = 1 + len(weights)
        outputs = _composed(inputs[0], inputs[1:count], inputs[count:], kind, reverse)
        return list(torch.autograd.grad(outputs, inputs, list(grads)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    input, weights, states, ctx.kind, ctx.reverse = inputs
    ctx.count = 1 + len(weights)
    ctx.save_for_backward(input, *weights, *states)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    saved, count, options = ctx.saved_tensors, ctx.count, (ctx.kind, ctx.reverse)
    if torch.is_grad_enabled():  # create_graph=True: the gradients are to have gradients
        outputs = _composed(saved[0], saved[1:count], saved[count:], *options)
        wanted = [n for n, tensor in enumerate(saved) if tensor.requires_grad]
        inputs = [saved[n] for n in wanted]
        pulled = torch.autograd.grad(outputs, inputs, grads, create_graph=True, allow_unused=True)
        results: list[Tensor | None] = [None] * len(saved)
        for n, gradient in zip(wanted, pulled, strict=True):
            results[n] = gradient
    else:
        results = LAYER_BACKWARD(grads, saved[0], list(saved[1:count]), list(saved[count:]), *options)
    return results[0], results[1:count], results[count:], None, None


_library = torch.library.Library("isthmus", "FRAGMENT")
_library.impl("rnn_layer", _composed, "CPU")
_library.impl("rnn_layer_backward", _composed_gradients, "CPU")
torch.library.register_autograd("isthmus::rnn_layer", _backward, setup_context=_save, lib=_library)
AUTOGRAD_KERNELS = {
    "lstm.input": _network("lstm"),
    "gru.input": _network("gru"),
    "rnn_tanh.input": _network("tanh"),
    "rnn_relu.input": _network("relu"),
}
