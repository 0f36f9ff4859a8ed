"""Every operator of torch's op_db on the device against the CPU: values, forms, gradients, errors."""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests.conformance import kinds
from tests.conformance.verdict import Entry, Verdict, chosen, judge

DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16]
DTYPES += [torch.float32, torch.float64, torch.complex64]
DIFFERENTIABLE = [torch.float32, torch.float64, torch.complex64]
# The device has the strided layout only.
SPARSE = {"sparse.sampled_addmm", "sparse.mm", "to_sparse"}
CALLS: dict[str, kinds.Call] = {
    "forward": kinds.forward,
    "noncontiguous": kinds.forward,
    "errors": kinds.forward,
    "inplace": kinds.inplace,
    "out": kinds.out,
    "gradient": kinds.gradient,
    "tangent": kinds.tangent,
    "second": kinds.second,
}


def name_of(op: OpInfo) -> str:
    """Return the name of an entry, its variant included."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def plans(op: OpInfo) -> Iterator[tuple[str, torch.dtype]]:
    """Yield what is to be done with an entry, and in which dtype."""
    supported = op.supported_dtypes("cpu")
    dtypes = [d for d in DTYPES if d in supported]
    if op.name in SPARSE or not dtypes:
        return
    yield from (("forward", d) for d in dtypes)
    main = next((d for d in (torch.float32, torch.int64) if d in dtypes), dtypes[-1])
    forms = {"noncontiguous": True, "inplace": op.inplace_variant, "out": op.supports_out}
    forms["errors"] = op.error_inputs_func
    yield from ((form, main) for form, has in forms.items() if has)
    backward = op.supported_backward_dtypes("cpu") if op.supports_autograd else set()
    yield from (("gradient", d) for d in DIFFERENTIABLE if d in backward)
    if op.supports_forward_ad and torch.float32 in backward:
        yield "tangent", torch.float32
    if op.supports_gradgrad and torch.float64 in backward:
        yield "second", torch.float64


def parameters() -> Iterator[Any]:
    """Yield the tests: of each operator's one is not slow, which by its name, so that others leave it as it is."""
    for op in sorted(op_db, key=name_of):
        mine = list(plans(op))
        quick = zlib.crc32(name_of(op).encode()) % max(len(mine), 1)
        for turn, (kind, dtype) in enumerate(mine):
            entry = Entry("op_db", name_of(op), kind, str(dtype).removeprefix("torch."))
            marks = [] if turn == quick else [pytest.mark.slow]
            yield pytest.param(op, dtype, entry, id=str(entry), marks=marks)


def samples(op: OpInfo, kind: str, dtype: torch.dtype) -> Iterable[SampleInput]:
    """Return the samples a kind of test runs on."""
    if kind == "errors":
        return (error.sample_input for error in op.error_inputs("cpu"))
    differentiated = kind in ("gradient", "tangent", "second")
    made = op.sample_inputs("cpu", dtype, requires_grad=differentiated)
    if kind == "noncontiguous":
        return (sample.noncontiguous() for sample in made)
    return itertools.islice(made, 3) if kind == "second" else made


# Hundreds of samples, each compiled: `unique` takes five minutes where two cores do other things as well.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("op", "dtype", "entry"), parameters())
def test_operator(
    op: OpInfo, dtype: torch.dtype, entry: Entry, record_property: Any, limit: int | None
) -> None:
    verdict = Verdict(entry)
    torch.manual_seed(zlib.crc32(str(entry).encode()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = chosen(samples(op, entry.kind, dtype), entry, limit)
        kinds.run(op, CALLS[entry.kind], given, verdict)
    judge(verdict, record_property)
