"""Attention by cuDNN's kernels: which calls they serve, and what makes other calls fit them.

``attention.py`` asks ``serves`` and then calls ``forward`` and ``gradients``; what they raise (which sizes cuDNN has is
known to it alone) sends the call back to XLA. cuDNN's kernels are for half types. To them a mask is a bias, of as many
queries and keys as there are and, if it must have a gradient, of as many heads; widths are multiples of 8; and with a
bias lengths are even. So masks become biases, and what is missing is padded::

    query (2, 4, 5, 12), key (2, 2, 7, 12), mask bool (1, 1, 1, 7)
    query (2, 4, 6, 16), key (2, 2, 8, 16), bias (1, 1, 6, 8), the mask's False and the padded keys very low

A row whose every key is masked gives zeros in torch. cuDNN gives some average of the values, which is replaced; its
log-sum-exp is minus infinity here, as in ``attention.py``, and 0 in cuDNN's backward: that makes the probabilities of
such a row, exp(very low - 0), zero, and with them its gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from isthmus._ops.common import Array, cast
from isthmus._runtime import compiler, private

# What a bias says of a masked key. cuDNN fails to subtract numbers near the lowest of a half type from each other, so
# JAX's own masks take these, which also are exact in their types.
_LOW = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
# With fewer queries a mask costs more as a bias than the kernel saves: decoding has one.
_FEWEST_MASKED = 16


def serves(query: Array, key: Array, value: Array, bias: Array | None, bias_gradient: bool = False) -> bool:
    """Return whether cuDNN has kernels for such a call, as far as is known before it is asked."""
    # A program that is exported may run on another platform than this one.
    if compiler.platform() != "gpu" or compiler.is_portable() or str(query.dtype) not in _LOW:
        return False
    if bias is None:
        return True
    # A gradient for each row of the batch is not one that cuDNN sums up.
    return query.shape[2] >= _FEWEST_MASKED and not (bias_gradient and bias.shape[0] != 1)


@dataclass(frozen=True)
class _Fitted:
    """The bias of a call as cuDNN takes it, whether its own causal mask is on, and which queries see any key."""

    bias: Array | None
    causal: bool
    seen: Array | None


def _fitted(query: Array, key: Array, bias: Array | None, is_causal: bool, per_head: bool) -> _Fitted:
    queries, keys = query.shape[2], key.shape[2]
    causal = is_causal and queries == keys
    if bias is None and (causal or not is_causal):
        return _Fitted(None, causal, None)
    tril = jnp.tri(queries, keys, dtype=bool)[None, None] if is_causal else None
    low = jnp.asarray(_LOW[str(query.dtype)], query.dtype)
    allowed = tril if bias is None else bias if bias.dtype == jnp.bool_ else ~jnp.isneginf(bias)
    assert allowed is not None
    if bias is None or bias.dtype == jnp.bool_:
        added = jnp.where(allowed, jnp.zeros_like(low), low)
    else:
        added = jnp.maximum(cast(bias, query.dtype), low)
    if tril is not None:
        allowed = allowed & tril
        # Lengths that differ: torch's mask starts at the first query and key, cuDNN's need not.
        added = added if causal else jnp.where(tril, added, low)
    heads = query.shape[1] if per_head else added.shape[1]
    added = jnp.broadcast_to(added, (added.shape[0], heads, queries, keys))
    odd = ((0, 0), (0, 0), (0, queries % 2), (0, keys % 2))
    return _Fitted(jnp.pad(added, odd, constant_values=low), causal, allowed.any(-1))


def _padded(x: Array, even: bool, width: int) -> Array:
    """Return (batch, heads, length, width) as cuDNN takes it, (batch, length, heads, width), zeros added."""
    x = x.swapaxes(1, 2)
    length = x.shape[1] % 2 if even else 0
    return jnp.pad(x, ((0, 0), (0, length), (0, 0), (0, width - x.shape[3])))


def _width(query: Array, value: Array) -> int:
    return -(-max(query.shape[3], value.shape[3]) // 8) * 8


def _cut(x: Array, like: Array) -> Array:
    """Return a result of cuDNN's without its padding, heads before lengths."""
    return x.swapaxes(1, 2)[:, :, : like.shape[2], : like.shape[3]]


def forward(
    query: Array, key: Array, value: Array, bias: Array | None, is_causal: bool, scale: float
) -> tuple[Array, Array]:
    """Return the attention of each query, and its log-sum-exp."""
    fitted = _fitted(query, key, bias, is_causal, False)
    even, width = fitted.bias is not None, _width(query, value)
    q, k, v = (_padded(x, even, width) for x in (query, key, value))
    out, sums = private.cudnn_attention(q, k, v, fitted.bias, fitted.causal, scale)
    out, sums = out.swapaxes(1, 2)[:, :, : query.shape[2], : value.shape[3]], sums[:, :, : query.shape[2]]
    if fitted.seen is not None:
        out = jnp.where(fitted.seen[..., None], out, jnp.zeros_like(out))
        sums = jnp.where(fitted.seen, sums, -jnp.inf)
    return out, sums


def gradients(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    out: Array,
    sums: Array,
    is_causal: bool,
    scale: float,
    bias_gradient: bool,
) -> tuple[Array | None, ...]:
    """Return the gradients of ``forward`` for query, key, value and, if it is asked for, the bias."""
    fitted = _fitted(query, key, bias, is_causal, bias_gradient)
    even, width = fitted.bias is not None, _width(query, value)
    g, q, k, v, o = (_padded(x, even, width) for x in (grad, query, key, value, out))
    if fitted.seen is not None:
        sums = jnp.where(fitted.seen, sums, 0.0)
    sums = jnp.pad(sums, ((0, 0), (0, 0), (0, q.shape[1] - sums.shape[2])))
    dq, dk, dv, *of_bias = private.cudnn_attention_gradients(
        g, q, k, v, fitted.bias, o, sums, fitted.causal, scale, bias_gradient
    )
    cut = (_cut(dq, query), _cut(dk, key), _cut(dv, value))
    if not bias_gradient:
        return (*cut, None)
    assert bias is not None
    # The bias was broadcast, so its gradient is summed.
    db = of_bias[0][:, :, : query.shape[2], : key.shape[2]]
    broadcast = tuple(dim for dim, (a, b) in enumerate(zip(bias.shape, db.shape, strict=True)) if a != b)
    return (*cut, cast(cast(db, jnp.float32).sum(broadcast, keepdims=True), bias.dtype))
