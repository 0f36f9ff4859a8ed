"""The way onto cuDNN's attention: which calls take it, and that heads and lengths arrive where they belong."""

import functools

import jax
import jax.numpy as jnp
import pytest

from isthmus._ops.nn import attention
from isthmus._runtime import compiler, private


@pytest.fixture
def calls(monkeypatch):
    """Play a GPU whose fused kernel is XLA's, and keep what it was asked for; lengths come before heads there."""
    seen = []

    def plain(q, k, v, is_causal, scale):
        found = attention.attention(*[x.swapaxes(1, 2) for x in (q, k, v)], None, is_causal, scale)
        return found[0].swapaxes(1, 2).astype(q.dtype), found[1]

    def forward(*call):
        seen.append("forward")
        return plain(*call)

    def gradients(grad, q, k, v, out, sums, is_causal, scale):
        seen.append("backward")
        want, want_sums = plain(q, k, v, is_causal, scale)
        assert jnp.allclose(sums, want_sums)
        assert jnp.array_equal(out, want)
        return jax.vjp(lambda *qkv: plain(*qkv, is_causal, scale)[0], q, k, v)[1](grad)

    monkeypatch.setattr(private, "cudnn_attention", forward)
    monkeypatch.setattr(private, "cudnn_attention_gradients", gradients)
    monkeypatch.setattr(compiler, "platform", lambda: "gpu")
    return seen


def operands(heads=4, dtype=jnp.bfloat16, width=8):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, 4, 6, width), (2, heads, 6, width), (2, heads, 6, width), (2, 4, 6, width)]
    return [jax.random.normal(k, s, jnp.float32).astype(dtype) for k, s in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [4, 2])
def test_forward_and_backward_agree_with_the_plain_form(calls, heads, is_causal):
    q, k, v, grad = operands(heads)
    out, sums, *_ = attention.fused_attention(q, k, v, is_causal=is_causal)
    want, want_sums = attention.attention(q, k, v, None, is_causal, None)
    assert calls == ["forward"]
    close = functools.partial(jnp.allclose, rtol=2e-2, atol=2e-2)
    assert close(out.astype(jnp.float32), want)
    assert close(sums, want_sums)
    found = attention.fused_attention_backward(grad, q, k, v, None, out, sums, 0.0, is_causal)
    assert calls == ["forward", "backward"]
    _, transpose = jax.vjp(lambda *qkv: attention.attention(*qkv, None, is_causal, None)[0], q, k, v)
    for got, expected in zip(found[:3], transpose(grad.astype(jnp.float32)), strict=True):
        assert got.dtype == q.dtype
        assert close(got.astype(jnp.float32), expected.astype(jnp.float32))


def test_what_cudnn_would_do_otherwise_stays_with_xla(calls):
    q, k, v, _ = operands()
    attention.fused_attention(q, k, v, attn_bias=jnp.ones((6, 6), bool))
    attention.fused_attention(*operands(dtype=jnp.float32)[:3])
    attention.fused_attention(*operands(width=6)[:3])
    attention.fused_attention(q[:, :, :3], k, v, is_causal=True)
    assert calls == []
