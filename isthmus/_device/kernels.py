"""Registers every kernel with torch; importing it loads JAX and the lowerings."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from isthmus._device import batchnorm, factories, lists, masks, random_factories, transfer, views
from isthmus._device.conjugate import resolving
from isthmus._device.dispatch import kernel_for, refresh
from isthmus._device.private import has_kernel
from isthmus._graph.schema import mutating_of
from isthmus._ops.registry import Lowering, on_register, registry

_libraries: dict[str, torch.library.Library] = {}
_registered: set[OpOverload] = set()
_own = {
    **batchnorm.KERNELS,
    **views.KERNELS,
    **factories.KERNELS,
    **masks.KERNELS, **transfer.KERNELS,
    **lists.KERNELS,
    **random_factories.KERNELS,
}


def call(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an op that has no kernel of its own: through a decomposition or the CPU."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "PrivateUse1"):
        return op(*args, **kwargs)  # the very first call on the device, made before the kernels were there
    return kernel_for(op)(*args, **kwargs)


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    return _libraries[namespace]


def _register(op: OpOverload, kernel: Any) -> None:
    namespace, name = op._schema.name.split("::")
    overload = op._schema.overload_name
    _library(namespace).impl(f"{name}.{overload}" if overload else name, kernel, "PrivateUse1")


def _loses_gradient(op: OpOverload) -> bool:
    """Return whether a kernel of ours would hide the composite that torch differentiates through."""
    return has_kernel(op, "CompositeImplicitAutograd") and not has_kernel(op, "Autograd")


def _register_lowering(entry: Lowering) -> None:
    for op in (entry.op, *mutating_of(entry.op)):
        refresh(op)
        if op in _registered or op.name().removeprefix("aten::") in _own or _loses_gradient(op):
            continue
        _registered.add(op)
        _register(op, resolving(op, kernel_for(op)))


for _name, _function in _own.items():
    _library("aten").impl(_name, _function, "PrivateUse1")
for _lowering in list(registry.values()):
    _register_lowering(_lowering)
on_register.append(_register_lowering)
