"""In-place ops reuse the memory nobody else holds, and only while the config lets them."""

from __future__ import annotations

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
