"""A new key: from the lowering, else a decomposition, else the CPU, to a plan that runs every call with that key.

``dispatch.Kernel.new_plan`` calls ``build`` when a key is not in its dict; ``_lazy/node_builder.py`` calls it with a
``finish`` of its own, which makes a recipe for recording instead of compiling. The steps:

1. torch infers the result on Meta (``inference.py``); the CPU is asked whether it refuses (``checks/ask_cpu.py``).
2. The first *tier* that exists is taken: the lowering, torch's decomposition (``decompose.py``), the CPU.
3. ``Builder`` turns the tier into one traced function, ``program``: read each argument through its slot, compute, store
   each result in the layout that torch announced, or write it into the storage of a target (``mutation.py``).
4. It is compiled, and the plan is a closure that runs it and wraps its outputs. For ``aten.add.Tensor`` that closure is
   ``_single``: call the executable, make a tensor, hang a buffer on it.

A plan keeps no array and no tensor, only layouts: it lives as long as the key is in use.

What can go wrong: a lowering whose result differs from torch's answer is refused (``LoweringError``), and so is one
that raises while it is traced; such calls run on the CPU, which is counted and warned about (``fallback.py``). Inside
a JAX trace there is no CPU to fall to, and the error is raised.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from isthmus._device.checks import ask_cpu, overlap_checks, value_checks
from isthmus._device.core import decompose, derivatives, fallback, generator, inference
from isthmus._device.core.buffer import Buffer, Signature, buffer_of, check_reach, maker
from isthmus._device.core.mutation import Mutation
from isthmus._device.core.slots import Slot, Static, TensorSlot, contiguous_specs, fill, slot_for, store
from isthmus._device.torch_glue.private import empty_tensor
from isthmus._device.torch_glue.torch_jax import check_device
from isthmus._graph.arguments import flatten
from isthmus._graph.layout import Spec, is_as_made, storage_shape
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import ABSENT, schema_of
from isthmus._ops.value_checks import Checks, Error, collecting
from isthmus._runtime import compiler, memory, placement
from isthmus._runtime.dtypes import to_jax_dtype
from isthmus._runtime.traced_results import compile_with_extra
from isthmus.errors import IsthmusError, LoweringError

if TYPE_CHECKING:
    from isthmus._device.core.dispatch import Kernel

Plan = Callable[[list[Any], tuple[Any, ...]], Any]
Values = tuple[Any, ...]
Tier = Callable[[dict[str, Any]], Any]
Finish = Callable[["Builder"], Plan]
Shardings = Sequence[placement.Sharding] | None


def build(
    kernel: Kernel, inputs: list[Any], values: Values, traced: bool, finish: Finish | None = None
) -> Plan:
    """Return the plan for calls like this one; ``values`` are all arguments in the schema's order.

    ``finish`` makes the plan once a tier is found; by default it compiles a program.
    """
    finish = finish or (lambda builder: builder.plan(inputs))
    tensors = ask_cpu.tensors_of(values)
    # A view that reaches past a storage that was made shorter: XLA would clamp what it reads.
    for tensor in tensors:
        check_reach(tensor)
    plan = _plan_for(kernel, inputs, values, traced, finish)
    # Where a view begins is no part of the key, so on a storage that was made shorter every call is checked.
    return _checking_reach(plan) if any([buffer_of(tensor).signature.shrunk for tensor in tensors]) else plan


def _checking_reach(plan: Plan) -> Plan:
    def run(inputs: list[Any], values: Values) -> Any:
        for tensor in ask_cpu.tensors_of(values):
            check_reach(tensor)
        return plan(inputs, values)

    return run


def _plan_for(kernel: Kernel, inputs: list[Any], values: Values, traced: bool, finish: Finish) -> Plan:
    if not kernel.schema.mutated:
        return _choose(kernel, inputs, values, traced, finish)
    # Before anything is compiled: torch refuses some writes whatever the values are.
    overlap_checks.check_new(kernel.op, values)
    if overlap_checks.repeats_in_lists(kernel.op, values):
        return lambda _, values: _one_by_one(kernel, values)
    plan = overlap_checks.guarded(kernel.op, values, _choose(kernel, inputs, values, traced, finish))
    return _counting_writes(plan) if schema_of(kernel.op).name.startswith("aten::_foreach_") else plan


def _counting_writes(plan: Plan) -> Plan:
    """Return the plan of a call that writes to a list: torch counts such writes in the CPU's kernels, not before ours.

    Without it backward would not see that a tensor it saved has changed.
    """

    def run(inputs: list[Any], values: Values) -> Any:
        result = plan(inputs, values)
        increment_version([tensor for tensor in values[0] if not tensor.is_inference()])
        return result

    return run


def _one_by_one(kernel: Kernel, values: Values) -> Any:
    """Run a call on lists item by item: a tensor that is in a list twice is written twice, one after the other."""
    length = len(next(value for value in values if isinstance(value, list)))
    for n in range(length):
        items = tuple([value[n]] if isinstance(value, list) else value for value in values)
        args, kwargs = kernel.schema.split(items)
        kernel.op(*args, **kwargs)


def _choose(kernel: Kernel, inputs: list[Any], values: Values, traced: bool, finish: Finish) -> Plan:
    """Return the plan of the first tier that can answer."""
    # A device among the arguments may be another one than the tensors': ``empty_like(x, device="cpu")``.
    device = kernel.schema.named(values).get("device")
    check_device(device)
    if device is not None and device.type != "jax":
        return _elsewhere(kernel, device)
    tier: Tier | None = kernel.lowering or decompose.function_for(kernel.functional)
    reason, passing = "nothing lowers it", False
    if kernel.schema.mutated and not traced and overlap_checks.repeats(kernel.op, values):
        tier, reason = None, "it writes to memory that its target shows twice"
    meta: inference.Warnings = []
    try:
        share = bool(kernel.schema.mutated)
        # Warnings of Meta kernels are collected, and given with each call or left to the CPU's.
        inferred, meta = inference.recorded(lambda: inference.infer(kernel.op, values, share=share))
    except Exception as error:
        if traced:
            raise
        # The CPU says what is wrong in the words users know; if it finds nothing wrong, it answers.
        ask_cpu.raise_cpu_error(kernel.op, values)
        tier, inferred, reason = None, None, f"torch could not infer its result: {error}"
    if tier is not None:
        result = inferred[0] if inferred is not None else ()
        # Asked even where Meta inferred a result: Meta kernels accept many calls that the CPU refuses.
        warned = ask_cpu.check(kernel.op, values, not traced, meta, result)
        try:
            builder = Builder(kernel, tier, inputs, values, inferred, traced)
            mutation = builder.mutation
            prepares = mutation is not None and mutation.needs_preparation
            plan = mutation.preparing(kernel) if mutation is not None and prepares else finish(builder)
            # torch warns at every call, not at the first one alone, so a plan repeats what was heard.
            return ask_cpu.warning(plan, warned)
        except torch.OutOfMemoryError:
            raise  # the CPU might try, and take the machine's memory
        except Exception as error:
            if traced:
                # The user's own JAX trace: there is no CPU in it, and the error belongs where it occurs.
                raise
            reason = f"its lowering failed: {type(error).__name__}: {error}"
            ask_cpu.raise_cpu_error(kernel.op, values)  # what the CPU refuses as well is refused in its words
            passing = compiler.may_pass(error)
    if traced:
        raise IsthmusError(f"{kernel.op} cannot run inside a trace: {reason}")
    fallback.permit(kernel.op, kernel.schema.named(values), reason)

    def on_cpu(_: list[Any], values: Values) -> Any:
        return fallback.run(kernel.op, values, reason)

    # Not kept: the next call compiles again (``dispatch._until_next_try``).
    if passing:
        raise PassingFailure(on_cpu)
    return on_cpu


class PassingFailure(Exception):
    """XLA failed in a way that may pass: ``plan`` runs this call on the CPU, and the next one is compiled anew."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("XLA failed in a way that may pass")
        self.plan = plan


