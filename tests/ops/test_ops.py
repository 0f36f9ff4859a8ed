"""Every op case in every mode, against CPU torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import Case, check, load_families, run

# Where torch itself gives a compiler something else than its CPU kernels compute.
GAPS = {
    "_native_multi_head_attention.default(pads)": "torch's Meta kernel gives an empty tensor where the CPU gives None",
    "lstm_cell.default(no bias)": "torch's Meta kernel asks for the device of a bias that is not there",
    "index.Tensor(uint8 mask)": "torch's fake tensors take no uint8 mask",
}
ROUNDED = "torch takes the op apart before a backend sees it, and rounds bytes otherwise than its CPU kernel"
GAPS |= dict.fromkeys(
    (
        "upsample_bilinear2d.default(uint8[2,3,9,11],[4,5],False)",
        "upsample_bilinear2d.default(uint8[2,3,9,11],[13,20],False)",
        "upsample_bilinear2d.default(channels last [4, 5])",
        "upsample_bilinear2d.default(channels last [13, 20])",
        "upsample_bicubic2d.default(uint8[2,3,9,11],[13,20],False)",
    ),
    ROUNDED,
)


DECOMPOSED = (
    "torch takes the op apart before a backend sees it, and wrongly: aot_eager and inductor answer the same"
)
GAPS |= dict.fromkeys(
    (
        "multi_margin_loss.default(one 0)",
        "multi_margin_loss.default(nan 0)",
        "multi_margin_loss.default(nan 1)",
        "multi_margin_loss.default(nan 2)",
        "multilabel_margin_loss_forward.default(float32[3,4],int64[3,4],0)",
        "multilabel_margin_loss_forward.default(float32[3,4],int64[3,4],1)",
        "multilabel_margin_loss_forward.default(float32[3,4],int64[3,4],2)",
        "multilabel_margin_loss_forward.default(one 0)",
        "multilabel_margin_loss_forward.default(one 1)",
        "multilabel_margin_loss_forward.default(one 2)",
    ),
    DECOMPOSED,
)


# Files of tests/cases/ whose results XLA's optimiser might change: a division made a product with the reciprocal, sums
# in another order, roundings to half types left out, products of booleans, fused exponentials.
NUMERICS = {
    "activation",
    "attention",
    "binary",
    "cumulative",
    "loss",
    "normalization",
    "reduction",
    "softmax",
    "special",
    "unary",
}


def cases() -> Iterator[Any]:
    """Yield every case in every mode: eagerly all are quick, in the other modes the first case of each op."""
    seen: set[str] = set()
    for family, rows in load_families().items():
        for case in rows:
            common = [pytest.mark.numerics] if family in NUMERICS else []
            # A wrong call is refused while it is traced, in words that Dynamo puts into its own; lazily it has the
            # same error path for all ops, so a case that computes something is the one to run.
            name = str(case).partition("(")[0]  # cases of a plain function each have an object of their own
            quick = case.error is None and name not in seen
            other = common if quick else [*common, pytest.mark.slow]
            yield pytest.param(case, "eager", id=f"{case}-eager", marks=common)
            yield pytest.param(case, "lazy", id=f"{case}-lazy", marks=other)
            if case.error is not None:
                continue
            seen.add(name)
            gap = GAPS.get(str(case))
            marks = [*other, pytest.mark.xfail(reason=gap)] if gap is not None else other
            yield pytest.param(case, "compiled", id=f"{case}-compiled", marks=marks)


@pytest.mark.parametrize(("case", "mode"), list(cases()))
def test_agrees_with_torch(case: Case, mode: str) -> None:
    if case.error is not None:
        with pytest.raises(case.error, match=case.match):
            run(case, mode)
        return
    check(case, run(case, mode))
