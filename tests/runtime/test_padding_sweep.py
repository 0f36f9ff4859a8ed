"""ATen calls of op_db with one dimension padded: none is wrong, and what is refused is listed in a file."""

from __future__ import annotations

import pytest

from tests.runtime import padding_sweep


def listed() -> set[str]:
    return set(padding_sweep.GOLDEN.read_text().splitlines())


def test_a_selection_of_calls_is_right_or_listed() -> None:
    refused, right = padding_sweep.sweep(padding_sweep.QUICK_ONE_IN)
    assert refused - listed() == set(), "these calls could be padded before"
    assert right > 20


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_call_is_right_or_listed() -> None:
    refused, right = padding_sweep.whole()
    assert refused - listed() == set(), "these calls could be padded before"
    assert listed() - refused == set(), (
        "these calls are no longer refused: python -m tests.runtime.padding_sweep"
    )
    assert right > 2000
