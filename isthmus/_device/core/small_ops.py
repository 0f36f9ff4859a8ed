"""Small ops that every machine computes alike run on the host, until they are called often enough to be compiled.

A program takes XLA some 30 ms to compile and saves at most some 20 µs per call on arrays this small. Loops around a
model, such as ``generate()``, are full of ops that never pay that back: ids and masks that grow by one with each
token, so that each op has another size each time. With ``isthmus.config.shapes = "auto"`` ``dispatch.Kernel.new_plan``
asks ``plan_for`` before it builds a plan::

    mask = torch.cat([mask, mask.new_ones((1, 1))], -1)     # int64[1, 17]: computed by ATen on the host, no program

What qualifies, so that no bit of a result depends on how often an op was called:

- Arguments and results have at most ``LIMIT`` elements each, and the op reads and writes nothing else.
- Integers and booleans in and out; or, where the device is the CPU, an op of ``_ALIKE`` on float32 or float64: one
  rounding that IEEE 754 prescribes, a comparison, or a move of elements. (XLA takes subnormal numbers for zero.)

After ``OFTEN`` calls of one key, its plan is compiled like any other. On a GPU or a TPU that happens at the first call
that finds an array not computed yet, so that the host never waits for the device. Inside of transformations and
recordings, and on a mesh, nothing runs here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import jax
import torch
from torch import Tensor

from isthmus import config
from isthmus._device.checks import ask_cpu
from isthmus._device.core import inference, mode
from isthmus._device.core.buffer import buffer_of, maker, wrap
from isthmus._device.core.host_tensors import array_from_cpu, cpu_from_array
from isthmus._device.core.slack import Slack
from isthmus._graph.arguments import NUMBERS, tensors_in
from isthmus._graph.layout import Spec, is_as_made, storage_shape
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import ABSENT
from isthmus._runtime import compiler, counters, placement, private
from isthmus._runtime.dtypes import to_torch_dtype

if TYPE_CHECKING:
    from isthmus._device.core.dispatch import Kernel
    from isthmus._device.core.plan import Plan

LIMIT = 4096
# About as many calls as cost what compiling does.
OFTEN = 1024
_WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FLOATS = frozenset({torch.float32, torch.float64})
_aten = torch.ops.aten
_ALIKE = frozenset({
    _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.neg.default, _aten.abs.default,
    _aten.eq.Tensor, _aten.eq.Scalar, _aten.ne.Tensor, _aten.ne.Scalar, _aten.lt.Tensor, _aten.lt.Scalar,
    _aten.le.Tensor, _aten.le.Scalar, _aten.gt.Tensor, _aten.gt.Scalar, _aten.ge.Tensor, _aten.ge.Scalar,
    _aten.where.self, _aten.masked_fill.Scalar, _aten.masked_fill.Tensor, _aten.argmax.default,
    _aten.cat.default, _aten.clone.default, _aten._to_copy.default, _aten.full.default, _aten.ones.default,
    _aten.index_select.default, _aten.gather.default, _aten.flip.default,
})  # fmt: skip


def plan_for(kernel: Kernel, key: Any, inputs: list[Any], values: tuple[Any, ...]) -> Plan | None:
    """Return the plan that runs calls of this key, or reads their views, on the host; None where they are compiled."""
    if key in kernel.frequent:
        # It has been called often enough, and is compiled like any other from now on.
        kernel.frequent.discard(key)
        return None
    if not _qualifies(kernel, inputs, values):
        return None
    try:
        result, warned = inference.recorded(lambda: inference.infer(kernel.op, values, share=False))
    except Exception:
        return None  # the plan says what is wrong
    # A warning comes with every call, which only a real plan repeats.
    if warned or result is None:
        return None
    specs = inference.specs(result[0])
    run = _on_host(kernel, values, result[0], specs) or _on_copies(kernel, values, specs)
    return None if run is None else _until_often(kernel, key, run)


def _until_often(kernel: Kernel, key: Any, run: Plan) -> Plan:
    left = OFTEN

    def counted(inputs: list[Any], values: tuple[Any, ...]) -> Any:
        nonlocal left
        left -= 1
        waits = not all(map(is_there, inputs))
        if left <= 0 or waits:
            # The next call of this key builds a plan; ``frequent`` says that it must not come back here.
            kernel.plans.pop(key, None)
            kernel.frequent.add(key)
        if waits:
            args, kwargs = kernel.schema.split(values)
            return kernel.entry(*args, **kwargs)
        with mode.reason("a small op on the host"):
            try:
                return run(inputs, values)
            except Exception:
                # The CPU refuses it. The device may not, as ``histc`` of integers; its plan knows.
                kernel.plans.pop(key, None)
                kernel.frequent.add(key)
        args, kwargs = kernel.schema.split(values)
        return kernel.entry(*args, **kwargs)

    return counted


def _on_host(
    kernel: Kernel, values: tuple[Any, ...], result: Any, specs: Sequence[Spec | None]
) -> Plan | None:
    """Return the plan of an op with one small result that ATen computes on the CPU just so."""
    spec = specs[0] if isinstance(result, Tensor) else None
    if spec is None or math.prod(spec.size) > LIMIT:
        return None
    if not is_exact(kernel.op, kernel.schema.named(values), {*_dtypes(values), spec.dtype}):
        return None
    make, contiguous = maker(spec, False), is_as_made(spec.size, spec.stride)

    def run(_: list[Any], values: tuple[Any, ...]) -> Any:
        counters.count("small ops on the host")
        shown = tuple([_replaced(value, _shown) for value in values])
        answer = ask_cpu.on_cpu(kernel.op, shown)[1]
        # What torch announced on Meta is what callers rely on.
        assert (tuple(answer.shape), answer.dtype) == (spec.size, spec.dtype), kernel.op
        return make(array_from_cpu(answer if contiguous else _in_memory_order(answer, spec)))

    return run


def _on_copies(kernel: Kernel, values: tuple[Any, ...], specs: Sequence[Spec | None]) -> Plan | None:
    """Return the plan of an op on small views: it runs on copies of them, by the plan of contiguous tensors.

    A view of each size is laid out in a way of its own, and would need a program of its own.
    """
    tensors = [tensor for tensor in tensors_in(values) if tensor.device.type == "jax"]
    if compiler.platform() != "cpu" or all([_is_plain(tensor) for tensor in tensors]):
        return None
    if not all([spec is not None and is_as_made(spec.size, spec.stride) for spec in specs]):
        return None

    def copied(tensor: Tensor) -> Tensor:
        return tensor if _is_plain(tensor) else wrap(array_from_cpu(_shown(tensor)), tensor.dtype)

    def run(_: list[Any], values: tuple[Any, ...]) -> Any:
        args, kwargs = kernel.schema.split(tuple([_replaced(value, copied) for value in values]))
        return kernel.entry(*args, **kwargs)

    return run


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is all of its storage, in order."""
    shape = buffer_of(tensor).signature.shape
    return tensor.is_contiguous() and shape == tensor.shape and not tensor.storage_offset()


