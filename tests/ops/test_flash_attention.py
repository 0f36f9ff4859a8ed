"""The way onto cuDNN's attention: which calls take it, and that what it is given computes what torch asks for."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from isthmus._ops.nn import attention, cudnn_attention
from isthmus._runtime import compiler, private


def kernel(q, k, v, bias, is_causal, scale):
    """Compute as cuDNN's kernel does, lengths before heads; a row that sees nothing averages the values."""
    low = None if bias is None else bias.astype(jnp.float32)
    out, sums = attention.attention(*[x.swapaxes(1, 2) for x in (q, k, v)], low, is_causal, scale)
    return out.swapaxes(1, 2).astype(q.dtype), sums


def check_operands(q, k, v, bias, is_causal):
    """Refuse what cuDNN's kernels do not take."""
    assert q.shape[-1] % 8 == 0 and k.shape == v.shape
    assert not is_causal or q.shape[1] == k.shape[1]
    if bias is not None:
        assert bias.dtype == q.dtype and bool(jnp.isfinite(bias).all())
        assert bias.shape[2:] == (q.shape[1], k.shape[1])
        assert q.shape[1] % 2 == k.shape[1] % 2 == 0


@pytest.fixture
def calls(monkeypatch):
    """Play a GPU whose fused kernel is XLA's, and keep what it was asked for."""
    seen = []

    def forward(q, k, v, bias, is_causal, scale):
        check_operands(q, k, v, bias, is_causal)
        seen.append("forward")
        return kernel(q, k, v, bias, is_causal, scale)

    def gradients(grad, q, k, v, bias, out, sums, is_causal, scale, bias_gradient):
        check_operands(q, k, v, bias, is_causal)
        seen.append("backward")
        wide = [x.swapaxes(1, 2).astype(jnp.float32) for x in (grad, q, k, v, out)]
        g, q, k, v, o = wide
        shared = q.shape[1] // k.shape[1]
        keys, values = (jnp.repeat(x, shared, 1) for x in (k, v))
        logits = jnp.einsum("bhqd,bhkd->bhqk", q, keys) * scale
        logits = logits if bias is None else logits + bias.astype(jnp.float32)
        if is_causal:
            logits = jnp.where(jnp.tri(*logits.shape[2:], dtype=bool), logits, -jnp.inf)
        p = jnp.exp(logits - sums[..., None])  # the sums that forward saved, not sums of its own
        ds = p * (jnp.einsum("bhqd,bhkd->bhqk", g, values) - (g * o).sum(-1, keepdims=True))
        grouped = (*k.shape[:2], shared, *k.shape[2:])
        dk = jnp.einsum("bhqk,bhqd->bhkd", ds, q).reshape(grouped).sum(2) * scale
        dv = jnp.einsum("bhqk,bhqd->bhkd", p, g).reshape(grouped).sum(2)
        found = [jnp.einsum("bhqk,bhkd->bhqd", ds, keys) * scale, dk, dv]
        found = [x.swapaxes(1, 2).astype(jnp.bfloat16) for x in found]
        return (*found, *([ds.sum(0, keepdims=True).astype(bias.dtype)] if bias_gradient else []))

    monkeypatch.setattr(private, "cudnn_attention", forward)
    monkeypatch.setattr(private, "cudnn_attention_gradients", gradients)
    monkeypatch.setattr(compiler, "platform", lambda: "gpu")
    return seen


def operands(heads=4, dtype=jnp.bfloat16, width=8, queries=18, keys=18, value_width=None):
    seeds = jax.random.split(jax.random.key(0), 4)
    value_width = value_width or width
    shapes = [(2, 4, queries, width), (2, heads, keys, width), (2, heads, keys, value_width)]
    shapes.append((2, 4, queries, value_width))
    return [jax.random.normal(k, s, jnp.float32).astype(dtype) for k, s in zip(seeds, shapes, strict=True)]


def close(got, expected):
    return jnp.allclose(got.astype(jnp.float32), expected.astype(jnp.float32), rtol=4e-2, atol=4e-2)


