"""What is done with one sample of an operator: each function runs a call and returns what it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests.conformance import invariants
from tests.conformance.trial import Trial
from tests.conformance.values import PLACES, Mismatch, copied, gradients, leaves, names_a_device, weights
from tests.conformance.verdict import Verdict

Call = Callable[[OpInfo, SampleInput], list[Any]]

# Their values are whatever the memory held.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
UNINITIALISED |= {"resize_", "resize_as_"}
# The CPU's kernel ignores the strides of out=: what it should write is what it returns without.
MISPLACED = {"narrow_copy", "nn.functional.avg_pool3d"}
# torch wants its tensor of indices on the CPU, whatever the device.
HOST_ARGUMENTS = {"tensor_split"}


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
        if prepare is _strided and op.name in MISPLACED and made.device.type == "cpu":
            result = targets = made
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
    inputs = differentiable(sample)
    return leaves(gradients(_outputs(op, sample), inputs)) if inputs else []


def second(op: OpInfo, sample: SampleInput) -> list[Any]:
    """Return the gradients of the gradients."""
    inputs = differentiable(sample)
    first = gradients(_outputs(op, sample), inputs, create_graph=True) if inputs else []
    again = [g for g in first if g is not None and g.requires_grad]
    return leaves(gradients(again, inputs)) if again else []


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


def differentiable(sample: SampleInput) -> list[torch.Tensor]:
    """Return the inputs that ask for a gradient."""
    given = leaves([sample.input, sample.args, sample.kwargs])
    return [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]


def _outputs(op: OpInfo, sample: SampleInput) -> list[torch.Tensor]:
    result = sample.output_process_fn_grad(
        op.gradcheck_wrapper(op, sample.input, *sample.args, **sample.kwargs)
    )
    return [t for t in leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]


def run(op: OpInfo, call: Call, samples: Iterable[SampleInput], verdict: Verdict) -> None:
    """Run ``call`` on every sample on the CPU and on the device, and note where they differ."""
    for number, sample in enumerate(samples):

        def at(place: str, sample: SampleInput = sample) -> list[Any]:
            return call(op, mapped(op, sample, PLACES[place]))

        def invariant(results: list[Any], sample: SampleInput = sample) -> list[Any]:
            return invariants.of(op.name, call is tangent, sample, results)

        placed = names_a_device([sample.input, sample.args, sample.kwargs])
        has_values = op.name not in UNINITIALISED
        Trial(at, invariant, has_values, "jax" if placed else "cpu").run(verdict, number)


def mapped(op: OpInfo, sample: SampleInput, function: Callable[[Any], Any]) -> SampleInput:
    """Return a sample with its arguments moved by ``function``."""
    value, kwargs = function((sample.input, sample.kwargs))
    args = sample.args if op.name in HOST_ARGUMENTS else function(sample.args)
    process = sample.output_process_fn_grad
    return SampleInput(value, args=args, kwargs=kwargs, output_process_fn_grad=process)
