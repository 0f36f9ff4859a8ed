"""The fast paths of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` outside training."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from isthmus._graph.names import aten
from isthmus._ops.common import Array, accumulation_dtype, cast
from isthmus._ops.linalg.matmul import einsum, product
from isthmus._ops.nn.normalization import layer_norm
from isthmus._ops.registry import lowering

_OVER_PAIRS, _OVER_KEYS = 0, 1


def _project(x: Array, weight: Array, bias: Array) -> Array:
    out = product(x, weight.swapaxes(0, 1))
    return cast(out + cast(bias, out.dtype), x.dtype)


def _excluded(mask: Array, mask_type: int | None) -> Array:
    """Return which scores (batch, heads, queries, keys) a mask leaves out: where it is not zero."""
    left_out = mask != 0
    if mask_type == _OVER_KEYS:
        return left_out[:, None, None, :]
    return left_out[None, None] if mask_type == _OVER_PAIRS and left_out.ndim == 2 else left_out


def _attend(
    inputs: tuple[Array, Array, Array],
    heads: int,
    qkv: tuple[Array, Array],
    proj: tuple[Array, Array],
    mask: Array | None,
    mask_type: int | None,
) -> tuple[Array, Array]:
    """Return multi-head attention and its probabilities (batch, heads, queries, keys)."""
    weights, biases = jnp.split(qkv[0], 3), jnp.split(qkv[1], 3)
    dtype, width = inputs[0].dtype, weights[0].shape[0]
    acc_dtype = accumulation_dtype(dtype)
    q, k, v = (
        _project(x, w, b).reshape(*x.shape[:2], heads, width // heads)
        for x, w, b in zip(inputs, weights, biases, strict=True)
    )
    # The query is scaled and rounded before the product, as torch's kernel does it.
    scores = einsum(
        "bqhd,bkhd->bhqk", cast(cast(q, acc_dtype) / math.sqrt(width // heads), dtype), k, acc_dtype
    )
    if mask is not None:
        scores = jnp.where(_excluded(mask, mask_type), -jnp.inf, scores)
    chances = cast(jax.nn.softmax(scores, axis=-1), dtype)
    merged = cast(einsum("bhqk,bkhd->bqhd", chances, v, acc_dtype), dtype).reshape(*q.shape[:2], width)
    return _project(merged, *proj), chances


@lowering(aten._native_multi_head_attention.default, matmul=True)
def multi_head_attention(
    query: Array,
    key: Array,
    value: Array,
    embed_dim: int,
    num_head: int,
    qkv_weight: Array,
    qkv_bias: Array,
    proj_weight: Array,
    proj_bias: Array,
    mask: Array | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Array, Array]:
    """Multi-head attention, and its probabilities if they are needed."""
    qkv, proj = (qkv_weight, qkv_bias), (proj_weight, proj_bias)
    out, chances = _attend((query, key, value), num_head, qkv, proj, mask, mask_type)
    if not need_weights:
        return out, jnp.zeros((0,), out.dtype)
    if average_attn_weights:
        chances = cast(cast(chances, accumulation_dtype(chances.dtype)).mean(1), chances.dtype)
    return out, chances


@lowering(aten._transformer_encoder_layer_fwd.default, matmul=True)
def encoder_layer(
    src: Array,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Array,
    qkv_bias: Array,
    proj_weight: Array,
    proj_bias: Array,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Array,
    norm_bias_1: Array,
    norm_weight_2: Array,
    norm_bias_2: Array,
    ffn_weight_1: Array,
    ffn_bias_1: Array,
    ffn_weight_2: Array,
    ffn_bias_2: Array,
    mask: Array | None = None,
    mask_type: int | None = None,
) -> Array:
    """An encoder layer outside training: attention, then feed-forward, each with residual and norm."""

    def first(x: Array) -> Array:
        return layer_norm(x, [embed_dim], norm_weight_1, norm_bias_1, eps)[0]

    def second(x: Array) -> Array:
        return layer_norm(x, [embed_dim], norm_weight_2, norm_bias_2, eps)[0]

    def attend(x: Array) -> Array:
        qkv, proj = (qkv_weight, qkv_bias), (proj_weight, proj_bias)
        return _attend((x, x, x), num_heads, qkv, proj, mask, mask_type)[0]

    def feed(x: Array) -> Array:
        hidden = _project(x, ffn_weight_1, ffn_bias_1)
        activations = cast(hidden, accumulation_dtype(hidden.dtype))
        hidden = cast(
            jax.nn.gelu(activations, approximate=False) if use_gelu else jnp.maximum(activations, 0),
            src.dtype,
        )
        return _project(hidden, ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = src + attend(first(src))
        return x + feed(second(x))
    x = first(src + attend(src))
    return second(x + feed(x))
