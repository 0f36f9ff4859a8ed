"""``torch.jax.Stream`` and ``Event``: code that names streams runs, and what an event waits for is over."""

from __future__ import annotations

import threading

import pytest
import torch


def test_a_stream_is_current_inside_its_block() -> None:
    outer = torch.jax.current_stream()
    assert outer == torch.jax.default_stream()
    side = torch.jax.Stream(priority=-1)
    seen = []
    with torch.jax.stream(side):
        assert torch.jax.current_stream() is side
        thread = threading.Thread(target=lambda: seen.append(torch.jax.current_stream()))
        thread.start()
        thread.join()
        with torch.jax.StreamContext(None):
            assert torch.jax.current_stream() is side
        with torch.jax.Stream() as inner:
            assert torch.jax.current_stream() is inner
        assert torch.jax.current_stream() is side
    assert torch.jax.current_stream() == outer
    assert seen == [outer]
    torch.jax.set_stream(side)
    assert torch.jax.current_stream() is side
    torch.jax.set_stream(outer)
    assert side.device == torch.device("jax:0")
    assert len({side, outer, torch.jax.Stream()}) == 3


def test_streams_and_events_order_work_as_on_cuda() -> None:
    side = torch.jax.Stream()
    x = torch.arange(1000.0, device="jax")
    side.wait_stream(torch.jax.current_stream())
    with torch.jax.stream(side):
        y = (x * 2).sum()
        done = side.record_event()
    torch.jax.current_stream().wait_event(done)
    y.record_stream(torch.jax.current_stream())
    done.wait()
    assert done.query()
    side.synchronize()
    assert y.item() == 999000.0


def test_events_measure_time() -> None:
    start, end = torch.jax.Event(enable_timing=True), torch.jax.Event(enable_timing=True)
    start.record()
    torch.ones(300, 300, device="jax") @ torch.ones(300, 300, device="jax")
    end.record()
    end.synchronize()
    assert 0 < start.elapsed_time(end) < 60_000
    with pytest.raises(ValueError, match="enable_timing"):
        torch.jax.Event().record().elapsed_time(end)
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(torch.jax.Event(enable_timing=True))
    with pytest.raises(NotImplementedError, match="another process"):
        torch.jax.Event(interprocess=True)
