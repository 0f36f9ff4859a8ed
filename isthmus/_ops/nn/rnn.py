"""The fused cells that ``nn.LSTM`` and ``nn.GRU`` reach on a device, whole layers of CPU tensors, their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import Array, Ints, accumulation_dtype, cast
from isthmus._ops.linalg.matmul import product
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported

_LSTM = 2  # oneDNN's number for this kind of network


def _plus(gates: Array, bias: Array | None) -> Array:
    return gates if bias is None else gates + cast(bias, gates.dtype)


@lowering(aten._thnn_fused_lstm_cell.default, accumulate="input_gates")
def lstm_cell(
    input_gates: Array,
    hidden_gates: Array,
    cx: Array,
    input_bias: Array | None = None,
    hidden_bias: Array | None = None,
) -> tuple[Array, Array, Array]:
    """One step of an LSTM: the new hidden and cell states, and the gates for backward."""
    total = _plus(input_gates, input_bias) + _plus(hidden_gates, hidden_bias)
    # torch's order of the gates: input, forget, cell, output.
    i, f, g, o = jnp.split(total, 4, axis=1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    cy = f * cx + i * g
    return o * jnp.tanh(cy), cy, jnp.concatenate([i, f, g, o], axis=1)


@lowering(aten._thnn_fused_lstm_cell_backward_impl.default, accumulate="workspace")
def lstm_cell_backward(
    grad_hy: Array | None, grad_cy: Array | None, cx: Array, cy: Array, workspace: Array, has_bias: bool
) -> tuple[Array | None, ...]:
    """The gradients of ``_thnn_fused_lstm_cell`` for the gates, the cell state and the bias."""
    new = jnp.tanh(cy)
    i, f, g, o = jnp.split(workspace, 4, axis=1)
    hidden, cell = (jnp.zeros_like(cx) if grad is None else grad for grad in (grad_hy, grad_cy))
    state = hidden * o * (1 - new * new) + cell
    parts = [
        state * g * i * (1 - i),
        state * cx * f * (1 - f),
        state * i * (1 - g * g),
        hidden * new * o * (1 - o),
    ]
    gates = jnp.concatenate(parts, axis=1)
    return gates, state * f, gates.sum(0) if has_bias else None


@lowering(aten._thnn_fused_gru_cell.default, accumulate="input_gates")
def gru_cell(
    input_gates: Array,
    hidden_gates: Array,
    hx: Array,
    input_bias: Array | None = None,
    hidden_bias: Array | None = None,
) -> tuple[Array, Array]:
    """One step of a GRU: the new hidden state, and what backward needs."""
    from_input = jnp.split(_plus(input_gates, input_bias), 3, axis=1)
    from_hidden = jnp.split(_plus(hidden_gates, hidden_bias), 3, axis=1)
    reset = jax.nn.sigmoid(from_input[0] + from_hidden[0])
    update = jax.nn.sigmoid(from_input[1] + from_hidden[1])
    new = jnp.tanh(from_input[2] + reset * from_hidden[2])
    workspace = jnp.concatenate([reset, update, new, hx, from_hidden[2]], axis=1)
    return new + update * (hx - new), workspace


@lowering(aten._thnn_fused_gru_cell_backward.default, accumulate="workspace")
def gru_cell_backward(grad_hy: Array, workspace: Array, has_bias: bool) -> tuple[Array | None, ...]:
    """The gradients of ``_thnn_fused_gru_cell`` for both sets of gates, the hidden state and the biases."""
    # The order in which forward saved them.
    reset, update, new, h, hidden = jnp.split(workspace, 5, axis=1)
    for_update = grad_hy * (h - new) * (1 - update) * update
    for_new = grad_hy * (1 - update) * (1 - new * new)
    for_reset = for_new * hidden * (1 - reset) * reset
    by_input = jnp.concatenate([for_reset, for_update, for_new], axis=1)
    by_hidden = jnp.concatenate([for_reset, for_update, for_new * reset], axis=1)
    biases = [grad.sum(0) if has_bias else None for grad in (by_input, by_hidden)]
    return by_input, by_hidden, grad_hy * update, *biases


def _lstm_layer(
    input: Array, weights: tuple[Array, ...], hx: Array, cx: Array, reverse: bool
) -> tuple[Array, ...]:
    """Return one layer's outputs and last states, (length, batch, width) like its input."""
    from_input, from_hidden, *biases = weights
    acc_dtype = accumulation_dtype(input.dtype)
    # The input's part of the gates is one product for all times; only the hidden part waits for the step before.
    gates = product(input, from_input.T)
    for bias in biases:
        gates = _plus(gates, bias)

    def step(state: tuple[Array, Array], input_gates: Array) -> tuple[tuple[Array, Array], Array]:
        hidden, cell, _ = lstm_cell(
            input_gates, product(cast(state[0], input.dtype), from_hidden.T), state[1]
        )
        return (hidden, cell), hidden

    # The states stay wide from step to step; what the products read of them is rounded as torch rounds it.
    start = (cast(hx.reshape(hx.shape[-2:]), acc_dtype), cast(cx.reshape(cx.shape[-2:]), acc_dtype))
    (hidden, cell), outputs = jax.lax.scan(step, start, gates, reverse=reverse)
    return cast(outputs, input.dtype), cast(hidden, hx.dtype), cast(cell, cx.dtype)


