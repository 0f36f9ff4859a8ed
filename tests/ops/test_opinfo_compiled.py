"""Every operator of torch's op_db compiled as one graph for the device, against eager torch on the CPU."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests.conformance import compiled
from tests.conformance.verdict import Entry, Verdict, chosen, judge, spread
from tests.ops.test_opinfo import DTYPES, SPARSE, name_of

CALLS: dict[str, compiled.Call] = {"compiled": compiled.forward, "compiled gradient": compiled.gradient}
# Compiling costs more than the values of one more sample are worth: as many, spread over those torch has.
SAMPLES = {"compiled": 3, "compiled gradient": 1}
# One test in so many is not slow; each op of tests/cases/ has a compiled test that is not (test_ops.py).
SPARSITY = 17


def plans(op: OpInfo) -> Iterator[tuple[str, torch.dtype]]:
    """Yield what is to be compiled of an entry, and in which dtype: float32 unless the op has none."""
    supported = op.supported_dtypes("cpu")
    found = [d for d in (torch.float32, torch.int64, *DTYPES) if d in supported]
    if op.name in SPARSE or not found:
        return
    yield "compiled", found[0]
    if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu"):
        yield "compiled gradient", torch.float32


def parameters() -> Iterator[Any]:
    """Yield the tests; a few, chosen by their names, are not slow."""
    found = [(op, *plan) for op in sorted(op_db, key=name_of) for plan in plans(op)]
    for op, kind, dtype in found:
        entry = Entry("op_db", name_of(op), kind, str(dtype).removeprefix("torch."))
        marks = [] if zlib.crc32(str(entry).encode()) % SPARSITY == 0 else [pytest.mark.slow]
        yield pytest.param(op, dtype, entry, id=str(entry).replace(" ", "_"), marks=marks)


def samples(op: OpInfo, kind: str, dtype: torch.dtype) -> list[SampleInput]:
    """Return a few samples, spread over those torch has."""
    made = list(op.sample_inputs("cpu", dtype, requires_grad=kind == "compiled gradient"))
    return spread(made, min(SAMPLES[kind], len(made)))


@pytest.mark.parametrize(("op", "dtype", "entry"), parameters())
def test_compiled_operator(
    op: OpInfo, dtype: torch.dtype, entry: Entry, record_property: Any, limit: int | None
) -> None:
    verdict = Verdict(entry)
    torch.manual_seed(zlib.crc32(str(entry).encode()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = chosen(samples(op, entry.kind, dtype), entry, limit)
        compiled.run(op, CALLS[entry.kind], given, verdict)
    judge(verdict, record_property)
