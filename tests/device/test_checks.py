"""Indices out of range: refused at the call, at the next host read, or not at all, as the config says."""

from __future__ import annotations

import pytest
import torch

import isthmus
from isthmus._device.checks import value_checks


@pytest.fixture(autouse=True)
def restored(strict_fallback: None):
    yield
    isthmus.config.check_indices = "auto"
    value_checks.forget()


def _bad() -> torch.Tensor:
    return torch.arange(3.0, device="jax").index_select(0, torch.tensor([5], device="jax"))


def test_now() -> None:
    isthmus.config.check_indices = "now"
    with pytest.raises(IndexError, match="out of range"):
        _bad()


def test_later_raises_at_the_next_host_read() -> None:
    isthmus.config.check_indices = "later"
    _bad()
    with pytest.raises(IndexError, match="out of range"):
        torch.ones(1, device="jax").item()
    torch.ones(1, device="jax").item()


def test_later_raises_at_synchronize() -> None:
    isthmus.config.check_indices = "later"
    _bad()
    with pytest.raises(IndexError, match="out of range"):
        torch.jax.synchronize()


def test_later_keeps_only_so_many() -> None:
    isthmus.config.check_indices = "later"
    x, index = torch.arange(3.0, device="jax"), torch.tensor([1], device="jax")
    for _ in range(3 * value_checks._LIMIT):
        x.index_select(0, index)
    assert len(value_checks._pending) <= value_checks._LIMIT


def test_off() -> None:
    isthmus.config.check_indices = "off"
    _bad()
    torch.jax.synchronize()


def test_a_refused_write_leaves_the_target_unchanged() -> None:
    isthmus.config.check_indices = "now"
    x = torch.zeros(3, device="jax")
    with pytest.raises(IndexError):
        x.index_add_(0, torch.tensor([0, 7], device="jax"), torch.ones(2, device="jax"))
    with pytest.raises((IndexError, RuntimeError)):
        x[torch.tensor([0, 9], device="jax")] = 1.0
    assert x.tolist() == [0, 0, 0]


@pytest.mark.usefixtures("fresh_dynamo")
def test_conditions_of_an_op_with_torchs_derivative_reach_the_program() -> None:
    matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    compiled = torch.compile(lambda x: torch.linalg.pinv(x, hermitian=True), backend="isthmus")
    for _ in range(2):
        torch.testing.assert_close(
            compiled(matrix.to("jax")).cpu(), torch.linalg.pinv(matrix, hermitian=True)
        )
    with pytest.raises(torch.linalg.LinAlgError, match="failed to converge"):  # type: ignore[attr-defined]
        compiled(torch.full((2, 2), torch.nan, device="jax"))
