"""How ops run: at once, or recorded by ``_lazy``, which sits above the device and hands its recorder in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Mode:
    """The mode of the process: backward passes run on threads of torch's own, which must be in it too."""

    __slots__ = ("capture", "lazy", "materialise", "recording_entry")

    def __init__(self) -> None:
        self.lazy = False
        self.capture: Any = None  # what isthmus.jit is recording a function into
        self.materialise: Callable[[], None] = lambda: None
        self.recording_entry: Any = None


current = Mode()
