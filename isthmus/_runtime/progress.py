"""A line on the terminal or in the notebook while a compilation takes long (``isthmus.config.progress``)."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from isthmus import config

_PATIENCE = 2.0  # seconds until the line is shown


@contextlib.contextmanager
def line(title: str) -> Iterator[None]:
    """Print on stderr that ``title`` is being compiled if that takes over two seconds, and in the end how long."""
    if not title or config.progress == "off" or not _is_watched():
        yield
        return
    started, shown = time.perf_counter(), threading.Event()

    # On the timer's thread: this one is inside the compiler.
    def show() -> None:
        shown.set()
        sys.stderr.write(f"isthmus: compiling {title} ...")
        sys.stderr.flush()

    timer = threading.Timer(_PATIENCE, show)
    timer.daemon = True
    timer.start()
    outcome = "stopped compiling"
    try:
        yield
        outcome = "compiled"
    finally:
        timer.cancel()
        timer.join()  # it may be writing right now
        if shown.is_set():
            sys.stderr.write(f"\risthmus: {outcome} {title} in {time.perf_counter() - started:.1f} s\n")


def _is_watched() -> bool:
    """Return whether a person sees stderr now: on a terminal, or below the cell of a notebook that runs."""
    # A kernel's stream is no terminal; it has one for each notebook, Colab included.
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
