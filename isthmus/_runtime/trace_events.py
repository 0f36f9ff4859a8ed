"""From a file of JAX's profiler to program runs and the events of a Chrome trace.

The file has planes (the host, each device) with lines (threads, streams) of events: a name, a start, a duration, stats.
On the CPU, whose device is threads of the host, all events are on the host's plane. Three kinds matter here::

    aten.mm.default              mode=eager line=train.py:12                our annotation of a program's run
      PjitFunction(jit(aten.mm.default))                                    JAX launches a program of that name
    dot.3                        hlo_module=jit_aten.mm.default run_id=17   the device executes part of it

A launch inside of an annotation, on the same line, belongs to that run. What the device executes names its program
(``hlo_module``) and, on the CPU, which execution of it (``run_id``), but not the launch. The n-th launch of a program
is taken for its n-th execution, where there are as many of one as of the other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

MODE, LINE = "mode", "line"
"""The stats that tell our annotations from others."""
Event = dict[str, Any]
_LAUNCH = re.compile(r"PjitFunction\((?:jit\()?(.+?)\)+")
# Events of the profiler itself, and those that say what others say too.
_NOISE = ("ThreadpoolListener::", "end: ", "PythonRefManager::", "PjitFunction(", "ParseArguments")
_HOST, _DEVICE = 1, 2


@dataclass
class Launch:
    """A program that was launched; ``device_ns`` is how long the device took to execute it, None if not known."""

    module: str
    start: float
    end: float
    device_ns: float | None = None
    run: Run | None = None


@dataclass
class Run:
    """A run of a program by a mode, which launches one or more programs; times are nanoseconds of the trace's clock."""

    name: str
    mode: str
    line: str
    start: float
    end: float
    thread: int
    launches: list[Launch] = field(default_factory=list)


@dataclass
class _Execution:
    """What the device did for one run of a module, or for all of them where it does not tell them apart."""

    module: str
    told_apart: bool
    spans: list[tuple[int, str, float, float]] = field(default_factory=list)
    """The number of the line, the name of the operation, its start and its end."""
    launch: Launch | None = None

    @property
    def start(self) -> float:
        return min(start for _, _, start, _ in self.spans)

    @property
    def nanoseconds(self) -> float:
        """From first to last where these are one run; otherwise all operations together."""
        if self.told_apart:
            return max(end for *_, end in self.spans) - self.start
        return sum(end - start for _, _, start, end in self.spans)


