"""Shape, dtype, strides and errors of a call, from torch's own Meta kernels: asked once per key.

torch has a kernel for tensors without memory (device "meta") for nearly every op. It computes the result's layout and
raises for arguments that do not fit, so neither is written again in lowerings::

    infer(aten.mm.default, (x, y))     # -> (meta tensor of the result, the arguments on meta), or RuntimeError

``plan.py`` asks for each new key and checks its lowering against the answer; ``kernels/nn_forms.py`` asks for the
checks alone. For ``out=`` and in-place forms the arguments come back changed, which tells how torch resizes a target.

What can go wrong: an op without a Meta kernel (``infer`` returns None, and the lowering decides), Meta kernels that
accept what the CPU refuses (``checks/ask_cpu.py``), and results with strides that no real kernel gives (``_dense``).
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from isthmus._device.core.buffer import buffer_of, storage_length
from isthmus._device.torch_glue.private import below_autograd, without_torch_function
from isthmus._graph.arguments import NUMBERS, number_as_tensor, tensors_in
from isthmus._graph.layout import Spec, contiguous_strides, is_dense
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import ABSENT, schema_of

META_DEVICE = torch.device("meta")
Result = TypeVar("Result")
Warnings = list[tuple[type[Warning], str]]
# A filter for warnings of this module. ``recorded`` puts it into Python's list itself: ``warnings.filterwarnings``
# would also empty every module's registry, and Python would show old warnings again.
# The module that warns is this one: its name stands in the pattern, so warnings of other modules do not match.
_HEARD = ("always", None, Warning, re.compile(re.escape(__name__) + r"\Z"), 0)
# The one element that ``apply_`` runs a function for.
_CELL = torch.zeros(1, device="cpu")


class Shadow:
    """Replaces the "jax" tensors of one call by Meta tensors of the same layout.

    With ``share``, tensors on one storage become views of one Meta tensor, so that torch sees which ones overlap.
    """

    def __init__(self, share: bool) -> None:
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] | None = {} if share else None

    def __call__(self, value: Any) -> Any:
        """Return ``value`` with every "jax" tensor and device replaced."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if value.device.type == "jax" else value
        if isinstance(value, (list, tuple)):
            return [self(item) for item in value]
        if isinstance(value, torch.device):
            return META_DEVICE
        # A generator has no part in shapes, and a Meta kernel refuses one of another device.
        return None if isinstance(value, torch.Generator) else value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        size, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
        # Without sharing, each tensor is alone: cheaper, and enough where nothing is written.
        if self._bases is None:
            return torch.empty_strided(size, stride, dtype=dtype, device=META_DEVICE)
        key = (id(buffer_of(tensor)), dtype)
        if key not in self._bases:
            # All of the storage: torch computes overlap from addresses, which offsets into it give.
            self._bases[key] = torch.empty(storage_length(tensor), dtype=dtype, device=META_DEVICE)
        return self._bases[key].as_strided(size, stride, tensor.storage_offset())


def infer(
    op: OpOverload, values: tuple[Any, ...], *, share: bool = False
) -> tuple[Any, tuple[Any, ...]] | None:
    """Run ``op`` on stand-ins and return (result, arguments), all on Meta; None where torch has no Meta kernel.

    Raises what torch raises for a wrong call.
    """
    try:
        return _infer(op, values, share)
    except Exception:
        # Some Meta kernels take no scalar of the CPU where those of a device do (``mul.out``, ``floor_divide``).
        if not _has_scalars(op, values):
            raise
    return _infer(op, values, share, _on_meta)


def of_functional(op: OpOverload, functional: OpOverload, values: tuple[Any, ...]) -> list[Spec | None]:
    """Return the specs of the results of an ``out=`` op's functional form, [] if torch cannot infer them."""
    if functional is op:
        return []
    named = schema_of(op).named(values)
    # Arguments without a default that only the ``out=`` form lacks: torch could not be asked.
    arguments = schema_of(functional).arguments
    if any(a.name not in named for a in arguments if not a.has_default):
        return []
    try:
        inferred = infer(functional, tuple(named.get(a.name, ABSENT) for a in arguments))
    except Exception:
        return []
    return [] if inferred is None else specs(inferred[0])


