"""Attention in graphs of CUDA tensors: torch picks one of CUDA's kernels, which become the one op that is lowered.

With dropout they are left to CUDA, whose backward draws the same numbers again from a seed only CUDA understands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_FORWARD = _aten._scaled_dot_product_fused_attention_overrideable.default
_BACKWARD = _aten._scaled_dot_product_fused_attention_overrideable_backward.default
# The kernels for many rows at once keep the sums of so many.
_ROWS = 32
Bias = Tensor | None


def _forward(query: Tensor, key: Tensor, value: Tensor, bias: Bias, causal: bool, scale: Any) -> Any:
    return _FORWARD(query, key, value, bias, 0.0, causal, False, scale=scale)[:2]


def _backward(
    grad: Tensor, qkv: tuple[Tensor, ...], bias: Bias, out: Tensor, sums: Tensor, causal: bool, scale: Any
) -> Any:
    query, key, _ = qkv
    wanted = [True, True, True, bias is not None]
    seed = query.new_zeros((), dtype=torch.int64)
    sizes = (None, None, query.size(2), key.size(2))
    return _BACKWARD(grad, *qkv, bias, wanted, out, sums, *sizes, 0.0, causal, seed, seed, scale=scale)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Return what FlashAttention does, with nothing for its generator."""
    if dropout_p or return_debug_mask:
        return NotImplemented
    out, sums = _forward(query, key, value, None, is_causal, scale)
    state = query.new_zeros((2,), dtype=torch.uint64)
    lengths = (None, None, query.size(2), key.size(2))
    return out, sums, *lengths, state, state.new_zeros(()), query.new_zeros((0,))


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    """Return its gradients for query, key and value."""
    if dropout_p:
        return NotImplemented
    return _backward(grad_out, (query, key, value), None, out, logsumexp, is_causal, scale)[:3]


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Return what the memory-efficient kernel does: heads beside each other, sums for whole groups of rows."""
    if dropout_p:
        return NotImplemented
    out, sums = _forward(query, key, value, attn_bias, is_causal, scale)
    rows = sums.size(2)
    sums = F.pad(sums, (0, -rows % _ROWS if compute_log_sumexp else -rows))
    seed = query.new_zeros((), dtype=torch.int64)
    return out.transpose(1, 2).contiguous().transpose(1, 2), sums, seed, seed.clone()


def efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Return its gradients for query, key, value and bias."""
    if dropout_p:
        return NotImplemented
    sums = logsumexp[:, :, : query.size(2)]
    found = _backward(grad_out_, (query, key, value), attn_bias, out, sums, is_causal, scale)
    return *found[:3], found[3] if grad_input_mask[3] else None


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Return what cuDNN's kernel does, whose sums have one dim more."""
    if dropout_p or return_debug_mask:
        return NotImplemented
    out, sums = _forward(query, key, value, attn_bias, is_causal, scale)
    seed = query.new_zeros((), dtype=torch.int64)
    lengths = (None, None, query.size(2), key.size(2))
    return out, sums.unsqueeze(-1), *lengths, seed, seed.clone(), None


def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Bias,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Any:
    """Return its gradients for query, key and value."""
    if dropout_p:
        return NotImplemented
    sums = logsumexp.squeeze(-1)
    return _backward(grad_out, (query, key, value), attn_bias, out, sums, is_causal, scale)[:3]


KERNELS: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention.default: flash,
    _aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    _aten._scaled_dot_product_efficient_attention.default: efficient,
    _aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    _aten._scaled_dot_product_cudnn_attention.default: cudnn,
    _aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
}
