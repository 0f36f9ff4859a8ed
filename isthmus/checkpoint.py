"""``isthmus.checkpoint``: orbax checkpoints that torch and JAX programs share, and optimizers' states both ways.

``save`` and ``load`` are in ``_interop/checkpoints.py``, ``to_optax`` and ``from_optax`` in
``_interop/optax_states.py``.
"""

from __future__ import annotations

from isthmus._interop.checkpoints import load, save
from isthmus._interop.optax_states import from_optax, to_optax

__all__ = ["from_optax", "load", "save", "to_optax"]
