"""Processes forked after JAX started: JAX's threads are not in the child, so whatever waits for them never returns.

The first use of the device in a forked child raises, as torch does for CUDA. ``watch`` is called when the device is
loaded. Every function that compiles, copies to or from the host, or looks up a compiled program calls ``check``. An
eager op with a plan calls no such function: its lookup must stay one dict access. So the caches of plans register in
``on_fork`` and are emptied in the child, where the next call then misses and reaches ``check``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

forked = False
on_fork: list[Callable[[], None]] = []
_watched = False
# Executables must not be freed in a child: their destructors wait for XLA's threads too.
_never_freed: list[Any] = []


def watch() -> None:
    """Mark forked children from now on."""
    global _watched
    if not _watched and hasattr(os, "register_at_fork"):  # Windows has no forks
        _watched = True
        os.register_at_fork(after_in_child=_mark)


def _mark() -> None:
    from isthmus._runtime import compiler

    global forked
    # Asked through the cache, so that asking does not start JAX.
    if not compiler.default_device.cache_info().currsize:
        return  # JAX was imported and not started: the child may start its own
    forked = True
    for hide in on_fork:
        hide()


def empty(programs: dict[Any, Any]) -> None:
    """Empty a dict of programs without freeing them."""
    _never_freed.append(dict(programs))
    programs.clear()


def check() -> None:
    """Raise in a process that was forked after JAX started."""
    if forked:
        raise RuntimeError(
            "Cannot use device 'jax' in a forked subprocess: JAX was started before the fork, and its threads are not "
            "here\n  to fix it    use multiprocessing_context='spawn' (or 'forkserver'), or tensors of the CPU here"
        )
