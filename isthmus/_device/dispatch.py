"""The path from a torch call to an executable: start reading here.

A kernel turns a call into a key (layouts, dtypes, static arguments) and a list of run-time inputs (arrays,
numbers, offsets). The key finds a plan; the plan runs one executable and wraps its results. All schema work,
shape inference and compilation happen once, in ``build.py``, when a key is new.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from isthmus._device import generator, writes
from isthmus._device.buffer import Buffer, Signature, buffer_of
from isthmus._device.build import Plan, build
from isthmus._device.hosts import array_from_cpu
from isthmus._device.plan import NUMBERS
from isthmus._device.sized import SizedKernel
from isthmus._graph.schema import functional_of, schema_of
from isthmus._ops import families  # noqa: F401  # importing it files every lowering
from isthmus._ops.registry import registry
from isthmus._runtime.hosts import device_number

_building = threading.RLock()
_default_dtype = torch.get_default_dtype
_matmul_precision = torch.get_float32_matmul_precision


def gather(values: Iterable[Any], dynamic: Iterable[bool], key: list[Any], inputs: list[Any]) -> None:
    """Add each argument to the key, and to the inputs what of it is known only at run time."""
    for value, is_dynamic in zip(values, dynamic, strict=False):
        if isinstance(value, Tensor):
            try:
                buffer = value.untyped_storage()._buffer  # type: ignore[attr-defined]
            except AttributeError:
                buffer = _foreign(value)
            offset = value.storage_offset()
            key += (buffer.signature, value.dtype, value.shape, value.stride(), offset != 0)
            inputs.append(buffer.value)
            if offset:
                inputs.append(device_number(offset))
        elif is_dynamic and type(value) in NUMBERS:
            key.append(type(value))
            inputs.append(device_number(value))
        elif type(value) is list:
            key.append(len(value))
            gather(value, itertools.repeat(is_dynamic), key, inputs)
        else:
            key.append(_static_key(value))


def _static_key(value: Any) -> Any:
    kind = type(value)
    if kind is float or kind is complex:
        return (kind, repr(value))  # 0.0 equals -0.0, nan equals nothing, 1.0 equals 1
    if kind is torch.Generator:
        return kind  # what it draws is an input
    return (bool, value) if kind is bool else value


def _foreign(tensor: Tensor) -> Buffer:
    """Return a buffer for a tensor of another device: only a 0-dim one on the CPU may join in."""
    if tensor.dim() or tensor.device.type != "cpu":
        return buffer_of(tensor)  # raises: this is not a "jax" tensor
    array = array_from_cpu(tensor)
    return Buffer(array, Signature.of(array))


class Kernel:
    """All calls of one overload: its plans by key."""

    def __init__(self, op: OpOverload) -> None:
        self.op, self.schema = op, schema_of(op)
        self.functional = functional_of(op) or op
        self.refresh()

    def refresh(self) -> None:
        """Look the lowering up anew and forget the plans of the old one."""
        self.lowering = lowering = registry.get(self.functional)
        self.plans: dict[tuple[Any, ...], Plan] = {}
        tensors = {a.name for a in self.schema.arguments if a.kind in ("tensor", "tensors")}
        # A decomposition and the CPU need numbers as they are, so without a lowering they are static.
        dynamic = tensors if lowering is None else lowering.dynamic
        self.dynamic = {a.name: a.name in dynamic for a in self.schema.arguments}
        self.positional = tuple(self.dynamic.values())
        self.random = lowering is not None and lowering.random
        self.matmul = lowering is not None and lowering.matmul
        self.plain = not (self.schema.mutated or self.random or self.matmul)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call."""
        key: list[Any] = [_default_dtype()]
        inputs: list[Any] = []
        gather(args, self.positional, key, inputs)
        if kwargs or not self.plain:
            self._gather_rest(args, kwargs, key, inputs)
        plan = self.plans.get(tuple(key))
        if plan is None:
            plan = self._new_plan(key, inputs, args, kwargs)
        return plan(inputs, args, kwargs)

    def _new_plan(self, key: list[Any], inputs: list[Any], args: Any, kwargs: dict[str, Any]) -> Plan:
        with _building:
            plan = self.plans.get(tuple(key))
            if plan is None:
                traced = any(isinstance(part, Signature) and part.traced for part in key)
                plan = self.plans[tuple(key)] = build(self, inputs, args, kwargs, traced)
        return plan

    def _gather_rest(self, args: Any, kwargs: dict[str, Any], key: list[Any], inputs: list[Any]) -> None:
        for name, value in kwargs.items():
            if name != "generator":
                key.append(name)
                gather((value,), (self.dynamic[name],), key, inputs)
        if self.matmul:
            key.append(_matmul_precision())
        if self.schema.mutated:
            pattern = _alias_pattern(args, kwargs)
            key.append(pattern)
            if pattern:
                writes.check_aliases(self.op, args, kwargs)
        if self.random:
            given = (*args, *kwargs.values())
            inputs.append(generator.draw(next((g for g in given if isinstance(g, torch.Generator)), None)))


def _alias_pattern(args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return, for each tensor of a call, the first one that shares its storage."""
    storages: list[int] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            storages.append(value.untyped_storage()._cdata)
        elif type(value) is list:
            storages += [item.untyped_storage()._cdata for item in value if isinstance(item, Tensor)]
    if len(set(storages)) == len(storages):
        return ()
    return tuple([storages.index(storage) for storage in storages])


_kernels: dict[OpOverload, Kernel | SizedKernel] = {}


def kernel_for(op: OpOverload) -> Callable[..., Any]:
    """Return the one kernel of ``op``: it runs the lowering, or a lower tier."""
    found = _kernels.get(op)
    if found is None:
        lowering = registry.get(functional_of(op) or op)
        sized = lowering is not None and lowering.size is not None
        found = _kernels.setdefault(op, SizedKernel(op) if sized else Kernel(op))
    return found


def refresh(op: OpOverload) -> None:
    """Tell the kernel of ``op``, if there is one, that the lowering has changed."""
    if op in _kernels:
        _kernels[op].refresh()
