"""The path from a torch call to an executable: start reading here.

A kernel's entry (``entry.py``) turns a call into a key (layouts, dtypes, static arguments) and a list of
run-time inputs (arrays, numbers, offsets). The key finds a plan; the plan runs one executable and wraps its
results. All schema work, shape inference and compilation happen once, in ``build.py``, when a key is new.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from isthmus._device.build import Plan, build
from isthmus._device.entry import make_entry
from isthmus._device.sized import SizedKernel
from isthmus._graph.schema import functional_of, schema_of
from isthmus._ops import families  # noqa: F401  # importing it files every lowering
from isthmus._ops.registry import lowering_of
from isthmus._runtime import maps, private

_building = threading.RLock()
# How many plans may be young, and after how many new ones the process's memory maps are counted.
_LIMIT, _ROUND = 2048, 64


class Kernel:
    """All calls of one overload: its plans by key, and the entry that finds them."""

    def __init__(self, op: OpOverload) -> None:
        self.op, self.schema = op, schema_of(op)
        self.functional = functional_of(op) or op
        self.lowering = lowering = lowering_of(self.functional)
        self.plans: dict[tuple[Any, ...], Plan] = {}
        self.old: dict[tuple[Any, ...], Plan] = {}
        self.recipes: dict[tuple[Any, ...], Plan] = {}
        tensors = {a.name for a in self.schema.arguments if a.kind in ("tensor", "tensors")}
        # A decomposition and the CPU need numbers as they are, so without a lowering they are static.
        dynamic = set() if lowering is None else lowering.dynamic | tensors
        self.dynamic = {a.name: a.name in dynamic for a in self.schema.arguments}
        self.random = lowering is not None and lowering.random
        self.matmul = lowering is not None and lowering.matmul
        self.entry = make_entry(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call."""
        return self.entry(*args, **kwargs)

    def new_plan(self, key: tuple[Any, ...], inputs: list[Any], values: tuple[Any, ...]) -> Plan:
        """Return the plan for a key seen for the first time."""
        with _building:
            plan = self.plans.get(key)
            if plan is None:
                plan = self.old.pop(key, None) or build(self, inputs, values, private.is_traced(inputs))
                _make_room()
                self.plans[key] = plan
        return plan


_kernels: dict[OpOverload, Kernel | SizedKernel] = {}
_young = 0


def _make_room() -> None:
    """Count one more young plan. Of too many, or too many memory maps, all become old: others that were go.

    An old one that is used is young again.
    """
    global _young
    _young += 1
    if _young <= _LIMIT and not (_young % _ROUND == 0 and maps.crowded()):
        return
    for kernel in list(_kernels.values()):
        if isinstance(kernel, Kernel):
            kernel.old = dict(kernel.plans)
            kernel.plans.clear()
    _young = 1


def kernel_for(op: OpOverload) -> Callable[..., Any]:
    """Return the function that runs ``op`` by its lowering or a lower tier."""
    found = _kernels.get(op)
    if found is None:
        lowering = lowering_of(functional_of(op) or op)
        sized = lowering is not None and lowering.size is not None
        found = _kernels.setdefault(op, SizedKernel(op) if sized else Kernel(op))
    return found.entry


def forget(op: OpOverload) -> None:
    """Drop the kernel of ``op``: its lowering has changed."""
    _kernels.pop(op, None)
