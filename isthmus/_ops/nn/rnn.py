"""Recurrent networks: fused cells, whole layers as one scan, layers as graphs of CPU tensors have them; gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from isthmus._graph.names import aten
from isthmus._ops.common import Array, Ints, accumulation_dtype, cast
from isthmus._ops.linalg.matmul import product
from isthmus._ops.registry import lowering
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
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


_library = torch.library.Library("isthmus", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
# A layer of ``kind`` ("lstm", "gru", "tanh", "relu") in one direction, from an input of (length, batch, features), two
# weights and perhaps two biases, and states of (batch, width): the outputs and the last states.
_library.define(
    "rnn_layer(Tensor input, Tensor[] weights, Tensor[] states, str kind, bool reverse) -> Tensor[]",
    tags=_TAGS,
)
_library.define(
    "rnn_layer_backward(Tensor[] grads, Tensor input, Tensor[] weights, Tensor[] states, str kind, bool reverse) "
    "-> Tensor[]",
    tags=_TAGS,
)
LAYER = torch.ops.isthmus.rnn_layer.default
LAYER_BACKWARD = torch.ops.isthmus.rnn_layer_backward.default
GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
"""How many rows of a weight each feature of a hidden state has, by kind."""


def _layer_on_meta(
    input: Tensor, weights: list[Tensor], states: list[Tensor], kind: str, reverse: bool
) -> list[Tensor]:
    outputs = input.new_empty((input.size(0), *states[0].shape))
    return [outputs, *(state.new_empty(state.shape) for state in states)]


def _gradients_on_meta(
    grads: list[Tensor], input: Tensor, weights: list[Tensor], states: list[Tensor], kind: str, reverse: bool
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (input, *weights, *states)]


_library.impl("rnn_layer", _layer_on_meta, "Meta")
_library.impl("rnn_layer_backward", _gradients_on_meta, "Meta")


def _step(kind: str, input_gates: Array, hidden_gates: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the states after one step, the hidden one first."""
    if kind == "lstm":
        return lstm_cell(input_gates, hidden_gates, states[1])[:2]
    if kind == "gru":
        return gru_cell(input_gates, hidden_gates, states[0])[:1]
    total = input_gates + hidden_gates
    return (jnp.tanh(total) if kind == "tanh" else jax.nn.relu(total),)


def _layer(
    kind: str, input: Array, weights: tuple[Array, ...], states: tuple[Array, ...], reverse: bool
) -> tuple[Array, ...]:
    """Return one layer's outputs and last states, (length, batch, width) and (batch, width)."""
    from_input, from_hidden, *biases = weights
    acc_dtype = accumulation_dtype(input.dtype)
    # The input's part of the gates is one product for all times; only the hidden part waits for the step before.
    gates = product(input, from_input.T)
    hidden_bias = None
    if biases and kind == "gru":
        # A GRU's reset gate scales the hidden part of the new state, its bias included.
        gates, hidden_bias = _plus(gates, biases[0]), biases[1]
    else:
        for bias in biases:
            gates = _plus(gates, bias)

    def step(held: tuple[Array, ...], input_gates: Array) -> tuple[tuple[Array, ...], Array]:
        hidden_gates = _plus(product(cast(held[0], input.dtype), from_hidden.T), hidden_bias)
        # Wide gates give wide states: a product of half types is one of them on an accelerator.
        after = _step(kind, cast(input_gates, acc_dtype), cast(hidden_gates, acc_dtype), held)
        return after, after[0]

    # The states stay wide from step to step; what the products read of them is rounded as torch rounds it.
    start = tuple(cast(state, acc_dtype) for state in states)
    last, outputs = jax.lax.scan(step, start, gates, reverse=reverse)
    return cast(outputs, input.dtype), *(cast(a, b.dtype) for a, b in zip(last, states, strict=True))


def _layer_gradients(
    kind: str,
    grads: tuple[Array | None, ...],
    input: Array,
    weights: tuple[Array, ...],
    states: tuple[Array, ...],
    reverse: bool,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """Return the gradients of a layer for input, weights and states, with the layer computed again."""

    def forward(x: Array, w: tuple[Array, ...], s: tuple[Array, ...]) -> tuple[Array, ...]:
        return _layer(kind, x, w, s, reverse)

    outputs, transpose = jax.vjp(forward, input, weights, states)
    given = (
        jnp.zeros_like(f) if g is None else g.reshape(f.shape) for f, g in zip(outputs, grads, strict=True)
    )
    dx, dw, ds = transpose(tuple(given))
    return dx, dw, ds


@lowering(LAYER, matmul=True)
def layer(
    input: Array, weights: list[Array], states: list[Array], kind: str, reverse: bool
) -> tuple[Array, ...]:
    """A layer of a recurrent network in one direction: a scan over the first axis."""
    return _layer(kind, input, tuple(weights), tuple(states), reverse)


@lowering(LAYER_BACKWARD, matmul=True)
def layer_backward(
    grads: list[Array], input: Array, weights: list[Array], states: list[Array], kind: str, reverse: bool
) -> tuple[Array, ...]:
    """The gradients of ``rnn_layer`` for input, weights and states."""
    dx, dw, ds = _layer_gradients(kind, tuple(grads), input, tuple(weights), tuple(states), reverse)
    return dx, *dw, *ds


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
    states = tuple(state.reshape(state.shape[-2:]) for state in (hx_, cx_))
    outputs, hidden, cell = _layer("lstm", input, weights, states, reverse)
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

    states = tuple(state.reshape(state.shape[-2:]) for state in (hx_, cx_tmp))
    grads = (grad_output, grad_hy, grad_cy)
    dx, dw, (dh, dc) = _layer_gradients("lstm", grads, input, weights, states, reverse)
    dtype = gradient_dtype(to_torch_dtype(input.dtype))
    if dtype is None:
        raise Unsupported("a layer of whose gradients this torch does not know the dtypes")
    results = (dx, *dw, dh.reshape(hx_.shape), dc.reshape(cx_tmp.shape))
    return tuple(cast(grad, to_jax_dtype(dtype)) for grad in results)


@functools.cache
def gradient_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which torch wants a layer's gradients, None where it cannot say.

    Newer versions want float32, as oneDNN gives them, torch 2.11 that of the layer.
    """
    x, state = torch.empty(1, 1, 1, dtype=dtype, device="meta"), torch.empty(1, 1, dtype=dtype, device="meta")
    weights = [torch.empty(4, 1, dtype=dtype, device="meta")] * 2
    weights += [torch.empty(4, dtype=dtype, device="meta")] * 2
    inputs = (x, *weights, state, state)
    options = (_LSTM, 1, 1, True)
    try:
        y, h, c, workspace = aten.mkldnn_rnn_layer.default(*inputs, False, [], *options, False, False, True)
        gradients = aten.mkldnn_rnn_layer_backward.default(
            *inputs, *(y, h, c) * 2, False, *options, True, False, [], False, workspace
        )
    except Exception:  # of any kind: a Meta kernel that this release lacks, or that checks other things
        return None
    (of_gradients,) = {gradient.dtype for gradient in gradients}
    return of_gradients