class Trace:
    """What a file of JAX's profiler says: ``runs``, and the ``events`` of a Chrome trace."""

    def __init__(self, data: jax.profiler.ProfileData) -> None:
        self.runs: list[Run] = []
        self._launches: dict[str, list[Launch]] = defaultdict(list)
        self._executions: dict[tuple[str, Any], _Execution] = {}
        self._slices: list[Event] = []
        self._threads: dict[tuple[int, int], str] = {}
        number = 0
        for plane in data.planes:
            for line in plane.lines:
                number += 1
                self._read(plane.name, line, number)
        self._by_module: dict[str, list[_Execution]] = defaultdict(list)
        for execution in self._executions.values():
            self._by_module[execution.module].append(execution)
        self._match()

    def _read(self, plane: str, line: Any, number: int) -> None:
        on_device = plane.startswith("/device:")
        # Planes of devices begin so; on the CPU everything is on the host's plane.
        runs, launches = [], []
        for event in line.events:
            stats = dict(event.stats)
            start, end = event.start_ns, event.start_ns + event.duration_ns
            launched = _LAUNCH.fullmatch(event.name)
            # An operation on the device: it names its program.
            if "hlo_module" in stats:
                module, run_id = stats["hlo_module"], stats.get("run_id")
                execution = self._executions.setdefault(
                    (module, run_id), _Execution(module, run_id is not None)
                )
                execution.spans.append((number, event.name, start, end))
                self._threads[_DEVICE, number] = line.name or plane
            # One of ours: an annotation of a run.
            elif MODE in stats and LINE in stats:
                runs.append(Run(event.name, stats[MODE], stats[LINE], start, end, number))
                self._threads[_HOST, number] = line.name
            elif launched is not None:
                launches.append(Launch(_module_of(launched[1]), start, end))
            elif event.duration_ns > 0 and not event.name.startswith(_NOISE):
                process = _DEVICE if on_device else _HOST
                self._threads[process, number] = line.name or plane
                shown = {key: str(value) for key, value in stats.items() if not key.startswith("_")}
                self._slices.append(_slice(process, number, event.name, start, end, shown))
        self.runs += runs
        # Outer runs before the inner ones that begin at the same time.
        runs.sort(key=lambda run: (run.start, -run.end))
        begun = iter([*runs, None])
        following, around = next(begun), list[Run]()
        for launch in _outermost(launches):
            self._launches[launch.module].append(launch)
            # A stack of the runs that a launch may be inside of: those that have begun and not yet ended.
            while following is not None and following.start <= launch.start:
                around.append(following)
                following = next(begun)
            while around and around[-1].end < launch.end:
                around.pop()
            if around:  # runs nest where an op is computed by others: the launch is the innermost one's
                launch.run = around[-1]
                launch.run.launches.append(launch)

    def _match(self) -> None:
        """Say which execution each launch is, where there are as many of both."""
        for module, launches in self._launches.items():
            executions = sorted(self._by_module.get(module, []), key=lambda one: one.start)
            # Otherwise it cannot be said which execution belongs to which launch.
            if len(executions) == len(launches) and all(one.told_apart for one in executions):
                pairs = zip(sorted(launches, key=lambda one: one.start), executions, strict=True)
                for launch, execution in pairs:
                    launch.device_ns, execution.launch = execution.nanoseconds, launch

    def device_ns(self, runs: Sequence[Run]) -> float | None:
        """Return how long the device was at these runs; None where their part of a program's time is not known."""
        total = 0.0
        launches = [launch for run in runs for launch in run.launches]
        for module in {launch.module for launch in launches}:
            mine = [launch for launch in launches if launch.module == module]
            if all(launch.device_ns is not None for launch in mine):
                total += sum(launch.device_ns or 0.0 for launch in mine)
            # All launches of this program are wanted, so the sum over its executions is right even if they are
            # not told apart.
            elif len(mine) == len(self._launches[module]):
                total += sum(one.nanoseconds for one in self._by_module.get(module, []))
            else:
                return None
        return total

    @property
    def events(self) -> Iterator[Event]:
        """The events of a Chrome trace: a row for each thread of the host, and for each of the device."""
        for process, name in ((_HOST, "programs, and JAX's runtime"), (_DEVICE, "the device")):
            yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        for (process, number), name in self._threads.items():
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": name}}
        for run in self.runs:
            times = [launch.device_ns for launch in run.launches]
            known = sum(time for time in times if time is not None) / 1e6 if None not in times else "unknown"
            about = {MODE: run.mode, LINE: run.line, "device ms": known}
            yield _slice(
                _HOST,
                run.thread,
                f"{run.name} ({run.line})" if run.line else run.name,
                run.start,
                run.end,
                about,
            )
        yield from self._slices
        for execution in self._executions.values():
            yield from _slices_of(execution)


def _module_of(function: str) -> str:
    """Return the name that JAX gives to the module of a function."""
    return "jit_" + re.sub(r"[^\w.]+", "_", function).rstrip("_")


def _outermost(launches: Iterable[Launch]) -> list[Launch]:
    """Return launches without those inside another of the same name: JAX notes each twice."""
    outermost: list[Launch] = []
    for launch in sorted(launches, key=lambda one: (one.start, -one.end)):
        if not (outermost and outermost[-1].module == launch.module and launch.end <= outermost[-1].end):
            outermost.append(launch)
    return outermost


def _slices_of(execution: _Execution) -> Iterator[Event]:
    """Return a slice for each operation of an execution and, around those on one line, one for the program."""
    run = execution.launch.run if execution.launch is not None else None
    about = {"program": execution.module} | ({LINE: run.line, MODE: run.mode} if run is not None else {})
    name = f"{run.name} ({run.line})" if run is not None else execution.module.removeprefix("jit_")
    if execution.told_apart:
        for number in sorted({span[0] for span in execution.spans}):
            on_line = [span for span in execution.spans if span[0] == number]
            start, end = min(span[2] for span in on_line), max(span[3] for span in on_line)
            yield _slice(_DEVICE, number, name, start, end, about)
    for number, operation, start, end in execution.spans:
        yield _slice(_DEVICE, number, operation, start, end, about)


def _slice(process: int, thread: int, name: str, start: float, end: float, args: dict[str, Any]) -> Event:
    # Chrome's unit is the microsecond.
    return {
        "ph": "X", "name": name, "pid": process, "tid": thread,
        "ts": start / 1e3, "dur": (end - start) / 1e3, "args": args,
    }  # fmt: skip
