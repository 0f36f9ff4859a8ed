"""The watchers of programs that run: ``isthmus.profile`` and ``torch.profiler`` while they are on, else none.

Each mode runs a program at one place, and asks there whether there are watchers::

    if watching.watchers:
        return watching.run("torch.compile", name, lambda: run(args, sources))
    return run(args, sources)

Eager ops do not ask, since that would cost every op: while there are watchers, ``dispatch`` gives the entry of each op
plans that are watched (``on_change``). So a process that profiles nothing pays nothing in eager mode, and the look at a
list for a program of the other modes.

A watcher is a function of the mode, the program's name and the call; it makes the call and returns its result, or lets
its exception pass. Watchers nest, the last one added outermost; they may be called on any thread, autograd's among
them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

Call = Callable[[], Any]
Watcher = Callable[[str, str, Call], Any]

watchers: list[Watcher] = []
on_change: list[Callable[[bool], None]] = []
"""Called with whether there are watchers, when that changes."""
_lock = threading.Lock()


def add(watcher: Watcher) -> None:
    """Let a watcher see every program from now on."""
    with _lock:
        watchers.append(watcher)
        if len(watchers) == 1:
            _tell(True)


def remove(watcher: Watcher) -> None:
    """Take a watcher away; once more does nothing."""
    with _lock:
        if watcher in watchers:
            watchers.remove(watcher)
            if not watchers:
                _tell(False)


def _tell(watched: bool) -> None:
    for change in on_change:
        change(watched)


def run(mode: str, name: str, call: Call) -> Any:
    """Make a call that runs a program, past all watchers."""
    # A copy: a watcher may remove itself while it runs.
    for watcher in tuple(watchers):
        call = partial(watcher, mode, name, call)
    return call()
