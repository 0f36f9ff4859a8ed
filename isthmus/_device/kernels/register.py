"""Registers every kernel with torch; importing it loads JAX and the lowerings.

Two sorts: one kernel for each lowering and its ``out=`` and in-place forms, and kernels written by hand (``KERNELS`` of
the modules imported here) for what no lowering can do. A kernel by hand whose op this torch lacks, or has with other
arguments than those in ``_ops/schemas.txt``, is refused as a lowering would be: the op then takes a lower tier.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from isthmus._device.core import transfers, views
from isthmus._device.core.dispatch import forget, kernel_for
from isthmus._device.kernels import (
    allclose_in_backward,
    assertions,
    attention,
    checked_composites,
    factories,
    factorizations,
    mask_indexing,
    mixed_lists,
    nn_forms,
    random_factories,
    recurrent,
    sparse,
)
from isthmus._device.kernels.conjugate import resolving
from isthmus._device.torch_glue import module_to, streams
from isthmus._device.torch_glue.private import has_kernel, hide_from_dynamo
from isthmus._graph.names import Missing, overload_named
from isthmus._graph.private import OpOverload, torch_schema
from isthmus._graph.schema import mutating_of, schema_of
from isthmus._ops import known_schemas
from isthmus._ops.registry import Lowering, attempted, on_register, refused, registry

_libraries: dict[str, torch.library.Library] = {}
_registered: set[OpOverload] = set()
_own = {
    **assertions.KERNELS,
    **attention.KERNELS,
    **checked_composites.KERNELS,
    **nn_forms.KERNELS,
    **streams.KERNELS,
    **views.KERNELS,
    **factories.KERNELS,
    **factorizations.KERNELS,
    **mask_indexing.KERNELS,
    **module_to.KERNELS,
    **transfers.KERNELS,
    **mixed_lists.KERNELS,
    **random_factories.KERNELS,
    **sparse.KERNELS,
}


def call(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an op that has no kernel of its own: through a decomposition or the CPU."""
    # Its kernel exists by now: the call that loaded this module goes through torch once more.
    if has_kernel(op, "PrivateUse1"):
        return op(*args, **kwargs)  # the very first call on the device, made before the kernels were there
    return kernel_for(op)(*args, **kwargs)


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    return _libraries[namespace]


def _register(op: OpOverload, kernel: Any) -> None:
    namespace, _, name = op.name().partition("::")
    # The user may register a lowering of an op that has one.
    again = op in _registered
    _registered.add(op)
    hide_from_dynamo(kernel)
    with warnings.catch_warnings():
        # A lowering that replaces another replaces its kernel, which torch warns about.
        warnings.simplefilter("ignore" if again else "default")
        _library(namespace).impl(name, kernel, "PrivateUse1", allow_override=again)


def _loses_gradient(op: OpOverload) -> bool:
    """Return whether a kernel of ours would hide the composite that torch differentiates through."""
    return has_kernel(op, "CompositeImplicitAutograd") and not has_kernel(op, "Autograd")


def _register_lowering(entry: Lowering) -> None:
    for op in (entry.op, *mutating_of(entry.op)):
        # The kernel that was made of the old lowering is dropped with its plans.
        forget(op)
        by_hand = op.name().removeprefix("aten::") in _own and str(op) not in refused
        if not by_hand and not _loses_gradient(op):
            _register(op, resolving(op, kernel_for(op)))


def _register_by_hand(name: str, kernel: Callable[..., Any], key: str) -> None:
    """Register a kernel that is not made of a lowering, unless its op is not what the kernel was written for."""
    op = overload_named(f"aten::{name}")
    # Named whether or not it is refused: tests/update_schemas.py records the schemas of all.
    attempted.add(op.name if isinstance(op, Missing) else str(op))
    if isinstance(op, Missing):
        refused[op.name] = "this torch does not have the overload"
    elif known_schemas.match(schema_of(op)) is None:
        refused[str(op)] = f"{op} has other arguments in this torch: {torch_schema(op)}"
    else:
        hide_from_dynamo(kernel)
        _library("aten").impl(name, kernel, key)


# At import: the kernels written by hand first, so that no lowering takes their place.
for _name, _function in _own.items():
    _register_by_hand(_name, _function, "PrivateUse1")
for _module in (attention, checked_composites, module_to, random_factories, allclose_in_backward, recurrent):
    for _name, _function in _module.AUTOGRAD_KERNELS.items():
        _register_by_hand(_name, _function, "AutogradPrivateUse1")
for _op, _kernel, _key in sparse.kernels():
    hide_from_dynamo(_kernel)
    _library("aten").impl(_op.name().removeprefix("aten::"), _kernel, _key)
for _lowering in list(registry.values()):
    _register_lowering(_lowering)
on_register.append(_register_lowering)
