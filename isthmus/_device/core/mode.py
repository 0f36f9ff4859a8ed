"""Whether an op runs at once or is recorded, per thread; and why a recorded graph is about to run.

``_lazy`` records ops, but it sits above the device and cannot be imported here. It installs its functions in
``current`` instead (``_lazy/install.py``): ``recording_entry`` makes the recording twin of a kernel's entry, ``hold``
puts a node into a buffer, ``materialise`` runs the recorded graph.

A mode belongs to the thread that set it; a thread that set none has the process's ``default`` (``ISTHMUS_MODE``). While
a thread records, its backward passes run on it and not on autograd's threads, so that they are recorded with the rest:
``torch.autograd.set_multithreading_enabled`` is torch's switch for that, and it is per thread as well.

A read of a value may run a recorded graph, and ``isthmus.metrics`` reports why. The function that needs the value says
so, and ``_lazy/sync_reasons.py`` asks for it::

    with reason(".cpu() or .to()"):
        array = array_of(tensor)          # -> Buffer.value -> current.materialise(buffer) -> outermost_reason()

Reasons nest (``set_mode`` calls ``sync``), and the outermost one is reported: it is what the user called. A block must
therefore not run the user's code, whose own reads have reasons of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch


class Here(threading.local):
    """This thread's mode, and the reasons it is inside of."""

    def __init__(self) -> None:
        self.switch: Any = None  # torch's switch for threads of autograd, turned while this thread records
        self.lazy = False
        self.reasons: list[str] = []
        # A thread that is new starts in the process's mode; ``__init__`` of a ``threading.local`` runs per
        # thread.
        if current.default:
            current.lazy = True


def _unpadded(kernel: Any, inputs: list[Any], values: tuple[Any, ...]) -> tuple[list[Any], None]:
    """Leave plans as they are, until ``isthmus.modes`` is imported."""
    return inputs, None


class Mode:
    """The mode of each thread.

    An entry reads ``recording``, an attribute of one object, before it reads the thread's own flag: a thread-local
    costs more, and most processes never record.
    """

    __slots__ = (
        "_capture",
        "_recorder",
        "default",
        "finisher",
        "hold",
        "materialise",
        "recording",
        "recording_entry",
    )

    def __init__(self) -> None:
        self.default = False
        self.recording = False  # whether a thread was ever lazy
        self._capture: Any = None
        self._recorder = 0
        # materialise(buffer=None, because=""): run this thread's graph, or that of the thread that recorded ``buffer``,
        # and return what the buffer holds then.
        self.materialise: Callable[..., Any] = lambda buffer=None, because="": None
        self.recording_entry: Any = None
        # finisher(kernel, inputs, values): how to finish a plan where sizes may change (``_lazy/eager_ranges.py``).
        self.finisher: Any = _unpadded
        # Makes a node the contents of a buffer.
        self.hold: Callable[[Any, Any], None] = lambda buffer, node: None

    @property
    def lazy(self) -> bool:
        """Whether this thread records ops."""
        # ``recording`` first: it is a plain attribute, the thread-local behind ``here`` is not.
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
        """The recording of an isthmus.jit function that this thread makes, or None."""
        # A recording belongs to the thread that makes it; ops of other threads run as if there were none.
        return self._capture if self._capture is not None and self._recorder == get_ident() else None

    @capture.setter
    def capture(self, value: Any) -> None:
        self._capture, self._recorder = value, get_ident()


class reason:  # lower case, as it is used: ``with reason("print"):``
    """Says in the user's words why the code in this block may need the value of a recorded tensor."""

    __slots__ = ("depth", "words")

    def __init__(self, words: str) -> None:
        self.words = words

    def __enter__(self) -> None:
        # The depth and not a reference to the list item: inner blocks may leave words behind.
        self.depth = len(here.reasons)
        here.reasons.append(self.words)

    def __exit__(self, *_: object) -> None:
        # Cut rather than pop: an interrupt inside an inner ``__enter__`` may have left its words behind.
        del here.reasons[self.depth :]


def outermost_reason() -> str:
    """Return the words of the outermost ``reason`` block that this thread is in, "" where there is none."""
    return here.reasons[0] if here.reasons else ""


current = Mode()
here = Here()
