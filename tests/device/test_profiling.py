"""``isthmus.profile`` and ``torch.profiler`` on the device: which programs ran, from which line, and for how long."""

from __future__ import annotations

import gzip
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function

import isthmus
from isthmus._device.core import dispatch
from isthmus._runtime import trace_events, watching

FILE = "tests/device/test_profiling.py"


@pytest.fixture(autouse=True)
def nobody_watches_afterwards() -> Iterator[None]:
    yield
    assert watching.watchers == []
    kernels = [k for k in dispatch._kernels.values() if isinstance(k, dispatch.Kernel)]
    assert all(kernel.entry.__globals__["_plans"] is kernel.plans for kernel in kernels)


def _step() -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 16).to("jax")

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _line(text: str) -> str:
    lines = Path(FILE).read_text().splitlines()
    return f"{FILE}:{lines.index(text) + 1}"


def _lazy(step: Callable[[], torch.Tensor]) -> None:
    with isthmus.lazy():
        step()
        isthmus.sync()


MODES: dict[str, Callable[[Callable[[], torch.Tensor]], Callable[[], Any]]] = {
    "eager": lambda step: step,
    "lazy": lambda step: lambda: _lazy(step),
    "isthmus.jit": isthmus.jit,
    "torch.compile": lambda step: torch.compile(step, backend="isthmus"),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_run_has_its_mode_line_and_time(mode: str, tmp_path: Path) -> None:
    run = MODES[mode](_step())
    for _ in range(3):
        run()
    path = tmp_path / "trace.json.gz"
    with isthmus.profile(path) as found:
        run()
        run()
    rows = [row for row in found.programs if row.mode == mode]
    assert rows
    assert all(row.line.startswith(FILE) for row in rows)
    runs = Counter[str]()
    for row in rows:
        runs[row.name] += row.runs
    assert all(count % 2 == 0 for count in runs.values())
    if mode == "eager":
        lines = {(row.name, row.line) for row in rows}
        assert ("aten.linear.default", _line("        loss = model(x).square().mean()")) in lines
        # Backward runs on a thread without a line of the user's.
        assert ("aten.linear_backward.default", _line("        loss.backward()")) in lines
    elif mode == "lazy":
        assert [(row.line, row.runs) for row in rows] == [(_line("        isthmus.sync()"), 2)]
    assert sum(row.device_ms or 0.0 for row in rows) > 0
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    slices = Counter(
        event["args"][trace_events.MODE] for event in events if "device ms" in event.get("args", {})
    )
    assert slices[mode] == sum(row.runs for row in rows)


def test_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    x = torch.ones(32, 32, device="jax")
    _ = x @ x
    path = tmp_path / "trace.json"
    with isthmus.profile(path) as found, torch.jax.nvtx.range("my {}", "range"):
        _ = x @ x
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {"ph", "name", "pid", "tid", "ts", "dur", "args"} <= slices[0].keys()
    rows = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in slices} <= rows
    (outer,) = [event for event in slices if event["name"] == "my range"]
    (inner,) = [
        event for event in slices if event["name"].startswith("aten.mm.default") and event["pid"] == 1
    ]
    assert outer["tid"] == inner["tid"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    # On the device the program's slice has the line too, and is around its operations.
    (program, *_) = [
        event for event in slices if event["pid"] == 2 and event["name"].startswith("aten.mm.default (")
    ]
    assert program["args"]["line"].startswith(FILE)
    assert str(found).splitlines()[0].split() == [
        "device",
        "ms",
        "host",
        "ms",
        "runs",
        "mode",
        "program",
        "line",
    ]
    # Slices of one row nest or follow each other; Perfetto drops what overlaps.
    for row in rows:
        open_ends: list[float] = []
        for event in sorted(
            (e for e in slices if (e["pid"], e["tid"]) == row), key=lambda e: (e["ts"], -e["dur"])
        ):
            while open_ends and open_ends[-1] <= event["ts"] + 1e-6:
                open_ends.pop()
            assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1] + 1e-3, event
            open_ends.append(event["ts"] + event["dur"])


def test_results_in_a_profile_are_the_same_and_errors_pass() -> None:
    run = _step()
    plain = _step()
    with isthmus.profile() as found:
        inside = [run().item() for _ in range(3)]
        with pytest.raises(RuntimeError, match="size"):
            torch.ones(2, device="jax") + torch.ones(3, device="jax")
    assert inside == [plain().item() for _ in range(3)]
    assert found.programs
    with pytest.raises(ZeroDivisionError), isthmus.profile() as found:
        raise ZeroDivisionError
    assert str(found) == "no program ran"


def test_one_profile_at_a_time() -> None:
    with isthmus.profile(), pytest.raises(RuntimeError, match=r"(?i)profile"), isthmus.profile():
        pass
    with isthmus.profile():  # and the next one works
        pass


def test_other_threads_are_seen() -> None:
    x = torch.ones(8, device="jax")

    def work() -> None:
        _ = x.tanh()

    with isthmus.profile() as found:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [(row.name, row.line) for row in found.programs] == [
        ("aten.tanh.default", _line("        _ = x.tanh()"))
    ]