def _elsewhere(kernel: Kernel, device: torch.device) -> Plan:
    """Return the plan of a call such as ``ones_like(x, device="cpu")``: it runs there, on copies of the arguments."""

    def run(_: list[Any], values: Values) -> Any:
        moved = tuple(value.to(device) if isinstance(value, Tensor) else value for value in values)
        args, kwargs = kernel.schema.split(moved)
        return kernel.op(*args, **kwargs)

    return run


@dataclass(frozen=True)
class Facts:
    """What tracing a program finds out beside its arrays."""

    computed: list[jax.ShapeDtypeStruct | None]
    """Shape and dtype of each result of the tier, before it is stored in the layout that torch announced."""
    errors: list[Error]
    """What to raise for each code of the program; without conditions it returns none."""


class Builder:
    """Everything known about one new key, without any array: the plan refers to it for as long as it lives."""

    def __init__(
        self, kernel: Kernel, tier: Tier, inputs: list[Any], values: Values, inferred: Any, traced: bool
    ) -> None:
        self.kernel, self.traced = kernel, traced
        # Inside a JAX trace the user may differentiate, so ops get torch's derivatives.
        self.tier = derivatives.differentiable(kernel.functional, tier) if traced else tier
        self.op, self.schema = kernel.op, kernel.schema
        self.random = kernel.random
        self.slots = _slots(kernel, values)
        # Shapes and dtypes only: a plan that kept arrays would keep memory for as long as it lives.
        self.examples = [compiler.abstract(value) for value in inputs]
        self.result = None if inferred is None else inferred[0]
        self.inferred = inferred is not None
        self.mutation = Mutation(kernel.op, self.slots, values, inferred) if self.schema.mutated else None
        if self.mutation is not None and not self.inferred and self.schema.has_out:
            # Only for ``out=``: an in-place op never changes the size of its target.
            self.mutation.resize(self._computed_specs())
        elif self.mutation is not None and any(self.mutation.resized):
            self.mutation.lay_out(self._resized_specs(values))
        self.fresh = self._fresh_specs()
        # Before anything is compiled: a result that fits no memory is torch's OutOfMemoryError, not XLA's.
        outputs = [*self.fresh, *(self.mutation.resized if self.mutation is not None else [])]
        memory.require_room([(spec.size, spec.dtype) for spec in outputs if spec is not None])

    def _resized_specs(self, values: Values) -> list[Spec | None]:
        """Return how torch lays out targets that are resized: as the CPU does, or as the op without ``out=`` does."""
        assert self.mutation is not None
        after = ask_cpu.resized_as(self.op, values)
        if after:
            return [Spec.of(target) for target in self.mutation.locate(after)]
        return inference.of_functional(self.op, self.kernel.functional, values)

    def _fresh_specs(self) -> list[Spec | None]:
        """Return the spec of each new tensor of the result."""
        count = sum(not result.is_alias for result in schema_of(self.op).returns)
        if self.mutation is not None and count == 0:
            return []
        if self.inferred:
            return self._unmasked(inference.specs(self.result))
        specs = self._computed_specs()
        return specs if self.mutation is None else specs[:count]

    def _unmasked(self, specs: list[Spec | None]) -> list[Spec | None]:
        """Return the specs with None for gradients outside ``output_mask``, which some Meta kernels give anyway."""
        mask = self.slots.get("output_mask")
        if not isinstance(mask, list) or len(mask) != len(specs):
            return specs
        needed = [isinstance(slot, Static) and slot.value for slot in mask]
        return [spec if need else None for spec, need in zip(specs, needed, strict=True)]

    def _computed_specs(self) -> list[Spec | None]:
        """Return the specs of what the tier computes, for an op torch cannot infer."""
        with compiler.scoped_x64(), collecting():
            return contiguous_specs(lambda *inputs: self.results(inputs)[0], self.examples)

    def results(self, inputs: Sequence[Any]) -> tuple[list[Any], Checks]:
        """Return the results of the tier, flat, and the conditions on values that it requires."""
        # An ``out=`` target is not read: the functional form does not have it among its arguments.
        outs = {a.name for a in self.schema.arguments if a.out}
        arguments = {name: fill(slot, inputs) for name, slot in self.slots.items() if name not in outs}
        if self.random:
            # The draw is the last input, as the entry appends it.
            arguments["rng"] = generator.random_key(inputs[-1])
        if self.traced:
            return flatten(self.tier(arguments)), Checks()  # the program around it requires the conditions
        with collecting() as checks:
            return flatten(self.tier(arguments)), checks

    def program(self, *inputs: Any) -> tuple[tuple[Any, ...], Facts]:
        """Compute the call: new storages, rewritten storages, then the code of its conditions; and the facts."""
        results, checks = self.results(inputs)
        count = len(self.fresh)
        if self.mutation is None and len(results) != count:
            raise LoweringError(
                f"the lowering of {self.op} gave {len(results)} results where torch gives {count}"
            )
        fresh = [store(r, s, self.op) for r, s in zip(results, self.fresh, strict=False) if s is not None]
        written = [] if self.mutation is None else self.mutation.write(results[count:], inputs, self.traced)
        # With a mesh XLA chooses how results are split, except where torch's user has said so by a tensor.
        if placement.home is not None and not self.traced:
            if is_made_like(self.op):
                fresh = [placement.constrain(f, self._followed()) for f in fresh]
            written = self.mutation.stay(written, self.examples) if self.mutation is not None else []
        facts = Facts([compiler.abstract(r) if hasattr(r, "shape") else None for r in results], checks.errors)
        # A plan without conditions returns no code: one result less per call.
        code = [checks.first_failed()] if checks.errors else []
        return (*fresh, *written, *code), facts

    def _followed(self) -> placement.Sharding:
        """Return how the result of ``full_like`` and its kind is split: as the tensor that it is made like."""
        first = next(slot for slot in self.slots.values() if isinstance(slot, TensorSlot))
        example, (spec,) = self.examples[first.index], self.fresh
        same = spec is not None and example.shape == storage_shape(spec.size, spec.stride)
        return example.sharding if same else None

    def inlined(self) -> Callable[..., Any]:
        """Return the program to be called on tracers; it has no conditions, since the program around it has them."""
        return compiler.inline(lambda *inputs: self.program(*inputs)[0])

    def plan(self, inputs: list[Any]) -> Plan:
        """Compile the program and return how a call runs it."""
        if self.mutation is not None:
            specs = [spec for spec in self.fresh if spec is not None]
            return self.mutation.plan(self, specs, inputs)
        if self.traced:
            return self._functional(self.inlined(), [])
        executable, facts = compile_with_extra(self.program, self.examples, name=str(self.op))
        return self._functional(executable.call, facts.errors, executable.shardings)

    def _functional(self, call: Callable[..., Any], errors: list[Error], shardings: Shardings = None) -> Plan:
        # None where torch returns no tensor (a gradient that ``output_mask`` leaves out).
        specs = [spec for spec in self.fresh if spec is not None]
        conditions = value_checks.Conditions(errors) if errors else None
        places = shardings or [None] * len(specs)
        makers = [maker(spec, self.traced, place) for spec, place in zip(specs, places, strict=False)]
        assemble = self.assembler()
        # The three shapes of a plan, the most frequent first: one tensor; several of them; anything else.
        if len(makers) == 1 and len(self.fresh) == 1 and assemble is only and conditions is None:
            return _single(call, makers[0], specs[0], self.traced, places[0])
        if len(makers) == len(self.fresh) and assemble in (tuple, list) and conditions is None:
            return lambda inputs, values: assemble(
                [make(o) for make, o in zip(makers, call(*inputs), strict=True)]
            )
        present = [spec is not None for spec in self.fresh]

        def run(inputs: list[Any], values: Values) -> Any:
            outputs = call(*inputs)
            if conditions is not None:
                # The code comes after all new tensors, and is read before one of them is handed out.
                conditions.settle_call(outputs[len(makers)])
            tensors = iter([make(o) for make, o in zip(makers, outputs, strict=False)])
            return assemble([next(tensors) if there else None for there in present])

        return run

    def assembler(self) -> Callable[[list[Any]], Any]:
        """Return the function that gives a list of results the structure torch returns."""
        result = self.result
        if not self.inferred:
            returns = schema_of(self.op).returns
            # The schema alone says what a result looks like where Meta could not.
            if returns[0].is_list:
                return list  # even of one tensor
            return only if len(returns) == 1 and len(self.fresh) == 1 else tuple
        if isinstance(result, list):
            return list
        if not isinstance(result, tuple):
            return only
        nested = any(isinstance(item, (list, tuple)) for item in result)
        # Only the structure is kept: lists of Nones in place of the tensors.
        shape = inference.skeleton(result)
        return (lambda tensors: inference.nest(shape, iter(tensors))) if nested else tuple


