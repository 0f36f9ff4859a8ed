"""Scaled dot product attention: one program; a row with nothing to attend to is zero."""

from __future__ import annotations

import contextlib
import math

import jax
import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import Array, accumulation_dtype, cast
from isthmus._ops.linalg.matmul import einsum
from isthmus._ops.nn import cudnn_attention
from isthmus._ops.registry import lowering
from isthmus.errors import Unsupported


def _bias(logits: Array, bias: Array | None, is_causal: bool) -> Array:
    """Return the logits (..., heads, queries, keys) with what may not be attended to at minus infinity."""
    never = jnp.asarray(-jnp.inf, logits.dtype)
    if is_causal:
        logits = jnp.where(jnp.tri(logits.shape[-2], logits.shape[-1], dtype=bool), logits, never)
    if bias is None:
        return logits
    if bias.dtype == jnp.bool_:
        return jnp.where(bias, logits, never)
    return logits + cast(bias, logits.dtype)


def softmax_with_sums(logits: Array) -> tuple[Array, Array, Array]:
    """Return the probabilities, the logarithm of each row's sum and its maximum; minus infinities alone give zeros."""
    # The maximum cancels in the quotient, so its gradient is zero; computing it would cost a scatter.
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True, initial=-jnp.inf))
    finite = jnp.where(jnp.isneginf(top), jnp.zeros_like(top), top)
    powers = jnp.exp(logits - finite)
    total = powers.sum(-1, keepdims=True)
    empty = total == 0
    divided = powers / jnp.where(empty, jnp.ones_like(total), total)
    return divided, (jnp.log(total) + finite).squeeze(-1), top.squeeze(-1)


def attention(
    query: Array, key: Array, value: Array, bias: Array | None, is_causal: bool, scale: float | None
) -> tuple[Array, Array]:
    """Return the attention of each query, in the accumulation dtype, and its log-sum-exp.

    Dims are (batch, heads, length, width); there may be fewer key heads than query heads.
    """
    acc_dtype = accumulation_dtype(query.dtype)
    batch, heads, length, width = query.shape
    # Grouped queries: each key head serves so many query heads, without a copy of the keys.
    shared = heads // max(key.shape[1], 1)
    factor = 1 / math.sqrt(width) if scale is None else scale
    grouped = query.reshape(batch, key.shape[1], shared, length, width)
    logits = einsum("bhgqd,bhkd->bhgqk", grouped, key, acc_dtype) * factor
    logits = _bias(logits.reshape(batch, heads, length, key.shape[2]), bias, is_causal)
    chances, sums, _ = softmax_with_sums(logits)
    split = cast(chances, value.dtype).reshape(batch, key.shape[1], shared, length, key.shape[2])
    out = einsum("bhgqk,bhkd->bhgqd", split, value, acc_dtype)
    return out.reshape(batch, heads, length, value.shape[-1]), sums


def _scale(query: Array, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _fastest(
    query: Array, key: Array, value: Array, bias: Array | None, is_causal: bool, scale: float | None
) -> tuple[Array, Array]:
    if cudnn_attention.serves(query, key, value, bias):
        # Which sizes it has is known to it alone, and said by raising.
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):
            return cudnn_attention.forward(query, key, value, bias, is_causal, _scale(query, scale))
    return attention(query, key, value, bias, is_causal, scale)


def _lift(x: Array) -> Array:
    return x if x.ndim == 4 else x.reshape((1,) * (4 - x.ndim) + x.shape)


def _lift_bias(bias: Array | None) -> Array | None:
    return None if bias is None else _lift(bias)


@lowering(
    aten._scaled_dot_product_fused_attention_overrideable.default, matmul=True, ignores=("return_debug_mask",)
)
def fused_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_bias: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Array | int | None, ...]:
    """Attention without dropout; the extra results are what backward would need of a fused kernel."""
    if dropout_p:
        raise Unsupported("dropout inside attention")
    out, sums = _fastest(_lift(query), _lift(key), _lift(value), _lift_bias(attn_bias), is_causal, scale)
    out = cast(out.reshape(*query.shape[:-1], value.shape[-1]), query.dtype)
    nothing = jnp.zeros((), jnp.int64)
    return (out, cast(sums, jnp.float32), None, None, query.shape[-2], key.shape[-2], nothing, nothing, None)


_SAVED = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")


@lowering(aten._scaled_dot_product_fused_attention_overrideable_backward.default, matmul=True, ignores=_SAVED)
def fused_attention_backward(
    grad_out: Array,
    query: Array,
    key: Array,
    value: Array,
    attn_bias: Array | None,
    grad_input_mask: list[bool],
    out: Array,
    logsumexp: Array,
    dropout_p: float,
    is_causal: bool,
    scale: float | None = None,
) -> tuple[Array | None, ...]:
    """The gradients for query, key, value and bias, with the probabilities computed again."""
    if dropout_p:
        raise Unsupported("dropout inside attention")
    floating = attn_bias is not None and jnp.issubdtype(attn_bias.dtype, jnp.floating)
    wanted = floating and grad_input_mask[3]
    bias = _lift_bias(attn_bias)
    if query.ndim == 4 and cudnn_attention.serves(query, key, value, bias, wanted):
        grad, factor = cast(grad_out, query.dtype), _scale(query, scale)
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):
            *qkv, for_bias = cudnn_attention.gradients(
                grad, query, key, value, bias, out, logsumexp, is_causal, factor, wanted
            )
            return (*qkv, _bias_gradient(attn_bias, for_bias))
    acc_dtype = accumulation_dtype(query.dtype)
    operands = [query, key, value] + ([attn_bias] if floating else [])

    def forward(*inputs: Array) -> Array:
        bias = inputs[3] if floating else attn_bias
        q, k, v = (_lift(a) for a in inputs[:3])
        attended, _ = attention(q, k, v, _lift_bias(bias), is_causal, scale)
        return attended.reshape(grad_out.shape)

    _, transpose = jax.vjp(forward, *operands)
    grads: list[Array | None] = list(transpose(cast(grad_out, acc_dtype)))
    return (*grads[:3], _bias_gradient(attn_bias, grads[3] if floating else None))


def _bias_gradient(bias: Array | None, grad: Array | None) -> Array | None:
    """Return the gradient as torch announces it: one of the bias' shape wherever there is a bias."""
    if bias is None:
        return None
    return jnp.zeros_like(bias) if grad is None else grad.reshape(bias.shape)


@lowering(aten._scaled_dot_product_flash_attention_for_cpu.default, matmul=True)
def attention_for_cpu(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """Attention as graphs of CPU tensors have it; also the sums that its backward is given."""
    if dropout_p:
        raise Unsupported("dropout inside attention")
    out, sums = _fastest(query, key, value, _lift_bias(attn_mask), is_causal, scale)
    # Where there is nothing to attend to, torch saves 0 here.
    sums = jnp.where(jnp.isneginf(sums), jnp.zeros_like(sums), sums)
    return cast(out, query.dtype), cast(sums, accumulation_dtype(query.dtype))


@lowering(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, matmul=True)
def attention_for_cpu_backward(
    grad_out: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array | None, ...]:
    """The gradients for query, key and value; a mask that needs one never comes this way."""
    asked = [True, True, True, False]
    saved = (attn_mask, asked, out, logsumexp, dropout_p, is_causal, scale)
    return fused_attention_backward(grad_out, query, key, value, *saved)[:3]