def compare(q, k, v, grad, bias, is_causal, bias_gradient=False):
    """Compare forward and backward through the kernel with XLA's in float32."""
    asked = [True, True, True, bias_gradient]
    out, sums, *_ = attention.fused_attention(q, k, v, bias, is_causal=is_causal)
    found = attention.fused_attention_backward(grad, q, k, v, bias, asked, out, sums, 0.0, is_causal)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    lifted = None if bias is None else bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    floating = lifted is not None and lifted.dtype != jnp.bool_

    def plain(q, k, v, b):
        return attention.attention(q, k, v, b if floating else lifted, is_causal, None)[0]

    b = lifted.astype(jnp.float32) if floating else jnp.zeros(())
    want, transpose = jax.vjp(plain, *wide, b)
    *expected, for_bias = transpose(grad.astype(jnp.float32))
    assert close(out, want)
    for got, wanted in zip(found[:3], expected, strict=True):
        assert got.dtype == q.dtype
        assert close(got, wanted)
    if bias is None:
        assert found[3] is None
    elif bias_gradient:
        assert close(found[3], for_bias.reshape(bias.shape))
    else:
        assert found[3].shape == bias.shape


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [4, 2])
def test_forward_and_backward_agree_with_the_plain_form(calls, heads, is_causal):
    compare(*operands(heads), None, is_causal)
    assert calls == ["forward", "backward"]


def masks(queries, keys):
    """Return masks of every kind: of all shapes that broadcast, with rows that see nothing."""
    rng = jax.random.key(1)
    for shape in itertools.product((1, 2), (1, 4), (1, queries), (1, keys)):
        mask = jax.random.bernoulli(rng, 0.6, shape)
        mask = mask.at[..., 3, :].set(False) if shape[2] > 1 else mask
        yield mask
    yield jax.random.bernoulli(rng, 0.6, (queries, keys))
    yield jnp.zeros((queries, keys), bool)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(18, 18), (17, 17), (18, 21), (21, 16)])
def test_masks_become_biases(calls, queries, keys, is_causal):
    for mask in masks(queries, keys):
        compare(*operands(2, queries=queries, keys=keys), mask, is_causal)
        numbers = jnp.where(mask, jax.random.normal(jax.random.key(2), mask.shape), -jnp.inf)
        compare(*operands(2, queries=queries, keys=keys), numbers.astype(jnp.bfloat16), is_causal)
    assert set(calls) == {"forward", "backward"}
    assert calls.count("forward") == calls.count("backward") == 2 * 18


@pytest.mark.parametrize(("width", "value_width"), [(6, 6), (12, 20), (16, 8)])
def test_widths_are_padded(calls, width, value_width):
    compare(*operands(width=width, value_width=value_width), None, False)
    compare(*operands(width=width, value_width=value_width), next(masks(18, 18)), True)
    assert calls == ["forward", "backward"] * 2


@pytest.mark.parametrize("shape", [(18, 18), (1, 4, 18, 18), (1, 4, 1, 18), (1, 1, 18, 18)])
def test_a_bias_has_a_gradient(calls, shape):
    bias = jax.random.normal(jax.random.key(3), shape).astype(jnp.bfloat16)
    compare(*operands(2), bias, False, bias_gradient=True)
    assert calls == ["forward", "backward"]


def test_lengths_that_differ_need_no_mask_of_their_own(calls):
    compare(*operands(queries=17, keys=5), None, False)
    assert calls == ["forward", "backward"]


def test_what_cudnn_would_do_otherwise_stays_with_xla(calls):
    attention.fused_attention(*operands(dtype=jnp.float32)[:3])
    attention.fused_attention(*operands(queries=1)[:3], attn_bias=jnp.ones((1, 18), bool))
    assert calls == []
    bias = jnp.ones((2, 4, 18, 18), jnp.bfloat16)
    compare(*operands(), bias, False, bias_gradient=True)
    assert calls == ["forward"]  # a gradient for each row of the batch


def test_lows_are_exact():
    assert all(float(jnp.asarray(low, name)) == low for name, low in cudnn_attention._LOW.items())