def is_made_like(op: OpOverload) -> bool:
    """Return whether an op makes a tensor like another and computes nothing of it: ``full_like``, ``new_ones``."""
    name = schema_of(op).name
    return name.endswith("_like") or name.startswith("aten::new_")


def only(tensors: list[Any]) -> Any:
    """Return the one result of an op that returns a tensor."""
    return tensors[0]


def _slots(kernel: Kernel, values: Values) -> dict[str, Slot]:
    index = itertools.count()
    slots: dict[str, Slot] = {}
    for argument, value in zip(kernel.schema.arguments, values, strict=True):
        # What it draws comes as words among the inputs.
        if argument.name == "generator":
            slots[argument.name] = Static(None)
        elif value is ABSENT:
            slots[argument.name] = Static(argument.default)
        else:
            slots[argument.name] = slot_for(value, kernel.dynamic[argument.name], index)
    return slots


def _single(
    call: Callable[..., Any], make: Callable[[Any], Tensor], spec: Spec, traced: bool, sharding: Any
) -> Plan:
    """Return the plan of an op with one result: the shortest path there is."""
    size, dtype = spec.size, spec.dtype
    # A layout of its own needs ``restride``; tracers need signatures of their own: ``make`` has both.
    if traced or not is_as_made(size, spec.stride):
        return lambda inputs, values: make(call(*inputs)[0])
    signature = Signature.intern(size, to_jax_dtype(dtype), sharding=sharding)

    def run(inputs: list[Any], values: Values) -> Tensor:
        # ``make`` written out, which saves 50 ns of an op that takes 5 µs or so; most ops come here.
        (value,) = call(*inputs)
        tensor = empty_tensor(size, dtype)
        tensor.untyped_storage()._buffer = Buffer(value, signature)  # type: ignore[attr-defined]
        return tensor

    return run
