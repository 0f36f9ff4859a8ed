"""How ops run: at once, or recorded by ``_lazy``, which sits above the device and hands its recorder in here."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any


class Mode:
    """The mode of the process: backward passes run on threads of torch's own, which must be in it too."""

    __slots__ = ("_capture", "_recorder", "hold", "lazy", "materialise", "recording_entry")

    def __init__(self) -> None:
        self.lazy = False
        self._capture: Any = None
        self._recorder = 0
        self.materialise: Callable[[], None] = lambda: None
        self.recording_entry: Any = None
        # Makes a node the contents of a buffer.
        self.hold: Callable[[Any, Any], None] = lambda buffer, node: None

    @property
    def capture(self) -> Any:
        """What isthmus.jit is recording a function into, if this thread runs the function."""
        return self._capture if self._capture is not None and self._recorder == get_ident() else None

    @capture.setter
    def capture(self, value: Any) -> None:
        self._capture, self._recorder = value, get_ident()


current = Mode()
