"""Attention: which calls of ``scaled_dot_product_attention`` run as one op, and the ops around it.

torch picks an attention kernel by a C++ table that a Python device is not in, so the choice is made here: one fused op
where that computes the same, torch's composite of matmuls and a softmax elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus._device.core.dispatch import kernel_for
from isthmus._device.torch_glue.private import fused_attention_enabled
from isthmus._graph.names import aten as _aten
from isthmus._ops.registry import registry

_FUSED = _aten._scaled_dot_product_fused_attention_overrideable.default
_WHOLE = _aten.scaled_dot_product_attention.default


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run attention as one op where that is exact, and as torch takes it apart elsewhere."""
    if dropout_p == 0.0 and _fits(query, key, value, attn_mask, is_causal, enable_gqa):
        return _FUSED(query, key, value, attn_mask, 0.0, is_causal, False, scale=scale)[0]
    return _WHOLE.decompose(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, gqa: bool) -> bool:
    # sdpa_kernel(SDPBackend.MATH) asks for the ops one by one, which can be differentiated twice.
    if not fused_attention_enabled() or not query.is_floating_point():
        return False
    if _FUSED not in registry:  # refused with this torch, whose own kernel of this name only raises
        return False
    if not (query.dim() == key.dim() == value.dim() == 4 and query.dtype == key.dtype == value.dtype):
        return False
    # Grouped-query attention: heads of the query share those of key and value.
    heads, shared = query.size(1), key.size(1)
    same_heads = heads == shared or (gqa and shared > 0 and heads % shared == 0)
    same = query.size(0) == key.size(0) == value.size(0) and shared == value.size(1)
    if not (same_heads and same and query.size(3) == key.size(3) and key.size(2) == value.size(2)):
        return False
    # Softmax over nothing is left to torch's composite, which has the CPU's answer.
    if 0 in (*query.shape, *key.shape, *value.shape):
        return False
    if mask is None:
        return True
    return mask.dtype in (torch.bool, query.dtype) and _spans(mask, query, key)


def _spans(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    # A mask may be broadcast along any of the four dims.
    full = (query.size(0), query.size(1), query.size(2), key.size(2))
    sizes = tuple(mask.shape)
    return len(sizes) <= 4 and all(a in (1, b) for a, b in zip(reversed(sizes), reversed(full), strict=False))


def fused(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the one op, whose results hold two plain numbers: the lengths."""
    # Results four and five are sizes, which no program returns.
    results = kernel_for(_FUSED)(query, key, *args, **kwargs)
    return (*results[:4], query.size(-2), key.size(-2), *results[6:])


def nested_from_mask_left_aligned(t: Tensor, mask: Tensor) -> bool:
    """Return False: with no nested tensors here, it keeps ``nn.TransformerEncoder`` on padded ones."""
    return False


def multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """Run the fast path of ``nn.MultiheadAttention``; probabilities that are not asked for are None, as on the CPU."""
    out, chances = kernel_for(_aten._native_multi_head_attention.default)(*args, **kwargs)
    return out, chances if chances.dim() > 1 else None


KERNELS = {
    "_native_multi_head_attention": multi_head_attention,
    "_nested_tensor_from_mask_left_aligned": nested_from_mask_left_aligned,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "_scaled_dot_product_fused_attention_overrideable": fused,
}
AUTOGRAD_KERNELS = {"scaled_dot_product_attention": scaled_dot_product_attention}
