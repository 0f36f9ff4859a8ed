"""PyTorch programs on every XLA device: device "jax", backend "isthmus", and a road to JAX."""

from __future__ import annotations

from typing import Any

from isthmus import _upstream

_upstream.check_versions()  # before anything that another Python or torch might not have

# Before the rest: it autoloads isthmus._device.torch_glue.registration, which must not be half-imported by then.
import torch  # noqa: F401

import _isthmus_autoload
from isthmus import config, errors
from isthmus._caches import clear_caches
from isthmus._graph.backends import register_backend
from isthmus._upstream import DRIFT, not_available
from isthmus.explain import explain
from isthmus.modes import begin as _begin
from isthmus.modes import graph_of, jit, lazy, mode, set_mode, sync

__version__ = "0.1.0.dev0"
__all__ = [
    "checkpoint",
    "clear_caches",
    "config",
    "custom_op",
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
    "optax",
    "register",
    "register_backend",
    "set_mode",
    "sync",
    "to_jax",
    "torch_function",
    "train_step",
]

try:
    from isthmus._device.torch_glue.registration import register

    if _isthmus_autoload.asked_for:
        register()
except DRIFT as _error:
    raise not_available(_error) from _error
_begin(config.current.mode)  # what the environment asks for


_LATER = {
    "checkpoint": "isthmus.checkpoint",
    "custom_op": "isthmus._interop.custom_ops",
    "export": "isthmus._export.api",
    "from_jax": "isthmus._interop.arrays",
    "functional": "isthmus._interop.functional",
    "jax_function": "isthmus._interop.functions",
    "jax_module": "isthmus._interop.modules",
    "load": "isthmus._export.api",
    "lowering": "isthmus._ops.registry:user_lowering",
    "metrics": "isthmus.metrics",
    "optax": "isthmus.optax",
    "to_jax": "isthmus._interop.arrays",
    "torch_function": "isthmus._interop.torch_functions",
    "train_step": "isthmus._interop.training",
}
"""What needs JAX, or a library of its own, by its module and, where it has another name there, that name."""


def __getattr__(name: str) -> Any:
    """Load what needs JAX when it is asked for."""
    import importlib

    if name not in _LATER:
        raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
    if name != "metrics":  # which counts nothing until JAX is there
        _upstream.require_jax()
    path, _, other = _LATER[name].partition(":")
    module = importlib.import_module(path)
    return module if path == f"isthmus.{name}" else getattr(module, other or name)
