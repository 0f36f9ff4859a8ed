"""Work that can wait, on one thread beside the program: compiling what a later call may use.

``_program/ranges.py`` compiles the exact program of a size that comes often while the program for a range goes on
serving it::

    task = Task(compile_it)         # starts, or waits for the tasks before it
    program = task.result()         # None until it is there, and for good where it failed

XLA compiles without the interpreter lock, and ``compiler.build`` does not hold its own lock meanwhile where
``is_background`` says so. The thread ends when there is no more to do: while a second thread exists, writes are more
careful (``donation.threaded``). A process that exits waits for the task at hand and drops the others.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from isthmus._runtime import counters

T = TypeVar("T")
# For starting and ending the thread; tasks themselves run without it.
_lock = threading.Lock()
_waiting: queue.SimpleQueue[Task[Any]] = queue.SimpleQueue()
_here = threading.local()
_thread: threading.Thread | None = None


class Task(Generic[T]):
    """A function that runs in the background, once."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._result: T | None = None
        self._done = threading.Event()
        _waiting.put(self)
        _start()

    def result(self) -> T | None:
        """Return the function's result; None until it is there, or where the function failed."""
        return self._result

    def run(self) -> None:
        """Run the function, whose failure costs no more than its result: a program that is there goes on."""
        # Let go of the function first: it may hold a graph, and the task may live as long as its program.
        function, self._function = self._function, None
        try:
            # Once the main thread is gone the interpreter shuts down, and JAX with it.
            if function is not None and threading.main_thread().is_alive():
                self._result = function()
                counters.count("compiled in the background")
        except Exception as error:
            counters.count("background failures")
            self.error = error
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Wait until the function has run; return whether it has."""
        return self._done.wait(seconds)


def is_background() -> bool:
    """Return whether this thread runs a task."""
    return getattr(_here, "working", False)


def is_busy() -> bool:
    """Return whether a task runs or waits."""
    thread = _thread
    return thread is not None and thread.is_alive()


def _start() -> None:
    global _thread
    with _lock:
        if _thread is None or not _thread.is_alive():
            # No daemon: the interpreter would end it in the middle of XLA.
            _thread = threading.Thread(target=_work, name="isthmus compiles", daemon=False)
            _thread.start()


def _work() -> None:
    global _thread
    _here.working = True
    while True:
        with _lock:  # so that a task put now is seen, or starts another thread
            if _waiting.empty():
                _thread = None
                return
        _waiting.get().run()
