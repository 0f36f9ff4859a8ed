"""How a process of a job ends, which matters to the others.

JAX's own ending waits for every process, for minutes, so that a process that ends by an exception would not be seen to
end. So it tells what happened, prints it and leaves without waiting: the launcher sees it, and the others find their
connection to it closed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax


@contextlib.contextmanager
def without_preemption_service() -> Iterator[None]:
    """Keep JAX from catching SIGTERM, by which torchrun ends the other processes where one has failed."""
    before = jax.config.jax_enable_preemption_service  # type: ignore[attr-defined]
    jax.config.update("jax_enable_preemption_service", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_preemption_service", before)


def watch(tell: Callable[[str], Any]) -> None:
    """Leave at once after an exception that ends this process, which ``tell`` gets in words before.

    Call it after JAX's processes were joined: what is registered last runs first, and JAX's ending waits.
    """
    theirs, failed = sys.excepthook, threading.Event()

    def note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        failed.set()
        with contextlib.suppress(Exception):  # what went wrong must be printed, whatever becomes of this
            tell(f"{kind.__name__}: {error}")
        theirs(kind, error, trace)

    def leave() -> None:
        if failed.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    sys.excepthook = note
    atexit.register(leave)
