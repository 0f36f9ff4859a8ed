"""PyTorch programs on every XLA device: device "jax", backend "isthmus", and a road to JAX."""

from __future__ import annotations

from typing import Any

# First of all: it autoloads isthmus._device.registration, which must not be half-imported by then.
import torch  # noqa: F401

import _isthmus_autoload
from isthmus import config, errors
from isthmus._device.registration import register
from isthmus._graph.backends import register_backend
from isthmus.explain import explain
from isthmus.modes import graph_of, jit, lazy, mode, set_mode, sync

__version__ = "0.1.0.dev0"
__all__ = [
    "checkpoint",
    "config",
    "errors",
    "explain",
    "export",
    "from_jax",
    "functional",
    "graph_of",
    "jax_function",
    "jax_module",
    "jit",
    "lazy",
    "load",
    "lowering",
    "metrics",
    "mode",
    "register",
    "register_backend",
    "set_mode",
    "sync",
    "to_jax",
    "torch_function",
]

if _isthmus_autoload.asked_for:
    register()
if config.mode == "lazy":
    set_mode("lazy")


def __getattr__(name: str) -> Any:
    """Load what needs JAX when it is asked for."""
    import importlib

    if name == "lowering":
        return importlib.import_module("isthmus._ops.registry").lowering
    if name in ("from_jax", "to_jax"):
        return getattr(importlib.import_module("isthmus._interop.arrays"), name)
    if name == "jax_function":
        return importlib.import_module("isthmus._interop.functions").jax_function
    if name == "jax_module":
        return importlib.import_module("isthmus._interop.modules").jax_module
    if name in ("export", "load"):
        return getattr(importlib.import_module("isthmus._export.api"), name)
    if name == "functional":
        return importlib.import_module("isthmus._interop.functional").functional
    if name == "torch_function":
        return importlib.import_module("isthmus._interop.torch_functions").torch_function
    if name in ("checkpoint", "metrics"):
        return importlib.import_module(f"isthmus.{name}")
    raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