def _only_lstm(mode: int, num_layers: int, bidirectional: bool, batch_first: bool, batch_sizes: Ints) -> None:
    if mode != _LSTM or num_layers != 1 or bidirectional or batch_first or len(batch_sizes):
        raise Unsupported("a layer of oneDNN's that is not one direction of one LSTM layer")


@lowering(aten.mkldnn_rnn_layer.default, matmul=True, ignores=("hidden_size", "train"))
def lstm_layer(
    input: Array,
    weight0: Array,
    weight1: Array,
    weight2: Array,
    weight3: Array,
    hx_: Array,
    cx_: Array,
    reverse: bool,
    batch_sizes: list[int],
    mode: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Array, ...]:
    """A whole LSTM layer, as graphs of CPU tensors have it; what oneDNN would save for backward is empty."""
    _only_lstm(mode, num_layers, bidirectional, batch_first, batch_sizes)
    weights = (weight0, weight1, weight2, weight3)[: 4 if has_biases else 2]
    outputs, hidden, cell = _lstm_layer(input, weights, hx_, cx_, reverse)
    return outputs, hidden.reshape(hx_.shape), cell.reshape(cx_.shape), jnp.zeros((0,), jnp.uint8)


@lowering(
    aten.mkldnn_rnn_layer_backward.default,
    matmul=True,
    ignores=("output", "hy_", "cy_", "hidden_size", "train", "workspace"),
)
def lstm_layer_backward(
    input: Array,
    weight1: Array,
    weight2: Array,
    weight3: Array,
    weight4: Array,
    hx_: Array,
    cx_tmp: Array,
    grad_output: Array | None,
    grad_hy: Array | None,
    grad_cy: Array | None,
    reverse: bool,
    mode: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    batch_first: bool,
) -> tuple[Array, ...]:
    """The gradients of a layer for input, weights and states, with the layer computed again."""
    _only_lstm(mode, num_layers, bidirectional, batch_first, batch_sizes)
    bias = jnp.zeros(weight3.shape[:1], input.dtype)
    weights = (weight1, weight2, *((weight3, weight4) if has_biases else (bias, bias)))

    def forward(x: Array, w: tuple[Array, ...], h: Array, c: Array) -> tuple[Array, ...]:
        return _lstm_layer(x, w, h, c, reverse)

    outputs, transpose = jax.vjp(forward, input, weights, hx_, cx_tmp)
    output_grads = (grad_output, grad_hy, grad_cy)
    grads = (
        jnp.zeros_like(f) if g is None else g.reshape(f.shape)
        for f, g in zip(outputs, output_grads, strict=True)
    )
    dx, dw, dh, dc = transpose(tuple(grads))
    return tuple(cast(grad, jnp.float32) for grad in (dx, *dw, dh, dc))
