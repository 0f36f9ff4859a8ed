"""An operator through ``torch.compile(backend="isthmus", fullgraph=True)`` on the device, against eager on the CPU.

What Dynamo or AOTAutograd cannot compile for the CPU either, with torch's own ``aot_eager`` backend, says nothing
about this backend: such a sample is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from isthmus._dynamo import compile_log
from tests.conformance import invariants, kinds
from tests.conformance.trial import Trial
from tests.conformance.values import PLACES, gradients, leaves, names_a_device
from tests.conformance.verdict import Uncompilable, Verdict, described

Function = Callable[..., Any]
Call = Callable[[OpInfo, Function, SampleInput], list[Any]]


def forward(op: OpInfo, function: Function, sample: SampleInput) -> list[Any]:
    """Return what the function gives."""
    return leaves(function(sample.input, *sample.args, **sample.kwargs))


def gradient(op: OpInfo, function: Function, sample: SampleInput) -> list[Any]:
    """Return the gradients of every input that asks for one."""
    inputs = kinds.differentiable(sample)
    result = op.gradcheck_wrapper(function, sample.input, *sample.args, **sample.kwargs)
    result = leaves(sample.output_process_fn_grad(result))
    outputs = [t for t in result if isinstance(t, torch.Tensor) and t.requires_grad]
    return leaves(gradients(outputs, inputs)) if inputs else []


def compiled(op: OpInfo, backend: str) -> Function:
    """Return an op as a function that is one compiled graph."""
    torch._dynamo.reset()
    plain = op.get_op()

    def function(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    function.__name__ = getattr(plain, "__name__", op.name)  # the wrappers of masked ops look at it
    return torch.compile(function, backend=backend, fullgraph=True)


def _unseeded(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Call a function as it is: where torch's samples seed the generator, Dynamo would stop."""
    return function(*args, **kwargs)


@mock.patch.object(common_methods_invocations, "wrapper_set_seed", _unseeded)
def run(op: OpInfo, call: Call, samples: Iterable[SampleInput], verdict: Verdict) -> None:
    """Run ``call`` on every sample, eager on the CPU and compiled on the device, and note where they differ."""
    for number, sample in enumerate(samples):
        with compile_log.recording() as found:
            _trial(op, call, sample).run(verdict, number)
        outside = {str(node.target) for graph in found.graphs for node, _ in graph.outside}
        verdict.outside.update(outside)


def _trial(op: OpInfo, call: Call, sample: SampleInput) -> Trial:
    ours = compiled(op, "isthmus")

    def at(place: str) -> list[Any]:
        if place != "jax":
            return _eager(op, call, kinds.mapped(op, sample, PLACES[place]))
        try:
            return call(op, ours, kinds.mapped(op, sample, PLACES["jax"]))
        except Exception as error:
            _blame_torch(op, call, sample)
            raise error

    def invariant(results: list[Any]) -> list[Any]:
        return invariants.of(op.name, False, sample, results) if call is forward else results

    placed = names_a_device([sample.input, sample.args, sample.kwargs])
    has_values = op.name not in kinds.UNINITIALISED
    return Trial(at, invariant, has_values, "jax" if placed else "cpu")


def _eager(op: OpInfo, call: Call, sample: SampleInput) -> list[Any]:
    """Return what eager torch gives; NotImplementedError says that a sample is none."""
    try:
        found = call(op, op.get_op(), sample)
    except Exception as error:
        # How a call that is wrong is refused is for the tests of eager ops.
        raise NotImplementedError(str(error)) from error
    if not found:
        raise NotImplementedError("there is nothing to compare")
    return found


def _blame_torch(op: OpInfo, call: Call, sample: SampleInput) -> None:
    """Raise Uncompilable where torch's own backend cannot compile the call for the CPU either."""
    try:
        call(op, compiled(op, "aot_eager"), kinds.mapped(op, sample, PLACES["cpu"]))
    except Exception as error:
        raise Uncompilable(described(error)) from error
