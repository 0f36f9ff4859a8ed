"""In-place ops reuse the memory nobody else holds, and only while the config lets them."""

from __future__ import annotations

import threading

import pytest
import torch

import isthmus


def _reuses_memory() -> bool:
    x = torch.rand(300, 7, device="jax")
    x.add_(1)
    pointer = x.untyped_storage()._buffer.value.unsafe_buffer_pointer()
    x.add_(1)
    return x.untyped_storage()._buffer.value.unsafe_buffer_pointer() == pointer


def test_the_config_is_heard_after_programs_were_compiled() -> None:
    assert _reuses_memory()
    isthmus.config.donate = "off"
    try:
        assert not _reuses_memory()
    finally:
        isthmus.config.donate = "auto"
    assert _reuses_memory()


def test_an_array_somebody_holds_is_left_alone() -> None:
    x = torch.ones(300, 7, device="jax")
    x.add_(1)
    held = x.untyped_storage()._buffer.value
    x.add_(1)
    assert not held.is_deleted()
    assert float(held[0, 0]) == 2
    assert x[0, 0].item() == 3


def _compilations() -> int:
    return isthmus.metrics.counts()["compilations"]


@pytest.mark.parametrize("length", [5, 1 << 18])
@pytest.mark.parametrize("threads", [False, True])
def test_the_second_write_to_zeros_runs_the_program_of_the_first(length: int, threads: bool) -> None:
    isthmus.clear_caches()
    waiting = threading.Event()
    other = threading.Thread(target=waiting.wait)
    if threads:  # writes take another way while there are other threads
        other.start()
    try:
        untouched = torch.zeros(2, length, device="jax")
        x, y = torch.zeros(2, length, device="jax"), torch.empty(2, length, device="jax")
        x.add_(1)
        x[0].mul_(3)
        torch._foreach_add_([x, y], 2)
        compiled = _compilations()
        x.add_(1)
        x[0].mul_(3)
        torch._foreach_add_([x, y], 2)
        y.add_(1)
        assert _compilations() == compiled
    finally:
        waiting.set()
        if threads:
            other.join()
    for tensor, value in ((x[0], 20), (x[1], 6), (y, 5), (untouched, 0), (torch.zeros_like(x), 0)):
        assert tensor.eq(value).all()


def test_what_is_overwritten_whole_has_one_program() -> None:
    isthmus.clear_caches()
    source, x = torch.ones(300, 7, device="jax"), torch.empty(300, 7, device="jax")
    x.copy_(source)
    compiled = _compilations()
    held = x.untyped_storage()._buffer.value
    x.copy_(source)  # held by this test, so it could not be donated
    del held
    x.copy_(source)
    assert _compilations() == compiled
    assert x.eq(1).all()


def test_zeros_a_call_did_not_get_to_write_stay_zeros() -> None:
    x = torch.zeros(4, device="jax")
    indices, values = torch.tensor([7], device="jax"), torch.ones(3, device="jax")
    with pytest.raises(RuntimeError, match="must match the size"):
        x.add_(values)
    with pytest.raises(IndexError, match="index out of range"):
        x.index_add_(0, indices, values[:1]).cpu()
    assert x.eq(0).all()
    assert torch.zeros(4, device="jax").eq(0).all()
