"""Ops whose result's size depends on values (``nonzero``, ``masked_select``, ``unique``): two programs and a read.

The first program counts (``size`` of the lowering), the host reads the size, and the second is compiled for it. Both
are cached, so a size that comes back compiles nothing. In lazy mode the read runs the recorded graph; in a JAX trace
there is no value to read, and the op is refused.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from isthmus._caches import LruCache
from isthmus._device.checks import ask_cpu, overlap_checks
from isthmus._device.core import mode
from isthmus._device.core.buffer import wrap, wrap_strided
from isthmus._device.core.inference import Warnings
from isthmus._device.core.plan_cache import Generations
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import functional_of, schema_of
from isthmus._ops.registry import registry
from isthmus._runtime import compiler, placement
from isthmus._runtime.dtypes import to_jax_dtype, to_torch_dtype
from isthmus._runtime.user_frames import warn_user
from isthmus.errors import IsthmusError


class SizedKernel:
    """All calls of one overload whose lowering has a ``size``."""

    def __init__(self, op: OpOverload) -> None:
        self.op, self.schema = op, schema_of(op)
        self.lowering = registry[functional_of(op) or op]
        self.generations = Generations()
        # The warnings of the CPU for calls that it accepts.
        self.accepted: LruCache[Any, Warnings] = LruCache("sized calls that the CPU accepts", 4096)
        # torch lays the indices of each dim out one after another.
        self.by_columns = self.lowering.op is torch.ops.aten.nonzero.default

    def entry(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call."""
        arguments = self.schema.bind(args, kwargs)
        values = self.schema.ordered(args, kwargs)
        with mode.reason("a size that depends on values"):
            try:
                return self._run(arguments, values)
            except (IsthmusError, torch.OutOfMemoryError):
                raise
            except Exception:
                ask_cpu.raise_cpu_error(
                    self.op, values
                )  # what the CPU refuses as well is refused in its words
                raise

    def _run(self, arguments: dict[str, Any], values: tuple[Any, ...]) -> Any:
        from isthmus._device.core.transfers import array_of

        if self.schema.mutated:
            overlap_checks.check_each(self.op, values)
        # Targets take part in the key: their shapes decide what is refused.
        targets = [arguments.pop(name) for name in self.schema.mutated]
        names = [n for n, v in arguments.items() if isinstance(v, torch.Tensor)]
        arrays = [array_of(arguments.pop(name)) for name in names]
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            raise IsthmusError(
                f"{self.op} has a result whose size depends on values, which a trace does not have"
            )
        arguments = {n: to_jax_dtype(v) if isinstance(v, torch.dtype) else v for n, v in arguments.items()}
        # ``repr`` of the arguments: they are numbers, dtypes and flags.
        key = (*[(t.dtype, t.shape) for t in targets], *[(a.shape, a.dtype) for a in arrays], repr(arguments))
        warned = self.accepted.get(key)
        if warned is None:
            warned = self.accepted[key] = ask_cpu.check(self.op, values)
        for category, text in warned:
            warn_user(category, text)
        counted = self._program("size", names, arrays, arguments)(*arrays)
        # One read of the device, for one size or several.
        size = tuple(np.asarray(counted).reshape(-1).tolist())
        results = self._program(size, names, arrays, arguments)(*arrays)
        tensors = [self._wrapped(array) for array in results]
        if targets:
            return self._write(targets, tensors)
        return tensors[0] if len(schema_of(self.op).returns) == 1 else tuple(tensors)

    def _wrapped(self, array: Any) -> torch.Tensor:
        if not self.by_columns:
            return wrap(array)
        dims, count = array.shape
        # torch has the indices of each dim one after another in memory.
        return wrap_strided(array, (count, dims), (1, max(count, 1)), to_torch_dtype(array.dtype))

    def _program(self, size: Any, names: list[str], arrays: list[Any], arguments: dict[str, Any]) -> Any:
        key = (size, *[(a.shape, a.dtype, placement.sharding_of(a)) for a in arrays], repr(arguments))
        program = self.generations.young.get(key)
        if program is not None:
            return program
        return self.generations.find(
            key, lambda: compiler.compile(self._function(size, names, arguments), arrays)
        )

    def _function(self, size: Any, names: list[str], arguments: dict[str, Any]) -> Any:
        lowering, find = self.lowering, self.lowering.size
        assert find is not None

        def count(*arrays: Any) -> Any:
            filled = {**arguments, **dict(zip(names, arrays, strict=True))}
            return find(**{n: v for n, v in filled.items() if n in lowering.parameters})

        def compute(*arrays: Any) -> Any:
            filled = {**arguments, **dict(zip(names, arrays, strict=True))}
            result = lowering({**filled, "size": size[0] if len(size) == 1 else size})
            # Transposed, so that the columns are rows of the array.
            if self.by_columns:
                return (result.T,)
            return tuple(result) if isinstance(result, (list, tuple)) else (result,)

        return count if size == "size" else compute

    def _write(self, targets: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        for target, tensor in zip(targets, tensors, strict=True):
            if target.shape != tensor.shape:
                target.resize_(tensor.shape)
            target.copy_(tensor)
        return targets[0] if len(targets) == 1 else tuple(targets)
