"""Checkpoints that torch and JAX programs share: orbax folders of nested pytrees, and optimizers' states both ways."""

from __future__ import annotations

from isthmus._interop.checkpoints import load, save
from isthmus._interop.optax_states import from_optax, to_optax

__all__ = ["from_optax", "load", "save", "to_optax"]
