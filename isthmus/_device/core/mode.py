"""How ops run: at once, or recorded by ``_lazy``, which sits above the device and hands its recorder in here.

A mode belongs to the thread that set it; a thread that set none has the process's ``default`` (``ISTHMUS_MODE``). While
a thread records, its backward passes run on it and not on autograd's threads, so that they are recorded with the rest:
``torch.autograd.set_multithreading_enabled`` is torch's switch for that, and is the thread's own as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch


class Here(threading.local):
    """What this thread does with ops."""

    def __init__(self) -> None:
        self.switch: Any = None  # torch's switch for threads of autograd, turned while this thread records
        self.lazy = False
        if current.default:
            current.lazy = True


class Mode:
    """The mode of each thread; entries ask ``recording`` first, which costs less than to ask for the thread's own."""

    __slots__ = ("_capture", "_recorder", "default", "hold", "materialise", "recording", "recording_entry")

    def __init__(self) -> None:
        self.default = False
        self.recording = False  # whether a thread was ever lazy
        self._capture: Any = None
        self._recorder = 0
        # Runs what this thread has recorded, or what the thread did that recorded a buffer.
        self.materialise: Callable[..., None] = lambda buffer=None: None
        self.recording_entry: Any = None
        # Makes a node the contents of a buffer.
        self.hold: Callable[[Any, Any], None] = lambda buffer, node: None

    @property
    def lazy(self) -> bool:
        """Whether this thread records ops."""
        return self.recording and here.lazy

    @lazy.setter
    def lazy(self, value: bool) -> None:
        if value == here.lazy:
            return
        if value:
            self.recording = True
            # In force from here on, and until ``__exit__``.
            here.switch = torch.autograd.set_multithreading_enabled(False)
        else:
            here.switch.__exit__(None, None, None)
        here.lazy = value

    @property
    def capture(self) -> Any:
        """What isthmus.jit is recording a function into, if this thread runs the function."""
        return self._capture if self._capture is not None and self._recorder == get_ident() else None

    @capture.setter
    def capture(self, value: Any) -> None:
        self._capture, self._recorder = value, get_ident()


current = Mode()
here = Here()
