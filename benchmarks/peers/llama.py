"""A Llama of transformers as a JAX user would write it, for greedy generation with a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from torch import nn


@dataclass(frozen=True)
class Size:
    """How large a Llama is."""

    layers: int
    heads: int
    shared: int
    depth: int
    base: float
    epsilon: float

    @classmethod
    def of(cls, config: Any) -> Size:
        """Return the size of a model of transformers."""
        depth = config.hidden_size // config.num_attention_heads
        layers, heads, shared = (
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        return cls(layers, heads, shared, depth, config.rope_parameters["rope_theta"], config.rms_norm_eps)


def parameters(model: nn.Module) -> dict[str, Any]:
    """Return a torch model's parameters as JAX arrays, by the names they have in a layer."""
    return {
        name.removeprefix("model."): jnp.asarray(p.detach().float().numpy())
        for name, p in model.named_parameters()
    }


def empty_cache(size: Size, rows: int, room: int | None) -> list[tuple[Any, Any]]:
    """Return the keys and values of no tokens, with room for some if they are not to grow."""
    shape = (rows, size.shared, room or 0, size.depth)
    return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(size.layers)]


def _norm(x: Any, weight: Any, epsilon: float) -> Any:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon) * weight


def _rotate(x: Any, positions: Any, base: float) -> Any:
    half = x.shape[-1] // 2
    angles = positions[:, None] / base ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def step(
    p: dict[str, Any], tokens: Any, cache: list[tuple[Any, Any]], at: Any, size: Size
) -> tuple[Any, Any]:
    """Return the most likely token after these, and the cache with them in it.

    ``at`` is where they are written into a cache of full size; None: the cache grows by them.
    """
    rows, count = tokens.shape
    start = cache[0][0].shape[2] if at is None else at
    positions = start + jnp.arange(count)
    x, new = p["embed_tokens.weight"][tokens], []
    for n, (keys, values) in enumerate(cache):
        layer = f"layers.{n}."
        y = _norm(x, p[layer + "input_layernorm.weight"], size.epsilon)

        def project(name: str, heads: int, y: Any = y, layer: str = layer) -> Any:
            z = y @ p[f"{layer}self_attn.{name}.weight"].T
            return z.reshape(rows, count, heads, size.depth).swapaxes(1, 2)

        q = _rotate(project("q_proj", size.heads), positions, size.base)
        k, v = _rotate(project("k_proj", size.shared), positions, size.base), project("v_proj", size.shared)
        if at is None:
            keys, values = jnp.concatenate([keys, k], 2), jnp.concatenate([values, v], 2)
        else:
            place = (0, 0, at, 0)
            keys, values = (
                jax.lax.dynamic_update_slice(keys, k, place),
                jax.lax.dynamic_update_slice(values, v, place),
            )
        new.append((keys, values))
        groups = q.reshape(rows, size.shared, -1, count, size.depth)
        weights = jnp.einsum("bgrqd,bgkd->bgrqk", groups, keys) / size.depth**0.5
        weights = jnp.where(jnp.arange(keys.shape[2]) <= positions[:, None], weights, -jnp.inf)
        mixed = jnp.einsum("bgrqk,bgkd->bgrqd", jax.nn.softmax(weights, -1), values)
        mixed = mixed.reshape(rows, size.heads, count, size.depth).swapaxes(1, 2).reshape(rows, count, -1)
        x = x + mixed @ p[layer + "self_attn.o_proj.weight"].T
        y = _norm(x, p[layer + "post_attention_layernorm.weight"], size.epsilon)
        gate, up = y @ p[layer + "mlp.gate_proj.weight"].T, y @ p[layer + "mlp.up_proj.weight"].T
        x = x + (jax.nn.silu(gate) * up) @ p[layer + "mlp.down_proj.weight"].T
    logits = _norm(x[:, -1:], p["norm.weight"], size.epsilon) @ p["lm_head.weight"].T
    return logits.argmax(-1).astype(tokens.dtype), new
