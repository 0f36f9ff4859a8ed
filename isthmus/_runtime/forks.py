"""Processes forked after JAX started: its threads are not there, so what waits for them waits for ever.

A forked child is told so by the first thing it does on the device, as torch tells it about CUDA. ``watch`` is called
when the device is loaded; what compiles, copies to or from the host, or looks for a compiled program, asks ``check``.
Programs that were compiled before the fork are hidden by ``on_fork``, so that running ops one by one asks nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

forked = False
on_fork: list[Callable[[], None]] = []
_watched = False
# Executables must not be freed in a child: XLA's destructors wait for threads, too.
_kept: list[Any] = []


def watch() -> None:
    """Look out for forks from now on."""
    global _watched
    if not _watched and hasattr(os, "register_at_fork"):  # Windows has no forks
        _watched = True
        os.register_at_fork(after_in_child=_mark)


def _mark() -> None:
    from isthmus._runtime import compiler

    global forked
    if not compiler.default_device.cache_info().currsize:
        return  # JAX was imported and not started: the child may start its own
    forked = True
    for hide in on_fork:
        hide()


def empty(programs: dict[Any, Any]) -> None:
    """Empty a dict of programs without freeing them."""
    _kept.append(dict(programs))
    programs.clear()


def check() -> None:
    """Raise in a process that was forked after JAX started."""
    if forked:
        raise RuntimeError(
            "Cannot use device 'jax' in a forked subprocess: JAX was started before the fork, and its threads are not "
            "here\n  to fix it    use multiprocessing_context='spawn' (or 'forkserver'), or tensors of the CPU here"
        )
