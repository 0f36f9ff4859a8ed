"""``torch.compile(model)`` without a backend: graphs on "jax" tensors go to this package's backend.

torch's default is TorchInductor, which has no code generator for the device and raises ``KeyError: 'jax'``. Scripts and
libraries that call ``torch.compile(model)`` (optimizers of torchao and timm among them) cannot name another backend, so
the object that torch makes for its default looks where a graph's tensors are. So does TorchInductor's own entry,
``compile_fx``, which backends of libraries call that change a graph first (heavyball's optimizers). Graphs on other
devices stay TorchInductor's; ``isthmus.config.compile = "inductor"`` leaves it all of them.

TorchInductor's modes and options (``mode="max-autotune"``) say how to tune kernels and when to use CUDA graphs. XLA
does both by itself, so they are left out, with one warning that names them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from isthmus import _after_import, config
from isthmus._device.torch_glue import patches

_warned: set[str] = set()


def install() -> None:
    """Let torch's default compiler hand over the graphs of this device; called with its first tensor."""
    patches.replace("torch._TorchCompileInductorWrapper", "__call__", _handing_over)
    # Not imported here: that takes seconds.
    _after_import.call(
        "torch._inductor.compile_fx",
        lambda module: patches.replace(module.__name__, "compile_fx", _handing_over_graphs),
    )


def _handing_over(inductor: Callable[..., Any]) -> Callable[..., Any]:
    def compile_graph(self: Any, module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        if not _is_ours(module, inputs):
            return inductor(self, module, inputs, **kwargs)
        return _compiled(module, inputs, [*self.config, *(kwargs.get("config_patches") or {})])

    return compile_graph


def _handing_over_graphs(inductor: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inductor)
    def compile_fx(model_: Any, example_inputs_: Any, *args: Any, **kwargs: Any) -> Any:
        # Another inner compiler makes something else than a function, AOTInductor's a file.
        plain = isinstance(model_, GraphModule) and not args and kwargs.keys() <= {"config_patches"}
        if not plain or not _is_ours(model_, example_inputs_):
            return inductor(model_, example_inputs_, *args, **kwargs)
        return _compiled(model_, example_inputs_, [*(kwargs.get("config_patches") or {})])

    return compile_fx


def _is_ours(module: GraphModule, inputs: Sequence[Any]) -> bool:
    # Looked up at every graph: the setting may change between two of them.
    return config.current.compile != "inductor" and _is_on_device(module, inputs)


def _compiled(module: GraphModule, inputs: Sequence[Any], options: Sequence[str]) -> Any:
    import _isthmus_autoload

    _warn_of_options(options)
    # By the autoload module, which loads this package's backend when it is first asked for.
    return _isthmus_autoload.backend(module, inputs)


def _is_on_device(module: GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether a graph has a tensor of the device, among its inputs or, where it has none, among its nodes."""
    values = [*inputs, *(node.meta.get("example_value") for node in module.graph.nodes)]
    return any(isinstance(value, torch.Tensor) and value.device.type == "jax" for value in values)


def _warn_of_options(names: Sequence[str]) -> None:
    # Each name once per process.
    new = sorted(set(names) - _warned)
    if new:
        _warned.update(new)
        warnings.warn(
            f"torch.compile's options {', '.join(new)} are TorchInductor's and are left out for tensors on 'jax', "
            f"which XLA compiles; torch.compile(backend='isthmus', options=...) has options of its own",
            stacklevel=2,
        )
