"""``isthmus.profile``: a trace of which program ran when, from which line, and what the device did meanwhile.

Two records are put together. While the block runs, every program that a mode runs (``watching.py``) is an annotation of
JAX's profiler with its name, mode and line; JAX's profiler itself notes when programs are launched and what the device
executes. At the end its file is read (``jax.profiler.ProfileData``), and ``trace_events.py`` makes the events of a
Chrome trace of it, which Perfetto opens.

What took how long on the device is known by program, since XLA's events name the module they belong to. Which *run* of
a program an execution belongs to is not said: the n-th launch of a name is its n-th execution, where there are as many
of one as of the other. Otherwise the device's time of these runs is unknown, and ``device_ms`` is None.

JAX has one profiler per process, so a second block inside the first, or inside ``jax.profiler.trace``, raises JAX's
RuntimeError.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from isthmus._device.torch_glue.torch_jax import synchronize
from isthmus._runtime import trace_events, watching
from isthmus._runtime.user_frames import caller_line


@dataclass(frozen=True)
class ProgramTimes:
    """What one program took, of all runs from one line of code.

    Arguments:
        name: an op ("aten.mm.default"), a graph of ``torch.compile``, a function of ``isthmus.jit``, or how many ops of
            lazy mode.
        mode: "eager", "lazy", "isthmus.jit" or "torch.compile".
        line: the user's file and line that ran it; in backward, the line that called ``backward()``.
        runs: how often it ran.
        host_ms: milliseconds of this thread until the call returned, which does not wait for the device.
        device_ms: milliseconds from the first to the last thing the device did for it; None where that is not known.
    """

    name: str
    mode: str
    line: str
    runs: int
    host_ms: float
    device_ms: float | None


class Profile:
    """What ``isthmus.profile`` found; empty until its block has ended."""

    def __init__(self) -> None:
        self.programs: list[ProgramTimes] = []
        self._events: list[dict[str, Any]] = []

    def export(self, path: str | Path) -> None:
        """Write the trace as Chrome's JSON, compressed where the name ends in .gz; Perfetto opens it."""
        text = json.dumps({"displayTimeUnit": "ms", "traceEvents": self._events})
        data = text.encode()
        Path(path).write_bytes(gzip.compress(data) if str(path).endswith(".gz") else data)

    def __str__(self) -> str:
        if not self.programs:
            return "no program ran"
        rows = [("device ms", "host ms", "runs", "mode", "program", "line")]
        for each in self.programs:
            device = "unknown" if each.device_ms is None else f"{each.device_ms:.3f}"
            rows.append(
                (device, f"{each.host_ms:.3f}", f"{each.runs:,}", each.mode, each.name, each.line or "-")
            )
        widths = [max(len(row[at]) for row in rows) for at in range(6)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if at < 3 else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


@contextmanager
def profile(path: str | Path | None = None) -> Iterator[Profile]:
    """Trace the programs that run in the block, with the lines that ran them, and what the device did.

    The trace opens in https://ui.perfetto.dev and in chrome://tracing. It has a row of program runs for each thread,
    each run with its mode, its line and its time on the device; below, the work of JAX's runtime and a row for each
    stream or thread of the device. Ranges of ``torch.jax.nvtx`` and ``jax.profiler.TraceAnnotation`` are among the
    program runs. Run the code once before the block, so that compilations are not what you look at.

    Arguments:
        path: where the trace is written when the block ends, compressed where the name ends in ``.gz``; None writes
            nothing.

    Returns:
        A context manager of a profile: ``print`` shows its table of programs, ``programs`` has the rows, and
        ``export(path)`` writes the trace.

    Example:
        >>> import torch, isthmus
        >>> x = torch.ones(64, 64, device="jax")
        >>> with isthmus.profile() as profiled:
        ...     y = (x @ x).relu()
        >>> sorted((one.name, one.mode, one.runs) for one in profiled.programs)
        [('aten.mm.default', 'eager', 1), ('aten.relu.default', 'eager', 1)]
    """
    profiled = Profile()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call would be an event
    with tempfile.TemporaryDirectory(prefix="isthmus-profile-") as folder:
        synchronize()  # what began before the block is no part of it
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            watching.add(_annotate)
            yield profiled
        finally:
            watching.remove(_annotate)
            try:
                synchronize()
            finally:
                jax.profiler.stop_trace()
        (file,) = Path(folder).rglob("*.xplane.pb")
        trace = trace_events.Trace(jax.profiler.ProfileData.from_file(str(file)))
    profiled.programs, profiled._events = _table(trace), list(trace.events)
    if path is not None:
        profiled.export(path)


def _annotate(mode: str, name: str, call: watching.Call) -> Any:
    stats = {trace_events.MODE: mode, trace_events.LINE: caller_line()}
    with jax.profiler.TraceAnnotation(name, **stats):
        return call()


def _table(trace: trace_events.Trace) -> list[ProgramTimes]:
    """Return the runs by program and line, those first that took the device longest."""
    groups: dict[tuple[str, str, str], list[trace_events.Run]] = {}
    for run in trace.runs:
        groups.setdefault((run.name, run.mode, run.line), []).append(run)
    rows = []
    for key, group in groups.items():
        device = trace.device_ns(group)
        host = sum(run.end - run.start for run in group) / 1e6
        rows.append(ProgramTimes(*key, len(group), host, None if device is None else device / 1e6))
    return sorted(rows, key=lambda row: (-(row.device_ms or 0.0), -row.host_ms))
