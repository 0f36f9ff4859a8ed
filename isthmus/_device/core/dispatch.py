"""The path from a torch call to an executable: start reading here.

torch's dispatcher calls one ``Kernel`` per ATen overload (``kernels/register.py`` registers them). A kernel's entry
(``entry.py``) turns the call into a *key*, all that the program depends on, and *inputs*, all that it does not::

    torch.add(x, 2.5)          # x: float32[8, 8], contiguous
    key    = (float32, (signature of x's buffer, float32, (8, 8), (8, 1), False), float, ABSENT)
             # torch's default dtype; x's layout and whether it has an offset; the type of the number; alpha
    inputs = [x's array, 2.5 as an array]

The key finds a *plan*, a closure that runs one executable on the inputs and wraps the results, in a plain dict: that
is the whole path of a call seen before. For a new key ``plan.py`` asks torch for shapes (``inference.py``), the CPU
for refusals (``checks/ask_cpu.py``), and compiles.

What can go wrong: an input is a marker because its array is elsewhere (``donation.py``), and the entry runs again; XLA
fails to compile for a passing reason, and ``_until_next_try`` compiles again later; a fork lost JAX's threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from isthmus import config
from isthmus._device.core import donation, mode, small_ops
from isthmus._device.core.entry import make_entry
from isthmus._device.core.plan import Finish, PassingFailure, Plan, build
from isthmus._device.core.plan_cache import Generations
from isthmus._device.kernels.sized import SizedKernel
from isthmus._graph.names import Missing
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import functional_of, schema_of
from isthmus._ops import families  # noqa: F401  # importing it files every lowering
from isthmus._ops.registry import lowering_of
from isthmus._runtime import forks, private, watching

# Compiling is one at a time: two threads with one new key would compile it twice. Reentrant, since a
# decomposition that is traced for a plan calls ops that need plans.
_building = threading.RLock()


class Kernel:
    """All calls of one overload: its plans by key, and the entry that finds them."""

    def __init__(self, op: OpOverload) -> None:
        self.op, self.schema = op, schema_of(op)
        self.functional = functional_of(op) or op
        self.lowering = lowering = lowering_of(self.functional)
        self.generations = Generations()
        self.plans: dict[tuple[Any, ...], Plan] = self.generations.young
        self.recipes: dict[tuple[Any, ...], Plan] = {}
        # How often each key failed to compile for a reason that may pass.
        self.failures: dict[tuple[Any, ...], int] = {}
        # Keys that were called so often on the host that they are worth a program (``small_ops.py``).
        self.frequent: set[tuple[Any, ...]] = set()
        # ``plans`` is the dict itself, not looked up through ``generations``: entries bind it by name.
        tensors = {a.name for a in self.schema.arguments if a.kind in ("tensor", "tensors")}
        # A decomposition and the CPU need numbers as they are, so without a lowering they are static.
        dynamic = set() if lowering is None else lowering.dynamic | tensors
        self.dynamic = {a.name: a.name in dynamic for a in self.schema.arguments}
        self.random = lowering is not None and lowering.random
        self.matmul = lowering is not None and lowering.matmul
        self.entry = make_entry(self)
        # A profiler may have been started before this op was first called.
        if watching.watchers:
            self.watch(True)

    def watch(self, watched: bool) -> None:
        """Let profilers see every run of a plan, or no longer: the entry looks plans up under these two names."""
        # The entry is generated code: what it calls by name is what its globals hold.
        scope = self.entry.__globals__
        scope["_plans"] = _WatchedPlans(self) if watched else self.plans
        scope["_new_plan"] = scope["_plans"].new_plan if watched else self.new_plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call."""
        return self.entry(*args, **kwargs)

    def new_plan(self, key: tuple[Any, ...], inputs: list[Any], values: tuple[Any, ...]) -> Plan:
        """Return the plan for a key seen for the first time."""
        forks.check()
        finish: Finish | None = None
        if config.current.shapes != "exact":
            small = small_ops.plan_for(self, key, inputs, values)
            if small is not None:
                # Kept like any plan, and dropped by itself once the key has been called often.
                return self.generations.find(key, lambda: small)
            inputs, finish = mode.current.finisher(self, inputs, values)
        if donation.is_unready(inputs):
            # ``build`` reads shapes off the inputs, so each must be an array.
            raise RuntimeError("another thread is rewriting an input")  # the entry waits and tries again
        with _building:
            # Another thread may have built it while this one waited for the lock.
            plan = self.plans.get(key)
            if plan is not None:
                return plan
            try:
                return self.generations.find(
                    key, lambda: build(self, inputs, values, private.is_traced(inputs), finish)
                )
            except PassingFailure as failure:
                return self._until_next_try(key, failure.plan)

    def _until_next_try(self, key: tuple[Any, ...], plan: Plan) -> Plan:
        """Return the plan of calls that could not be compiled; after the next 0, 1, 3, 7, ... of them it is dropped.

        So a failure that passes costs one call on the CPU, and one that stays costs few compilations.
        """
        left = 2 ** self.failures.get(key, 0) - 1
        self.failures[key] = self.failures.get(key, 0) + 1

        def run(inputs: list[Any], values: tuple[Any, ...]) -> Any:
            nonlocal left
            left -= 1
            if left <= 0:
                self.plans.pop(key, None)
            return plan(inputs, values)

        if left:
            self.plans[key] = run
        return plan


class _WatchedPlans:
    """Plans of a kernel that pass each run by the watchers; stands where an entry has the dict of plans."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.name = kernel, str(kernel.op)

    def get(self, key: tuple[Any, ...]) -> Plan | None:
        """Return the plan for a key, watched; None where there is none yet."""
        plan = self.kernel.plans.get(key)
        return None if plan is None else self._watched(plan)

    def new_plan(self, key: tuple[Any, ...], inputs: list[Any], values: tuple[Any, ...]) -> Plan:
        """Return the plan for a key seen for the first time, watched."""
        return self._watched(self.kernel.new_plan(key, inputs, values))

    def _watched(self, plan: Plan) -> Plan:
        return lambda inputs, values: watching.run("eager", self.name, lambda: plan(inputs, values))


_kernels: dict[OpOverload, Kernel | SizedKernel] = {}


def kernels() -> list[Kernel]:
    """Return the kernels that have run, without those of sized ops, which keep no plans."""
    return [kernel for kernel in list(_kernels.values()) if isinstance(kernel, Kernel)]


def _watch(watched: bool) -> None:
    for kernel in kernels():
        kernel.watch(watched)


# At import, once: ``watching`` tells every kernel when a profiler starts or stops.
watching.on_change.append(_watch)


def kernel_for(op: OpOverload | Missing) -> Callable[..., Any]:
    """Return the function that runs ``op`` by its lowering or a lower tier; of a missing op, one that says so."""
    if isinstance(op, Missing):
        return _missing(op)
    kernel = _kernels.get(op)
    if kernel is None:
        lowering = lowering_of(functional_of(op) or op)
        sized = lowering is not None and lowering.size is not None
        # setdefault: two threads may get here at once, and both must use one kernel's plans.
        kernel = _kernels.setdefault(op, SizedKernel(op) if sized else Kernel(op))
    return kernel.entry


def _missing(op: Missing) -> Callable[..., Any]:
    def entry(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{op.name} is not in this torch ({torch.__version__})")

    return entry


def forget(op: OpOverload) -> None:
    """Drop the kernel of ``op``: its lowering has changed."""
    _kernels.pop(op, None)