def _has_scalars(op: OpOverload, values: tuple[Any, ...]) -> bool:
    return any(t.device.type == "cpu" and not t.dim() for t in tensors_in(numbers_as_tensors(op, values)))


def _on_meta(value: Any) -> Any:
    """Return an argument with scalars of the CPU on Meta."""
    if isinstance(value, (list, tuple)):
        return [_on_meta(item) for item in value]
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.dim():
        return torch.empty((), dtype=value.dtype, device=META_DEVICE)
    return value


def _infer(
    op: OpOverload, values: tuple[Any, ...], share: bool, moved: Callable[[Any], Any] | None = None
) -> tuple[Any, tuple[Any, ...]] | None:
    shadow = Shadow(share)
    with torch.no_grad(), below_autograd():
        shadows = tuple(shadow(value) for value in values)
        arguments = numbers_as_tensors(op, shadows)
        args, kwargs = schema_of(op).split(arguments if moved is None else tuple(map(moved, arguments)))
        try:
            return op(*args, **kwargs), shadows
        # No Meta kernel. That is no error: the lowering is asked for shapes instead.
        except NotImplementedError:
            return None


def recorded(function: Callable[[], Result]) -> tuple[Result, Warnings]:
    """Return the result of a function, and the warnings of torch's C++ that it gives, which are not shown.

    torch hands warnings to Python where the outermost call of its bindings ends. ``apply_`` is such a call around the
    function, so they arrive here, with this file's name. ``warnings.catch_warnings`` would make Python show old
    warnings again each time.
    """
    results: list[Result] = []
    given: Warnings = []
    shown, thread = warnings.showwarning, threading.get_ident()

    def run(_: float) -> float:
        results.append(function())
        return 0.0

    def keep(message: Any, category: type[Warning], filename: str, *more: Any, **named: Any) -> None:
        # ``showwarning`` is process-wide: what other threads warn of meanwhile is shown as ever.
        if threading.get_ident() == thread:
            given.append((category, str(message)))
        else:
            shown(message, category, filename, *more, **named)

    filters = warnings.filters
    # First in the list, so that a user's "error" filter does not turn an old warning into an exception.
    filters.insert(0, _HEARD)  # type: ignore[attr-defined]  # whatever the user's say: a later call may be under others
    warnings.showwarning = keep
    try:
        with without_torch_function():
            _CELL.apply_(run)
    finally:
        warnings.showwarning = shown
        filters.remove(_HEARD)  # type: ignore[attr-defined]
    return results[0], given


def numbers_as_tensors(op: OpOverload, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with a 0-dim tensor for each number where the schema has a tensor."""
    arguments = schema_of(op).arguments
    numbers = [a.kind == "tensor" and type(v) in NUMBERS for a, v in zip(arguments, values, strict=True)]
    if not any(numbers):
        return values
    # A condition takes no part in promotion.
    others = [
        v
        for a, v in zip(arguments, values, strict=True)
        if isinstance(v, torch.Tensor) and a.name != "condition"
    ]

    def as_tensor(value: Any) -> torch.Tensor:
        # A boolean stays one: it promotes as the number does, and some ops refuse booleans, tensor or not.
        return torch.tensor(value) if type(value) is bool else number_as_tensor(value, others)

    return tuple(as_tensor(v) if number else v for v, number in zip(values, numbers, strict=True))


def specs(result: Any) -> list[Spec | None]:
    """Return the spec of each tensor in a result, None where torch returns none."""
    if isinstance(result, torch.Tensor):
        return [_dense(Spec.of(result))]
    if isinstance(result, (list, tuple)):
        return [spec for item in result for spec in specs(item)]
    return [None]


def _dense(spec: Spec) -> Spec:
    """Return the spec, contiguous if its strides leave gaps or overlap: no op's result does, some Meta kernels do."""
    if is_dense(spec.size, spec.stride):
        return spec
    return Spec(spec.size, contiguous_strides(spec.size), spec.dtype)


def skeleton(result: Any) -> Any:
    """Return the structure of a result without its tensors."""
    return type(result)(skeleton(item) for item in result) if isinstance(result, (list, tuple)) else None


def nest(shape: Any, leaves: Iterator[Any]) -> Any:
    """Return the next ``leaves`` in a structure that ``skeleton`` returned."""
    if isinstance(shape, (list, tuple)):
        return type(shape)(nest(item, leaves) for item in shape)
    return next(leaves)
