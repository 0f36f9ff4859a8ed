"""Faults on purpose: the n-th compilation, run, transfer or line of this package fails."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import jax

import isthmus
from isthmus._device.core import host_tensors as device_hosts
from isthmus._runtime import compiler, host_arrays, private

_PACKAGE = str(Path(isthmus.__file__).parent)


def out_of_memory() -> Exception:
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.")


def internal() -> Exception:
    return jax.errors.JaxRuntimeError("INTERNAL: the compiler died of something else")


class Injector:
    """Counts events of one kind and raises at the n-th; with ``at=None`` it only counts."""

    def __init__(self, kind: str, error: Callable[[], BaseException], at: int | None, times: int = 1) -> None:
        self.kind, self.error, self.at, self.times = kind, error, at, times
        self.count = self.raised = 0
        self.active = False

    def event(self) -> None:
        """Count one event, and raise if it is the one."""
        if not self.active:
            return
        self.count += 1
        if self.at is not None and self.at < self.count <= self.at + self.times:
            self.raised += 1
            raise self.error()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Injector]:
        """Inject inside this block."""
        self.active = True
        try:
            with getattr(self, f"_{self.kind}")():
                yield self
        finally:
            self.active = False

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.event()
            return function(*args, **kwargs)

        return call

    def _compile(self) -> Any:
        return mock.patch.object(compiler, "build", self._before(compiler.build))

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[None]:
        with (
            mock.patch.object(device_hosts, "from_numpy", self._before(host_arrays.from_numpy)),
            mock.patch.object(device_hosts, "to_numpy", self._before(host_arrays.to_numpy)),
        ):
            yield

    def _run(self) -> Any:
        return contextlib.nullcontext()  # ``watching_runs`` has wrapped every program

    @contextlib.contextmanager
    def _line(self) -> Iterator[None]:
        """Raise before a line of this package is run, as a signal handler may: it runs between two bytecodes."""

        def local(frame: FrameType, event: str, _: Any) -> Any:
            # Where no signal handler can be: at the line of a ``with``, which a trace function is called for once more
            # before its lock is released; at a ``try``, which is no instruction that could be left; and before a
            # release that follows no call.
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
            if event == "line" and not line.startswith(("with ", "try:")) and "lock.release()" not in line:
                self.event()
            return local

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            return local if frame.f_code.co_filename.startswith((_PACKAGE, "<isthmus")) else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)


@contextlib.contextmanager
def watching_runs() -> Iterator[list[Injector]]:
    """Have every program compiled in this block ask the injectors in the list before it runs."""
    injectors: list[Injector] = []
    fast_call = private.fast_call

    def watched(compiled: Any) -> Any:
        call = fast_call(compiled)

        def run(*inputs: Any) -> Any:
            for injector in injectors:
                injector.event()
            return call(*inputs)

        return run

    with mock.patch.object(private, "fast_call", watched):
        yield injectors
