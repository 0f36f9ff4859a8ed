"""What the CPU computes for ops it has no kernel of: those torch made for accelerators alone.

torch dispatches some calls to another op on a device than on the CPU: an LSTM cell to a fused one, attention to
``_scaled_dot_product_fused_attention_overrideable``. A recorded graph names that op, and the reference backend
(``reference.py``) and ``to_fx`` need something to run in its place: a function of CPU tensors from ``EQUIVALENTS``.
``WIDENED`` are norms that the CPU has, with statistics of half types in float32, as devices keep them.

The formulas are torch's documented ones, or its own composite ops, computed in float32 for half types.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus._graph.arguments import AnyFunction, Value
from isthmus._graph.names import Missing, aten
from isthmus._graph.private import Op

HALVES = (torch.float16, torch.bfloat16)
Gradients = tuple[Tensor | None, ...]


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in the dtype that sums of it are kept in."""
    return x.float() if x.dtype in HALVES else x


def row_major(x: Tensor) -> Tensor:
    """Return the same elements, one after another from the start of their storage."""
    return x.contiguous() if x.storage_offset() == 0 else x.clone(memory_format=torch.contiguous_format)


def as_strided(
    self: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Read a view of a storage whose elements are those of ``self`` in row-major order."""
    return row_major(self).as_strided(size, stride, storage_offset or 0)


def as_strided_scatter(
    self: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Write a view of such a storage; where the view shows an element twice, the last write wins."""
    written = self.clone(memory_format=torch.contiguous_format)
    # Stride 0 shows an element n times, which ``copy_`` refuses to write to: the last of the n values is written.
    last = tuple(slice(n - 1, n) if step == 0 else slice(None) for n, step in zip(size, stride, strict=True))
    src = src[last]
    written.as_strided(src.shape, stride, storage_offset or 0).copy_(src)
    return written


def linear_backward(self: Tensor, grad_output: Tensor, weight: Tensor, output_mask: list[bool]) -> Gradients:
    """Return the gradients of ``linear`` for input, weight and bias."""
    # ``nn.Linear`` with one output may have a vector for its weight.
    matrix = weight if weight.dim() > 1 else weight[None]
    rows = grad_output.reshape(-1, matrix.shape[0])
    # The conjugate: gradients of complex tensors follow torch's convention.
    by_input = (rows @ matrix.conj()).reshape(self.shape) if output_mask[0] else None
    if not (output_mask[1] or output_mask[2]):
        return by_input, None, None
    by_weight = rows.mT @ self.reshape(-1, self.shape[-1]).conj()
    return by_input, by_weight.reshape(weight.shape), rows.sum(0).reshape(weight.shape[:-1])


def _gates(gates: Tensor, bias: Tensor | None) -> Tensor:
    return _wide(gates) if bias is None else _wide(gates) + _wide(bias)


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the new hidden and cell states of an LSTM, and its gates."""
    total = _gates(input_gates, input_bias) + _gates(hidden_gates, hidden_bias)
    # Four gates side by side, in the order that torch's kernels have: input, forget, cell, output.
    i, f, g, o = total.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * _wide(cx) + i * g
    results = (o * cy.tanh(), cy, torch.cat([i, f, g, o], 1))
    return tuple(x.to(input_gates.dtype) for x in results)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> Gradients:
    """Return the gradients of an LSTM's step for its gates, its cell state and its bias."""
    dtype, old, new = workspace.dtype, _wide(cx), _wide(cy).tanh()
    i, f, g, o = _wide(workspace).chunk(4, 1)
    by_hidden = torch.zeros_like(new) if grad_hy is None else _wide(grad_hy)
    by_cell = by_hidden * o * (1 - new**2) + (0 if grad_cy is None else _wide(grad_cy))
    by_i, by_f = by_cell * g * i * (1 - i), by_cell * old * f * (1 - f)
    by_g, by_o = by_cell * i * (1 - g**2), by_hidden * new * o * (1 - o)
    gates = torch.cat([by_i, by_f, by_g, by_o], 1)
    return gates.to(dtype), (by_cell * f).to(dtype), gates.sum(0).to(dtype) if has_bias else None


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the new hidden state of a GRU, and what its gradient needs."""
    ir, iz, i_new = _gates(input_gates, input_bias).chunk(3, 1)
    hr, hz, h_new = _gates(hidden_gates, hidden_bias).chunk(3, 1)
    # The order of a GRU's gates is reset, update, new.
    reset, update, old = (ir + hr).sigmoid(), (iz + hz).sigmoid(), _wide(hx)
    new = (i_new + reset * h_new).tanh()
    results = (update * old + (1 - update) * new, torch.cat([reset, update, new, old, h_new], 1))
    return tuple(x.to(input_gates.dtype) for x in results)


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Gradients:
    """Return the gradients of a GRU's step for both sets of gates, the hidden state and both biases."""
    dtype, grad = workspace.dtype, _wide(grad_hy)
    reset, update, new, old, h_new = _wide(workspace).chunk(5, 1)
    by_update = grad * (old - new) * update * (1 - update)
    by_new = grad * (1 - update) * (1 - new**2)
    by_reset = by_new * h_new * reset * (1 - reset)
    by_input = torch.cat([by_reset, by_update, by_new], 1)
    by_hidden = torch.cat([by_reset, by_update, by_new * reset], 1)
    biases = [g.sum(0).to(dtype) if has_bias else None for g in (by_input, by_hidden)]
    return by_input.to(dtype), by_hidden.to(dtype), (grad * update).to(dtype), *biases


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    results = torch.ops.aten._scaled_dot_product_attention_math.default(
        query, key, value, bias, 0.0, is_causal, None, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return results[0]


def _log_sums(
    query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    # Grouped-query attention: each head of key and value serves several of the query.
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    # A causal mask shows the lower triangle; else the bias is a mask of booleans, or numbers to add.
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril() if is_causal else bias
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else logits + seen
    return logits.logsumexp(-1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    scale: float | None = None,
) -> tuple[Tensor | int | None, ...]:
    """Return attention without dropout, and what a fused kernel would leave for its gradient."""
    bias = None if attn_bias is None else _wide(attn_bias)
    q, k, v = _wide(query), _wide(key), _wide(value)
    out = _attention(q, k, v, bias, is_causal, scale).to(query.dtype)
    sums = _log_sums(q, k, bias, is_causal, scale).float()
    nothing = torch.zeros((), dtype=torch.int64)  # the seed and offset of dropout, of which there is none
    # In the order of the fused op's results: out, sums, two counts, two lengths, seed, offset, debug mask.
    return out, sums, None, None, query.shape[-2], key.shape[-2], nothing, nothing, None


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    grad_input_mask: list[bool],
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    scale: float | None = None,
) -> Gradients:
    """Return the gradients of attention for query, key, value and bias, by torch's own autograd."""
    inputs = [query, key, value, *([] if attn_bias is None else [attn_bias])]
    # torch's own autograd through the plain formula, in float32 for half types.
    with torch.enable_grad():
        wide = [_wide(x).clone() for x in inputs]
        # A boolean mask has no gradient, and ``requires_grad_`` refuses it.
        leaves = [x.requires_grad_() for x in wide if x.is_floating_point()]
        q, k, v, *bias = wide
        out = _attention(q, k, v, bias[0] if bias else None, is_causal, scale)
    grads: list[Tensor | None] = list(torch.autograd.grad(out, leaves, _wide(grad_out)))
    if attn_bias is None or attn_bias.dtype == torch.bool:
        # The fused op returns a gradient for the mask as well: zeros, as nothing depends on it.
        grads.append(None if attn_bias is None else torch.zeros_like(attn_bias))
    # ``query`` stands for the mask, whose gradient has the dtype of the others.
    return tuple(None if g is None else g.to(x.dtype) for g, x in zip(grads, [*inputs, query], strict=False))


def _widened(op: Op, *like: str | None) -> AnyFunction:
    """Return a norm that keeps its statistics wide, as devices do; a result is cast to its argument's dtype."""

    def run(**arguments: Value) -> tuple[Tensor | None, ...]:
        results = op(**{name: _wide(v) if isinstance(v, Tensor) else v for name, v in arguments.items()})
        targets = [None if name is None else arguments.get(name) for name in like]
        # Statistics stay wide; what replaces an argument has its dtype.
        return tuple(
            r if r is None or t is None else r.to(t.dtype) for r, t in zip(results, targets, strict=True)
        )

    return run


def batch_norm_no_training(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return a batch normalized by the running statistics, and those statistics as its gradient takes them."""
    mean, var = _wide(running_mean), _wide(running_var)
    scale, shift = (None if x is None else _wide(x) for x in (weight, bias))
    out = torch.batch_norm(_wide(input), scale, shift, mean, var, False, momentum, eps, False)
    # What the gradient takes: the mean, and one over the standard deviation.
    return out.to(input.dtype), mean, (var + eps).rsqrt()


_FUNCTIONS: dict[Op | Missing, AnyFunction] = {
    aten.view.default: lambda self, size: self.reshape(size),
    aten.view.dtype: lambda self, dtype: row_major(self).view(dtype),
    aten.as_strided.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.linear_backward.default: linear_backward,
    aten._native_batch_norm_legit_no_training.default: batch_norm_no_training,
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
    aten._scaled_dot_product_fused_attention_overrideable.default: attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: attention_backward,
}
# The argument whose dtype each result of a norm has; statistics have none.
_NORMS: dict[Op | Missing, tuple[str | None, ...]] = {
    aten.native_layer_norm.default: ("input", None, None),
    aten.native_layer_norm_backward.default: ("input", "weight", "bias"),
    aten.native_batch_norm.default: ("input", None, None),
    aten._native_batch_norm_legit.no_stats: ("input", None, None),
    aten._native_batch_norm_legit_functional.default: ("input", None, None, None, None),
    aten.native_batch_norm_backward.default: ("input", "weight", "weight"),
}
EQUIVALENTS = {op: function for op, function in _FUNCTIONS.items() if not isinstance(op, Missing)}
"""A function of CPU tensors for each op that the CPU has none of, or that reads memory rather than values."""
WIDENED = {op: _widened(op, *like) for op, like in _NORMS.items() if not isinstance(op, Missing)}
"""A function for each op whose results have other dtypes on the CPU where some argument is of half precision."""
