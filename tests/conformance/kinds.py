"""What is done with one sample of an operator: each function runs a call and returns what it gives.

The same function runs on the CPU, in double precision where the answer is doubted, and on the device, so what
"equal" means is written once, in ``run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests.conformance.invariants import INVARIANTS
from tests.conformance.values import (
    Mismatch,
    compare_forms,
    compare_values,
    copied,
    leaves,
    to_jax,
    weights,
    widened,
)
from tests.conformance.verdict import Verdict

Call = Callable[[OpInfo, SampleInput], list[Any]]

# Their values are whatever the memory held.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
UNINITIALISED |= {"resize_", "resize_as_"}


def forward(op: OpInfo, sample: SampleInput) -> list[Any]:
    """Return what the op gives."""
    return leaves(op(sample.input, *sample.args, **sample.kwargs))


def inplace(op: OpInfo, sample: SampleInput) -> list[Any]:
    """Return what the in-place form gives, and the tensor it wrote to."""
    target = copied(sample.input)
    result = op.inplace_variant(target, *sample.args, **sample.kwargs)
    if isinstance(target, torch.Tensor) and result is not target:
        raise Mismatch("the in-place form does not return its target")
    return leaves([result, target])


def out(op: OpInfo, sample: SampleInput) -> list[Any]:
    """Return what the op writes to results of the right size, of no size, and with other strides."""
    made = op(sample.input, *sample.args, **sample.kwargs)
    found: list[Any] = []
    for prepare in (_filled, _empty, _strided):
        targets = tuple(map(prepare, made)) if isinstance(made, tuple) else prepare(made)
        result = op(sample.input, *sample.args, **sample.kwargs, out=targets)
        found += leaves([result, targets])
    return found


def _filled(like: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(like)


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=like.dtype, device=like.device)


def _strided(like: torch.Tensor) -> torch.Tensor:
    return torch.ones((*like.shape, 2), dtype=like.dtype, device=like.device)[..., 1]


def gradient(op: OpInfo, sample: SampleInput) -> list[Any]:
    """Return the gradients of every input that asks for one."""
    inputs = _differentiable(sample)
    return leaves(_gradients(_outputs(op, sample), inputs)) if inputs else []


def second(op: OpInfo, sample: SampleInput) -> list[Any]:
    """Return the gradients of the gradients."""
    inputs = _differentiable(sample)
    first = _gradients(_outputs(op, sample), inputs, create_graph=True) if inputs else []
    again = [g for g in first if g is not None and g.requires_grad]
    return leaves(_gradients(again, inputs)) if again else []


def tangent(op: OpInfo, sample: SampleInput) -> list[Any]:
    """Return the tangents of every result, by forward-mode differentiation."""
    with forward_ad.dual_level():

        def dual(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
                return tensor
            return forward_ad.make_dual(tensor.detach(), weights(tensor))

        moved = sample.transform(dual)
        results = leaves(op(moved.input, *moved.args, **moved.kwargs))
        found = [forward_ad.unpack_dual(r).tangent for r in results if isinstance(r, torch.Tensor)]
    return leaves(found)


def _differentiable(sample: SampleInput) -> list[torch.Tensor]:
    given = leaves([sample.input, sample.args, sample.kwargs])
    return [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]


def _outputs(op: OpInfo, sample: SampleInput) -> list[torch.Tensor]:
    result = sample.output_process_fn_grad(op.gradcheck_wrapper(op, sample.input, *sample.args, **sample.kwargs))
    return [t for t in leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]


def _gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor], create_graph: bool = False) -> list[Any]:
    if not outputs:
        return []
    cotangents = [weights(t) for t in outputs]
    return list(torch.autograd.grad(outputs, inputs, cotangents, create_graph=create_graph, allow_unused=True))


def run(op: OpInfo, call: Call, samples: Iterable[SampleInput], verdict: Verdict) -> None:
    """Run ``call`` on every sample on the CPU and on the device, and note where they differ."""
    for number, sample in enumerate(samples):
        want, refused = _attempt(op, call, _mapped(sample, copied))
        if isinstance(refused, NotImplementedError):
            continue  # torch itself has no such form
        moved = _mapped(sample, to_jax)
        with verdict.sample(number):
            if refused is None:
                _compare(op, call, sample, moved, want)
            else:
                _must_refuse(op, call, moved, refused)


def _mapped(sample: SampleInput, function: Callable[[Any], Any]) -> SampleInput:
    given = (sample.input, sample.args, sample.kwargs)
    value, args, kwargs = function(given)
    process = sample.output_process_fn_grad
    return SampleInput(value, args=args, kwargs=kwargs, output_process_fn_grad=process)


def _attempt(op: OpInfo, call: Call, sample: SampleInput) -> tuple[list[Any], Exception | None]:
    try:
        torch.manual_seed(0)
        return call(op, sample), None
    except Exception as error:
        return [], error


def _must_refuse(op: OpInfo, call: Call, sample: SampleInput, refused: Exception) -> None:
    try:
        call(op, sample)
    except Exception as error:
        if type(error) is not type(refused):
            words = str(error).strip().split("\n")[0][:160]
            raise Mismatch(f"{type(error).__name__}: {words}, CPU raises {type(refused).__name__}") from error
        return
    words = str(refused).strip().split("\n")[0][:160]
    raise Mismatch(f"no error, CPU raises {type(refused).__name__}: {words}")


def _compare(op: OpInfo, call: Call, sample: SampleInput, moved: SampleInput, want: list[Any]) -> None:
    torch.manual_seed(0)
    got = call(op, moved)
    compare_forms(got, want)
    if op.name in UNINITIALISED:
        return
    if _is_random(op, call, sample, want):
        _must_repeat(op, call, moved, got)
        return
    invariant = INVARIANTS.get(op.name) if call is not gradient else None

    def seen(results: list[Any], given: SampleInput) -> list[Any]:
        results = [r.cpu() if isinstance(r, torch.Tensor) else r for r in results]
        return invariant(given, results) if invariant else results

    def truth() -> list[Any]:
        wide = _mapped(sample, widened)
        found, refused = _attempt(op, call, wide)
        return seen(found, wide) if refused is None else []

    compare_values(seen(got, sample), seen(want, sample), truth)


def _is_random(op: OpInfo, call: Call, sample: SampleInput, want: list[Any]) -> bool:
    torch.manual_seed(1)
    again = call(op, _mapped(sample, copied))
    return not all([_same(a, w) for a, w in zip(again, want, strict=True)])


def _must_repeat(op: OpInfo, call: Call, moved: SampleInput, got: list[Any]) -> None:
    torch.manual_seed(0)
    again = call(op, moved)
    if not all([_same(a, g) for a, g in zip(again, got, strict=True)]):
        raise Mismatch("a second call after the same manual_seed gives other values")


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other or (one != one and other != other))
    return torch.equal(torch.nan_to_num(one.cpu()), torch.nan_to_num(other.cpu()))
