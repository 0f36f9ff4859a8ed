"""A training step as a JAX user would write it: AdamW by hand, or by optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def adamw(p: Any, g: Any, m: Any, v: Any, t: Any, lr: float = 1e-3, decay: float = 0.01) -> Any:
    """Return what AdamW makes of one parameter and its state."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    update = m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return (p * (1 - lr * decay) - lr * update).astype(p.dtype), m, v


class JaxTraining:
    """A model's parameters and AdamW state in JAX, and a step that donates them."""

    def __init__(self, p: dict[str, Any], loss: Callable[..., Any], extra: Any = None) -> None:
        zeros = {name: jnp.zeros_like(value) for name, value in p.items()}
        self.state = (p, zeros, {k: jnp.zeros_like(v) for k, v in p.items()}, jnp.zeros(()), extra)

        def step(state: Any, *batch: Any) -> Any:
            p, m, v, t, extra = state
            if extra is None:
                value, grads = jax.value_and_grad(loss)(p, *batch)
            else:
                (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(p, extra, *batch)
            new = {name: adamw(p[name], grads[name], m[name], v[name], t + 1) for name in p}
            parts = [{name: triple[n] for name, triple in new.items()} for n in range(3)]
            return (*parts, t + 1, extra), value

        self.step = jax.jit(step, donate_argnums=0)

    def __call__(self, *batch: Any) -> Any:
        """Run one step and return the loss."""
        self.state, value = self.step(self.state, *batch)
        return value


class OptaxTraining:
    """The same with optax, as most would write it."""

    def __init__(self, p: dict[str, Any], loss: Callable[..., Any]) -> None:
        import optax

        transform = optax.adamw(1e-3, weight_decay=0.01)
        self.state = (p, transform.init(p))

        def step(state: Any, *batch: Any) -> Any:
            p, held = state
            value, grads = jax.value_and_grad(loss)(p, *batch)
            updates, held = transform.update(grads, held, p)
            return (optax.apply_updates(p, updates), held), value

        self.step = jax.jit(step, donate_argnums=0)

    def __call__(self, *batch: Any) -> Any:
        """Run one step and return the loss."""
        self.state, value = self.step(self.state, *batch)
        return value