class _Data:
    """A file of JAX's profiler, written by hand."""

    def __init__(self, **planes: dict[str, list[tuple[str, float, float, dict[str, Any]]]]) -> None:
        self.planes = [_Named(name, lines=[_Named(n, events=[*map(_event, e)]) for n, e in lines.items()])
                       for name, lines in planes.items()]  # fmt: skip


class _Named:
    def __init__(self, name: str, **values: Any) -> None:
        self.name = name
        vars(self).update(values)


def _event(row: tuple[str, float, float, dict[str, Any]]) -> _Named:
    name, start, end, stats = row
    return _Named(name, start_ns=start, duration_ns=end - start, stats=[*stats.items()])


def _trace(host: list[Any], device: list[Any]) -> trace_events.Trace:
    data: Any = _Data(**{"/host:CPU": {"python": host}, "/device:GPU:0": {"Stream #1": device}})
    return trace_events.Trace(data)


def _run(start: float, end: float, line: str) -> tuple[str, float, float, dict[str, Any]]:
    return ("aten.mm.default", start, end, {"mode": "eager", "line": line})


def _launch(start: float, end: float) -> tuple[str, float, float, dict[str, Any]]:
    return ("PjitFunction(jit(aten.mm.default))", start, end, {})


def _done(start: float, end: float, **stats: Any) -> tuple[str, float, float, dict[str, Any]]:
    return ("dot", start, end, {"hlo_module": "jit_aten.mm.default", **stats})


def test_launches_and_executions_are_matched_in_order_where_there_are_as_many() -> None:
    host = [_run(0, 10, "a.py:1"), _launch(1, 9), _launch(2, 8), _run(20, 30, "a.py:2"), _launch(21, 29)]
    trace = _trace(host, [_done(40, 47, run_id=5), _done(10, 12, run_id=-3), _done(12, 15, run_id=-3)])
    assert [trace.device_ns([run]) for run in trace.runs] == [5, 7]


def test_a_time_that_is_not_known_is_none_and_not_a_guess() -> None:
    host = [_run(0, 10, "a.py:1"), _launch(1, 9), _run(20, 30, "a.py:2"), _launch(21, 29)]
    device = [_done(10, 15, run_id=1)]  # one execution of two launches
    trace = _trace(host, device)
    assert [trace.device_ns([run]) for run in trace.runs] == [None, None]
    assert trace.device_ns(trace.runs) == 5  # both together are known
    trace = _trace(host, [_done(10, 15), _done(30, 37)])  # a device that does not tell runs apart
    assert [trace.device_ns([run]) for run in trace.runs] == [None, None]
    assert trace.device_ns(trace.runs) == 12
    assert trace_events._module_of("<lambda>") == "jit__lambda"
    assert jax.jit(lambda x: x).lower(1.0).as_text().partition("@")[2].startswith("jit__lambda")


# torch.profiler


def test_torch_profiler_has_times_of_the_device() -> None:
    x = torch.randn(64, 64, device="jax", requires_grad=True)
    compiled = torch.compile(lambda x: x.sin() + 1, backend="isthmus")
    jitted = isthmus.jit(lambda x: x.cos())

    def work() -> None:
        (x @ x).relu().sum().backward()
        compiled(x.detach())
        jitted(x.detach())

    work()
    work()
    with torch.profiler.profile() as profiled, record_function("mine"):
        work()
    rows = {row.key: row for row in profiled.key_averages()}
    assert rows["aten::mm"].count == 3
    kernels = rows["aten.mm.default"].self_device_time_total
    assert rows["aten::mm"].self_device_time_total == pytest.approx(kernels)
    assert kernels > 0
    assert 0 < rows["aten::mm"].self_device_time_total < rows["mine"].cpu_time_total * 2
    assert rows["mine"].device_time_total > rows["mine"].self_device_time_total == 0
    assert [name for name in rows if name.startswith("jax: inference")]
    assert [name for name in rows if name.startswith("jax: test_torch_profiler_has")]
    assert not [name for name in rows if "#" in name]
    table = profiled.key_averages().table(sort_by="self_device_time_total")
    assert "Self JAX" in table
    assert "Self JAX time total" in table


def test_torch_profiler_times_a_decomposed_op_once() -> None:
    x = torch.randn(64, 64, device="jax")
    nested = torch.ops.aten.std_mean.correction
    nested(x, [0])
    with torch.profiler.profile() as profiled:
        nested(x, [0])
    device = [e for e in profiled.events() if e.device_type != torch.autograd.DeviceType.CPU]
    kernels = sum(kernel.duration for event in profiled.events() for kernel in event.kernels)
    assert kernels == pytest.approx(sum(event.time_range.elapsed_us() for event in device))
    assert kernels < profiled.profiler.self_cpu_time_total * 2


def test_torch_profiler_of_the_cpu_alone_waits_for_nothing() -> None:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert watching.watchers == []
        torch.ones(3, device="jax").sin()
    assert [event for event in profiled.events() if event.name == "aten::sin"]


def test_a_schedule_profiles_its_steps_alone() -> None:
    x = torch.ones(16, device="jax")
    x.sin()
    ready: list[int] = []

    def trace_ready(profiled: Any) -> None:
        ready.append(next(row.count for row in profiled.key_averages() if row.key == "aten::sin"))

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=trace_ready) as profiled:
        for _ in range(8):
            x.sin()
            profiled.step()
    assert ready == [2, 2]
