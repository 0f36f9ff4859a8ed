"""The path from a torch call to an executable: start reading here.

A kernel turns a call into a key (layouts, dtypes, static arguments) and a list of run-time inputs (arrays,
numbers, offsets). The key finds a plan; the plan runs one executable and wraps its results. All schema work,
shape inference and compilation happen once, in ``build``, when a key is new.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import Tensor
from torch._ops import OpOverload

from isthmus import config
from isthmus._device import checks, decompose, fallback, generator, inference
from isthmus._device.buffer import Buffer, Signature, buffer_of, wrap_strided
from isthmus._device.inference import Spec
from isthmus._device.plan import (
    NUMBERS,
    Slot,
    Static,
    contiguous_specs,
    fill,
    slot_for,
    store,
    target_slots,
    target_tensors,
)
from isthmus._device.hosts import array_from_cpu
from isthmus._device.sized import SizedKernel
from isthmus._device.private import become, empty_tensor, restride
from isthmus._graph.schema import functional_of, schema_of
from isthmus._ops import families  # noqa: F401  # importing it files every lowering
from isthmus._ops.checks import collecting
from isthmus._ops.common import cast
from isthmus._ops.registry import Lowering, registry
from isthmus._runtime import compiler
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus._runtime.hosts import device_number
from isthmus.errors import IsthmusError

Run = Callable[[list[Any], tuple[Any, ...], dict[str, Any]], Any]
# A value only its buffer holds is counted there, in the list of inputs and as an argument of getrefcount.
_OWNED = 3
_building = threading.RLock()
_default_dtype = torch.get_default_dtype
_matmul_precision = torch.get_float32_matmul_precision


def gather(values: Sequence[Any], dynamic: Sequence[bool], key: list[Any], inputs: list[Any]) -> None:
    """Add each argument to the key and what of it is known only at run time to the inputs."""
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
            gather(value, itertools.repeat(is_dynamic), key, inputs)  # type: ignore[arg-type]
        else:
            key.append(_static_key(value))


def _static_key(value: Any) -> Any:
    if type(value) is float or type(value) is complex:
        # 0.0 equals -0.0 and nan equals nothing, and 1.0 equals 1.
        return (type(value), repr(value))
    return (bool, value) if type(value) is bool else value


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
        self.functional = (functional_of(op) if self.schema.mutated else op) or op
        self.lowering = registry.get(self.functional)
        self.plans: dict[tuple[Any, ...], Run] = {}
        dynamic = self.lowering.dynamic if self.lowering else _tensors_of(op)
        self.dynamic = {a.name: a.name in dynamic for a in self.schema.arguments}
        self.positional = tuple(self.dynamic.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call."""
        key: list[Any] = [_default_dtype()]
        inputs: list[Any] = []
        gather(args, self.positional, key, inputs)
        if kwargs or self.schema.mutated or self.lowering is None or self.lowering.random or self.lowering.matmul:
            self._gather_rest(args, kwargs, key, inputs)
        hashable = tuple(key)
        plan = self.plans.get(hashable)
        if plan is None:
            with _building:
                plan = self.plans.get(hashable) or build(self, inputs, args, kwargs, key)
                self.plans[hashable] = plan
        return plan(inputs, args, kwargs)

    def _gather_rest(self, args: Any, kwargs: dict[str, Any], key: list[Any], inputs: list[Any]) -> None:
        for name, value in kwargs.items():
            if name != "generator":
                key.append(name)
                gather((value,), (self.dynamic[name],), key, inputs)
        if self.lowering is not None and self.lowering.matmul:
            key.append(_matmul_precision())
        if self.schema.mutated:
            key.append(_alias_pattern(args, kwargs))
        if self.lowering is not None and self.lowering.random:
            inputs.append(generator.draw(self._generator(args, kwargs)))

    def _generator(self, args: Any, kwargs: dict[str, Any]) -> torch.Generator | None:
        found = kwargs.get("generator")
        return found or next((a for a in args if isinstance(a, torch.Generator)), None)


_kernels: dict[OpOverload, Callable[..., Any]] = {}


def kernel_for(op: OpOverload) -> Callable[..., Any]:
    """Return the kernel that runs ``op`` by its lowering or a lower tier."""
    found = _kernels.get(op)
    return found if found is not None else _kernels.setdefault(op, _kernel(op))


def _kernel(op: OpOverload) -> Callable[..., Any]:
    lowering = registry.get(functional_of(op) or op)
    return SizedKernel(op) if lowering is not None and lowering.size is not None else Kernel(op)


def forget(op: OpOverload) -> None:
    """Drop the kernel of ``op``: its lowering has changed."""
    _kernels.pop(op, None)


def _tensors_of(op: OpOverload) -> set[str]:
    return {a.name for a in schema_of(op).arguments if a.kind in ("tensor", "tensors")}


