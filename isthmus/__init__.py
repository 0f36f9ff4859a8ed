"""PyTorch programs on every XLA device, in pure Python, through JAX.

``import isthmus`` (or ``import torch``, which imports it where torch has no accelerator of its own) adds the device
"jax" and the ``torch.compile`` backend "isthmus". The names below are the public API; everything that starts with an
underscore may change. Names that need JAX are loaded when they are first used, so that the import stays cheap.

>>> import torch, isthmus
>>> x = torch.tensor([1.0, 4.0, 9.0], device="jax")
>>> x.sqrt().tolist()
[1.0, 2.0, 3.0]
>>> torch.compile(lambda x: (x + 1).sum(), backend="isthmus")(x).item()
17.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isthmus import _upstream

_upstream.check_versions()  # before anything that another Python or torch might not have

# Before the rest: it autoloads isthmus._device.torch_glue.registration, which must not be half-imported by then.
import torch  # noqa: F401

import _isthmus_autoload
from isthmus import config, errors, integrations
from isthmus._caches import clear_caches
from isthmus._upstream import DRIFT, not_available

try:
    from isthmus._device.torch_glue.registration import register
    from isthmus._graph.backends import register_backend
    from isthmus.explain import explain
    from isthmus.modes import begin as _begin
    from isthmus.modes import graph_of, jit, lazy, mode, set_mode, sync

    if _isthmus_autoload.adds_device():
        register()
        integrations.watch()
except DRIFT as _error:  # a private name that this torch does not have, or has otherwise
    raise not_available(_error) from _error

if TYPE_CHECKING:  # the names of _LATER, for type checkers and editors
    from isthmus import checkpoint, metrics, optax
    from isthmus import distributed as distributed
    from isthmus._device.torch_glue.profiling import profile
    from isthmus._export.api import export, load
    from isthmus._interop.arrays import from_jax, to_jax
    from isthmus._interop.custom_ops import custom_op
    from isthmus._interop.functional import functional
    from isthmus._interop.functions import jax_function
    from isthmus._interop.generate import generate
    from isthmus._interop.modules import jax_module
    from isthmus._interop.torch_functions import torch_function
    from isthmus._interop.training import train_step
    from isthmus._ops.registry import user_lowering as lowering

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
    "generate",
    "graph_of",
    "integrations",
    "jax_function",
    "jax_module",
    "jit",
    "lazy",
    "load",
    "lowering",
    "metrics",
    "mode",
    "optax",
    "profile",
    "register",
    "register_backend",
    "set_mode",
    "sync",
    "to_jax",
    "torch_function",
    "train_step",
]

_begin(config.current.mode)  # the mode that ISTHMUS_MODE names


_LATER = {
    "checkpoint": "isthmus.checkpoint",
    "custom_op": "isthmus._interop.custom_ops",
    "distributed": "isthmus.distributed",
    "export": "isthmus._export.api",
    "from_jax": "isthmus._interop.arrays",
    "functional": "isthmus._interop.functional",
    "generate": "isthmus._interop.generate",
    "jax_function": "isthmus._interop.functions",
    "jax_module": "isthmus._interop.modules",
    "load": "isthmus._export.api",
    "lowering": "isthmus._ops.registry:user_lowering",
    "metrics": "isthmus.metrics",
    "optax": "isthmus.optax",
    "profile": "isthmus._device.torch_glue.profiling",
    "to_jax": "isthmus._interop.arrays",
    "torch_function": "isthmus._interop.torch_functions",
    "train_step": "isthmus._interop.training",
}
"""Names that need JAX, or a library of their own: the module of each, and its name there if that is another."""


def __getattr__(name: str) -> Any:
    """Load a public name that needs JAX when it is first used."""
    import importlib

    if name not in _LATER:
        raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
    if name != "metrics":  # it works without JAX, where every count is zero
        _upstream.require_jax()
    path, _, other = _LATER[name].partition(":")
    module = importlib.import_module(path)
    return module if path == f"isthmus.{name}" else getattr(module, other or name)
