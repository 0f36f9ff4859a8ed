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


def _methods(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))}


def test_the_generic_classes_are_those_of_torch_jax() -> None:
    side, start, end = (
        torch.Stream("jax"),
        torch.Event("jax", enable_timing=True),
        torch.Event(enable_timing=True),
    )
    assert (
        type(side)
        is type(torch.Stream(device="jax:0", priority=-1))
        is type(torch.Stream())
        is torch.jax.Stream
    )
    assert type(start) is type(end) is torch.jax.Event
    for made, generic in ((side, torch.Stream), (start, torch.Event)):
        assert isinstance(made, generic)
        assert issubclass(type(made), generic)
        assert not isinstance(made, torch.Event if generic is torch.Stream else torch.Stream)
        # Every method of torch's classes has its own here, but for handles of other processes.
        assert _methods(generic) - set(vars(type(made))) <= {"ipc_handle", "from_ipc_handle"}
    assert start.device == side.device == torch.device("jax:0")
    with pytest.raises(NotImplementedError):
        start.ipc_handle()
    with side:
        assert torch.accelerator.current_stream() is torch.jax.current_stream() is side
        start.record()
        x = torch.ones(300, 300, device="jax") @ torch.ones(300, 300, device="jax")
        assert side.record_event(end) is end
    assert torch.accelerator.current_stream() == torch.jax.default_stream()
    torch.accelerator.set_stream(side)
    assert torch.jax.current_stream() is side
    torch.jax.set_stream(torch.jax.default_stream())
    assert torch.accelerator.current_stream(0) == torch.jax.default_stream()
    torch.accelerator.current_stream().wait_stream(side)
    torch.accelerator.current_stream().wait_event(end)
    end.wait(side)
    end.synchronize()
    side.synchronize()
    assert end.query()
    assert side.query()
    assert not side.is_capturing()
    assert 0 < start.elapsed_time(end) < 60_000
    assert x[0, 0].item() == 300


def test_streams_and_events_of_other_devices_are_torchs() -> None:
    assert torch.Event("cpu").device.type == "cpu"
    assert torch.Stream("cpu").device.type == "cpu"
    assert torch.Stream(stream_id=7, device_index=0, device_type=1).device.type == "cuda"
    assert torch.Stream(stream_id=7, device_index=0, device_type=20).stream_id == 7

    class Own(torch.Event):
        pass

    assert type(Own("cpu")) is Own
    assert isinstance(Own("cpu"), torch.Event)
    assert not isinstance(torch.Event("cpu"), Own)


def test_torch_accelerator_says_what_torch_jax_says() -> None:
    x = torch.ones(1_000_003, device="jax")
    generic, ours = torch.accelerator, torch.jax
    for theirs, mine in {
        generic.is_available: ours.is_available,
        generic.device_count: ours.device_count,
        generic.current_device_index: ours.current_device,
        generic.memory_allocated: ours.memory_allocated,
        generic.memory_reserved: ours.memory_reserved,
        generic.max_memory_allocated: ours.max_memory_allocated,
        generic.max_memory_reserved: ours.max_memory_reserved,
        generic.memory_stats: ours.memory_stats,
        generic.get_device_capability: ours.get_device_capability,
        generic.current_stream: ours.current_stream,
        generic.synchronize: ours.synchronize,
        generic.empty_cache: ours.empty_cache,
        generic.reset_peak_memory_stats: ours.reset_peak_memory_stats,
        generic.reset_accumulated_memory_stats: ours.reset_accumulated_memory_stats,
    }.items():
        assert theirs() == mine(), theirs
    assert generic.memory_allocated() >= x.nbytes
    assert generic.get_memory_info()[1] == ours.mem_get_info()[1]
    assert generic.current_accelerator() == torch.device("jax")
    for index in (0, "jax:0", torch.device("jax", 0)):
        generic.set_device_index(index)
    with generic.device_index(0):
        assert generic.current_device_index() == ours.current_device() == 0