def _in_memory_order(result: Tensor, spec: Spec) -> Tensor:
    """Return a result in the shape that the storage of a tensor with this layout has."""
    laid_out = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device="cpu").copy_(result)
    return laid_out.as_strided((laid_out.numel(),), (1,)).reshape(storage_shape(spec.size, spec.stride))


def _qualifies(kernel: Kernel, inputs: list[Any], values: tuple[Any, ...]) -> bool:
    """Return whether an op computes one small result of small arrays, outside of anything that records it."""
    # Where somebody records, transforms or splits, the op must be seen as an op.
    if (
        config.current.small_ops != "host"
        or kernel.lowering is None
        or kernel.random
        or kernel.schema.mutated
    ):
        return False
    if placement.home is not None or mode.current.capture is not None or private.is_traced(inputs):
        return False
    device = kernel.schema.named(values).get("device")
    if device is not None and (device.type != "jax" or device.index):
        return False
    return all([_is_small(tensor) for tensor in tensors_in(values)])


def _is_small(tensor: Tensor) -> bool:
    # A storage is copied as a whole, so it must be small as well as the tensor.
    if tensor.is_neg() or tensor.is_conj() or tensor.numel() > LIMIT:
        return False
    if tensor.device.type != "jax":
        return tensor.device.type == "cpu"
    return math.prod(buffer_of(tensor).signature.shape) <= LIMIT and not buffer_of(tensor).signature.shrunk


def _dtypes(values: tuple[Any, ...]) -> set[Any]:
    """Return the dtypes of tensors and of numbers among the arguments."""
    of_tensors: set[Any] = {tensor.dtype for tensor in tensors_in(values)}
    flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    # A Python float has the default dtype, which decides whether the op is exact.
    return of_tensors | {
        torch.tensor(n).dtype for n in flat if type(n) in NUMBERS and type(n) not in (bool, int)
    }


def is_exact(op: OpOverload, arguments: Mapping[str, Any], dtypes: Set[torch.dtype]) -> bool:
    """Return whether no bit of a result depends on what computes it; ``dtypes`` are those of inputs and results."""
    if dtypes <= _WHOLE:
        return True
    if compiler.platform() != "cpu" or op not in _ALIKE or not dtypes <= _WHOLE | _FLOATS:
        return False
    if arguments.get("alpha", 1) not in (1, ABSENT):
        return False  # a product that may be rounded, or not, before the sum
    # What a float too large for an integer becomes is up to the machine.
    return op is not _aten._to_copy.default or arguments.get("dtype") not in _WHOLE - {torch.bool}


def is_there(held: Any) -> bool:
    """Return whether the host can read an array at once; on the CPU it can as soon as it would have computed it."""
    array = held.array if type(held) is Slack else held
    if compiler.platform() == "cpu" or not isinstance(array, jax.Array):
        return True
    return bool(array.is_ready())  # type: ignore[attr-defined]  # JAX's stubs leave it out


def _replaced(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Return an argument with other tensors for those of the device."""
    if isinstance(value, Tensor):
        return replace(value) if value.device.type == "jax" else value
    return [_replaced(item, replace) for item in value] if isinstance(value, (list, tuple)) else value


def _shown(tensor: Tensor) -> Tensor:
    """Return the same view of the host's copy of a storage."""
    array = buffer_of(tensor).value
    storage = cpu_from_array(array, to_torch_dtype(array.dtype)).reshape(-1).view(tensor.dtype)
    return storage.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
