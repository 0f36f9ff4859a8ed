"""``torch.profiler`` with times of the device: while it is on, each program is waited for and timed.

torch's profiler collects what devices do in C++ (Kineto), and a device in Python cannot register there. What it has in
Python is the list of events, made when the profile is read: those of the CPU, each with its *kernels* (a name and
microseconds), and one for each kernel on the device. So while a profile with the device's activity is on, every program
is watched (``_runtime/watching.py``): its call is a range of the profiler's with a number in its name, and once the
results are there the time is noted under that number. In the list of events the range of an eager op gives way to a
kernel of the op, as on other devices; a program of another mode keeps its range, which has the kernel::

    aten::mm                                            aten::mm              kernel "aten.mm.default", 812 us
      jax: aten.mm.default#17                   ->      aten.mm.default       on the device, 812 us
    jax: forward 0#18                                   jax: forward 0        kernel "forward 0", 90 us ...

``key_averages()`` adds these up as for other devices. The time is from the call to the results, so it includes the
launch (some microseconds), and programs do not overlap with Python as they do without the profiler. The trace that
torch writes in C++ (``export_chrome_trace``) has the ranges and no row of the device; ``isthmus.profile`` has both.

``install`` is called with the first tensor, so a profile that began before it has no times of the device.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent

from isthmus._device.core.buffer import buffer_of
from isthmus._device.torch_glue import patches
from isthmus._runtime import compiler, watching

_OWNER = "torch.autograd.profiler.profile"
_NAME = re.compile(r"jax: (.+)#(\d+)")


def install() -> None:
    """Let profiles that begin from now on have times of the device."""
    patches.replace(_OWNER, "_start_trace", _starting)
    patches.replace(_OWNER, "__exit__", _ending)
    patches.replace(_OWNER, "_parse_kineto_results", _with_times)


class _Times:
    """Times every program while one profile is on; ``microseconds`` are by the number of the range."""

    def __init__(self) -> None:
        self.microseconds: dict[int, float] = {}
        self.eager: set[int] = set()
        self._numbers = itertools.count()
        self._here = threading.local()

    def __call__(self, mode: str, name: str, call: watching.Call) -> Any:
        """Make the call as a range of the profiler's, and note how long it took until its results were there."""
        number = next(self._numbers)
        self._here.inner = False
        with torch.profiler.record_function(f"jax: {name}#{number}"):
            start = time.perf_counter_ns()
            result = call()
            _wait_for(result)
            took = time.perf_counter_ns() - start
        # A run that other runs are part of (a decomposition) has no time of its own: it would be counted twice.
        self.microseconds[number] = 0.0 if self._here.inner else took / 1e3
        if mode == "eager":
            self.eager.add(number)
        self._here.inner = True
        return result


def _wait_for(result: Any) -> None:
    """Wait for what a program computes: its results where these are tensors, else all that this thread began."""
    tensors = [result] if isinstance(result, torch.Tensor) else result
    if not isinstance(tensors, (list, tuple)) or not tensors:
        compiler.wait()
        return
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "jax":
            buffer_of(tensor).value.block_until_ready()
        elif tensor is not None:
            compiler.wait()


def _starting(theirs: Callable[[Any], None]) -> Callable[[Any], None]:
    def start(self: Any) -> None:
        if self.use_device == "jax":
            if not hasattr(self, "_isthmus_times"):  # a profile with a schedule begins again and again
                self._isthmus_times = _Times()
            compiler.wait()  # what began before is no time of the first program
            watching.add(self._isthmus_times)
        theirs(self)

    return start


def _ending(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def end(self: Any, *error: Any) -> Any:
        times = getattr(self, "_isthmus_times", None)
        if times is not None:
            watching.remove(times)
        return theirs(self, *error)

    return end


def _with_times(theirs: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def parse(self: Any, *args: Any, **kwargs: Any) -> list[Any]:
        events = theirs(self, *args, **kwargs)
        times = getattr(self, "_isthmus_times", None)
        return events if times is None else _timed(events, times)

    return parse


def _timed(events: list[Any], times: _Times) -> list[Any]:
    """Return events with ours as kernels."""
    timed, around = [], list[Any]()
    # Events of one thread in the order in which they begin, an outer one before those inside of it.
    for event in sorted(events, key=lambda one: (one.thread, one.time_range.start, -one.time_range.end)):
        while around and (around[-1].thread, around[-1].time_range.end) < (
            event.thread,
            event.time_range.end,
        ):
            around.pop()
        match = _NAME.fullmatch(event.name)
        if match is None:
            timed.append(event)
            around.append(event)
            continue
        name, number = match[1], int(match[2])
        microseconds = times.microseconds.get(number, 0.0)
        op = event
        if number in times.eager and around and "::" in around[-1].name:
            op = around[-1]
        else:
            event.name = event.trace_name = f"jax: {name}"
            timed.append(event)
            around.append(event)
        if microseconds:
            op.append_kernel(name, 0, microseconds)
            timed.append(_on_device(event, name, microseconds))
    return timed


def _on_device(event: Any, name: str, microseconds: float) -> FunctionEvent:
    """Return the event of a kernel on the device."""
    start = event.time_range.start
    return FunctionEvent(
        id=event.id,
        name=name,
        thread=event.thread,
        start_us=start,
        end_us=start + microseconds,
        input_shapes=[],
        stack=[],
        use_device="jax",
        device_type=DeviceType.PrivateUse1,
        device_index=0,
    )