def _alias_pattern(args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return, for each tensor of a call, the first one that shares its storage."""
    storages = []
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, Tensor):
                storages.append(item.untyped_storage()._cdata)
    return tuple([storages.index(s) for s in storages])


def build(kernel: Kernel, inputs: list[Any], args: Any, kwargs: dict[str, Any], key: list[Any]) -> Run:
    """Return the plan for a new key: the lowering, else a decomposition, else the CPU."""
    arguments = kernel.schema.bind(args, kwargs)
    traced = any(isinstance(part, Signature) and part.traced for part in key)
    function, reason = kernel.lowering or decompose.function_for(kernel.functional), "nothing lowers it"
    found = None
    try:
        found = inference.infer(kernel.op, args, kwargs, share=bool(kernel.schema.mutated))
    except Exception as error:
        if traced:
            raise
        # The CPU says what is wrong in the words users know; if it finds nothing wrong, it answers.
        fallback.attempt(kernel.op, args, kwargs)
        function, reason = None, f"torch could not infer its result: {error}"
    if function is not None:
        try:
            return _Builder(kernel, function, inputs, args, kwargs, found, traced).plan()
        except checks.UserErrors:
            raise
        except Exception as error:
            if traced:
                raise
            reason = f"its lowering failed: {type(error).__name__}: {error}"
    if traced:
        raise IsthmusError(f"{kernel.op} cannot run inside a trace: {reason}")
    fallback.permit(kernel.op, arguments, reason)
    return lambda _, args, kwargs: fallback.run(kernel.op, args, kwargs, reason)


class _Builder:
    """Everything known about one new key, and the steps from there to a plan."""

    def __init__(
        self,
        kernel: Kernel,
        function: Callable[[dict[str, Any]], Any],
        inputs: list[Any],
        args: Any,
        kwargs: dict[str, Any],
        found: tuple[Any, Any, Any] | None,
        traced: bool,
    ) -> None:
        self.kernel, self.function, self.inputs, self.traced = kernel, function, inputs, traced
        self.random = isinstance(function, Lowering) and function.random
        schema = kernel.schema
        arguments = schema.bind(args, kwargs)
        self.slots = self._slots(args, kwargs)
        self.targets = target_slots(self.slots, schema.mutated)
        tensors = target_tensors(arguments, schema.mutated)
        self.groups = [_first_alias(tensors, t) for t in tensors]
        self.result = found[0] if found is not None else None
        self.known = found is not None
        self.resized = self._resized(found, tensors)
        self.errors: list[Any] = []
        self.fresh: list[Spec | None] = self._fresh_specs()

    def _slots(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Slot]:
        schema, index = self.kernel.schema, itertools.count()
        slots: dict[str, Slot] = {a.name: Static(a.default) for a in schema.arguments if a.has_default}
        dynamic = self.kernel.dynamic
        for argument, value in zip(schema.arguments, args, strict=False):
            slots[argument.name] = slot_for(value, dynamic[argument.name], index)
        for name, value in kwargs.items():
            slots[name] = Static(None) if name == "generator" else slot_for(value, dynamic[name], index)
        return slots

    def _resized(self, found: Any, tensors: list[Tensor]) -> list[Spec | None]:
        if found is None:
            return [None] * len(tensors)
        after = target_tensors(self.kernel.schema.bind(tuple(found[1]), found[2]), self.kernel.schema.mutated)
        return [None if a.shape == t.shape else Spec.of(a) for a, t in zip(after, tensors, strict=True)]

    def _fresh_specs(self) -> list[Spec | None]:
        if self.kernel.schema.mutated:
            returns = self.kernel.op._schema.returns
            fresh = sum(r.alias_info is None for r in returns)
            return inference.specs(self.result)[:fresh] if fresh else []
        if self.known:
            return inference.specs(self.result)
        with compiler.scoped_x64():
            return list(contiguous_specs(lambda *inputs: _leaves(self._results(inputs)[0]), self.inputs))

    def _results(self, inputs: Sequence[Any]) -> tuple[Any, Any]:
        names = self.kernel.schema.arguments
        outs = {a.name for a in names if a.out}
        arguments = {n: fill(s, list(inputs)) for n, s in self.slots.items() if n not in outs}
        if self.random:
            arguments["rng"] = _random_key(inputs[-1])
        with collecting() as found:
            result = self.function(arguments)
        return result, found

    def program(self, *inputs: Any) -> tuple[Any, ...]:
        """Compute the call: new storages, rewritten storages, then the conditions it requires."""
        result, found = self._results(inputs)
        results = _flatten(result)
        fresh = [store(r, s, self.kernel.op) for r, s in zip(results, self.fresh, strict=False) if s is not None]
        if len(results) < len(self.fresh) + len(self.targets):
            raise IsthmusError(f"the lowering of {self.kernel.op} returned {len(results)} results")
        written: dict[int, Any] = {}
        for n, (slot, new) in enumerate(zip(self.targets, results[len(self.fresh) :], strict=True)):
            group, spec = self.groups[n], self.resized[n]
            if spec is not None:
                dtype = to_jax_dtype(spec.dtype)
                written[group] = store(cast(new, dtype), spec, self.kernel.op)
            else:
                written[group] = slot.write(written.get(group, inputs[slot.index]), list(inputs), new)
        self.errors = found.errors
        return (*fresh, *written.values(), *found.flags)

    def plan(self) -> Run:
        """Compile the program and return how a call runs it."""
        if self.traced:
            call = _inline(self.program)
            with compiler.scoped_x64():
                jax.eval_shape(self.program, *self.inputs)
        else:
            call = compiler.compile(self.program, self.inputs)
        if not self.kernel.schema.mutated:
            return self._functional(call)
        return self._mutating(call)

    def _functional(self, call: Callable[..., Any]) -> Run:
        specs = [spec for spec in self.fresh if spec is not None]
        verify = checks.verifier(self.errors)
        simple = _simple(specs) and isinstance(self.result, Tensor) and verify is None
        if simple and not self.traced:
            return _single(call, specs[0])
        assemble = inference.rebuild(self.result if self.known else [None] * len(specs), [])
        if not self.known:
            returns = len(self.kernel.op._schema.returns)
            assemble = (lambda found: found[0]) if returns == 1 and len(specs) == 1 else tuple
        present = [spec is not None for spec in self.fresh]

        def run(inputs: list[Any], args: Any, kwargs: Any) -> Any:
            outputs = call(*inputs)
            if verify is not None:
                verify(outputs[len(specs) :])
            tensors = iter([wrap_strided(o, s.size, s.stride, s.dtype) for o, s in zip(outputs, specs, strict=False)])
            return assemble([next(tensors) if p else None for p in present])

        return run

    def _mutating(self, call: Callable[..., Any]) -> Run:
        specs = [spec for spec in self.fresh if spec is not None]
        verify = checks.verifier(self.errors)
        order = list(dict.fromkeys(self.groups))
        locate = _locator(self.kernel)
        returns = self.kernel.op._schema.returns
        donated = [self.targets[g].index for g in order]
        resized = self.resized
        may_donate = not (self.traced or verify or any(resized)) and config.donate == "auto"
        donating: list[Callable[..., Any]] = []
        program, examples = self.program, [compiler.abstract(i) for i in self.inputs]

        def run(inputs: list[Any], args: Any, kwargs: Any) -> Any:
            targets = locate(args, kwargs)
            chosen = call
            if may_donate and all([sys.getrefcount(inputs[i]) == _OWNED for i in donated]):
                if not donating:
                    donating.append(compiler.compile(program, examples, tuple(donated)))
                chosen = donating[0]
            outputs = chosen(*inputs)
            if verify is not None:
                verify(outputs[len(specs) + len(order) :])
            for group, value in zip(order, outputs[len(specs) :], strict=False):
                buffer = buffer_of(targets[group])
                if resized[group] is None and not buffer.signature.traced:
                    buffer.value = value
                else:
                    buffer.rebind(value)
            for target, spec in zip(targets, resized, strict=True):
                if spec is not None:
                    become(target, restride(target, spec.size, spec.stride))
            if specs:
                return tuple(
                    wrap_strided(o, s.size, s.stride, s.dtype) for o, s in zip(outputs, specs, strict=False)
                )
            return None if not returns else targets[0] if len(returns) == 1 else tuple(targets)

        return run


def _single(call: Callable[..., Any], spec: Spec) -> Run:
    """Return the plan of an op with one contiguous result: the shortest path there is."""
    size, dtype = spec.size, spec.dtype
    signature = Signature.intern(size, to_jax_dtype(dtype))

    def run(inputs: list[Any], args: Any, kwargs: Any) -> Tensor:
        (value,) = call(*inputs)
        tensor = empty_tensor(size, dtype)
        tensor.untyped_storage()._buffer = Buffer(value, signature)  # type: ignore[attr-defined]
        return tensor

    return run


def _simple(specs: list[Spec]) -> bool:
    return len(specs) == 1 and specs[0].stride == tuple(torch.empty(specs[0].size, device="meta").stride())


def _locator(kernel: Kernel) -> Callable[[Any, Any], list[Tensor]]:
    """Return a function that finds the tensors a call writes to."""
    names = kernel.schema.mutated
    positions = {a.name: i for i, a in enumerate(kernel.schema.arguments)}
    if len(names) == 1 and positions[names[0]] == 0 and kernel.schema.arguments[0].kind == "tensor":
        return lambda args, kwargs: [args[0]]
    return lambda args, kwargs: target_tensors(kernel.schema.bind(args, kwargs), names)


def _inline(program: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:
        with compiler.scoped_x64():
            return program(*inputs)

    return call


def _first_alias(tensors: list[Tensor], tensor: Tensor) -> int:
    storages = [t.untyped_storage()._cdata for t in tensors]
    return storages.index(tensor.untyped_storage()._cdata)


def _flatten(result: Any) -> list[Any]:
    if isinstance(result, (list, tuple)):
        return [leaf for item in result for leaf in _flatten(item)]
    return [result]


def _leaves(result: Any) -> list[Any]:
    return [leaf for leaf in _flatten(result) if leaf is not None]


def _random_key(words: Any) -> Any:
    """Return the JAX key of a (seed, offset), given as four 32-bit words."""
    key = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, words[2]), words[3])

