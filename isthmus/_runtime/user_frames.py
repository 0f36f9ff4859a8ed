"""Lines of the user's code: which frame on the stack is the user's, and one record for a file and a line.

An error or a warning should name the user's line, not the line of ours that noticed. The stack below it holds frames of
this package, of torch and JAX, of the standard library (``contextlib``, ``copy`` and ``threading`` call us on behalf of
the user) and of generated code; the user's line is the innermost frame that is none of these.

``user_line`` and ``warn_user`` walk the running stack. ``user_place`` reads a stack that torch wrote down while it
traced, for ``isthmus.explain``. ``_lazy/captured_objects.py`` walks by itself with ``OWNERS`` and ``owner``, since
it reads more than the line. Lowerings are filed with a ``Place`` too (``_ops/registry.py``), for ``isthmus where``.
"""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import jax
import torch

from isthmus import _caches

_ROOT = Path(__file__).parent.parent.parent
_PACKAGE = str(Path(__file__).parent.parent) + "/"
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) + "/" for module in (torch, jax))
_STDLIB = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib")})
_INSTALLED = ("site-packages/", "dist-packages/")
_GENERATED = ("<isthmus ", "<frozen ", "<eval_with_key>")

# A plain dict, emptied when it is full: lazy mode may read it for every frame of every op. FX numbers the files of the
# code it generates ("<eval_with_key>.17"), so names never stop coming.
_LIMIT = 4096
OWNERS: dict[str, str | None] = {}
"""Whose files are, by name: None for the user's, "isthmus" for ours, "library" for those of others."""
_caches.register("owners of source files", _LIMIT, lambda: len(OWNERS), lambda: OWNERS.clear())


@dataclass(frozen=True)
class Place:
    """A line of source code.

    >>> print(Place("/home/me/train.py", 12))
    /home/me/train.py:12
    """

    file: str
    line: int

    def __str__(self) -> str:
        file = Path(self.file)
        # A file of this package is named from its root on, one below the working directory from there.
        base = _ROOT if self.file.startswith(_PACKAGE) else Path.cwd()
        return f"{file.relative_to(base) if file.is_relative_to(base) else file}:{self.line}"

    @property
    def path(self) -> Path:
        """The file as a path."""
        return Path(self.file)

    @property
    def source(self) -> str:
        """The text of the line; empty where there is no such file."""
        return linecache.getline(self.file, self.line).strip()


def user_line() -> str:
    """Return the file and line of the user's code that is running, or "" on a thread that has none."""
    frame = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def caller_line() -> str:
    """Return the user's line as a person reads it; on autograd's thread, the line that waits for ``backward()``."""
    frame = _user_frame()
    if frame is None:
        # Another thread waits in torch's engine while autograd's thread runs: its line is what the user called.
        waiting = [each for each in sys._current_frames().values() if _is_in_backward(each)]
        frame = _user_frame(waiting[0]) if len(waiting) == 1 else None
    return str(Place(frame.f_code.co_filename, frame.f_lineno)) if frame is not None else ""


def _is_in_backward(frame: FrameType | None) -> bool:
    # torch/autograd/graph.py calls its engine in this function alone and is in it until backward ends. A wrong guess
    # costs a line in a report, so the name may be read from the stack; torch tells Python in no other way.
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False


def user_place(stack: Sequence[tuple[str, int]]) -> Place | None:
    """Return the user's line in a stack of (file, line), outermost first; a library's where the user has none."""
    # This package's frames are never the user's, also where it is installed from a checkout.
    others = [frame for frame in stack if not frame[0].startswith(_PACKAGE)]
    users = [frame for frame in others if owner(frame[0]) is None]
    innermost = (users or others)[-1:]
    return Place(*innermost[0]) if innermost else None


def place_in(trace: str) -> Place | None:
    """Return the user's line in a stack trace as Python prints it."""
    frames = re.findall(r'File "(.+)", line (\d+)', trace)
    return user_place([(file, int(line)) for file, line in frames])


def warn_user(category: type[Warning], text: str) -> None:
    """Warn with the user's line, as if that line had called ``warnings.warn``."""
    frame = _user_frame()
    if frame is None:
        warnings.warn(text, category, stacklevel=2)
        return
    scope = frame.f_globals
    # The registry of the user's module: there Python notes which warnings were shown for which line.
    registry = scope.setdefault("__warningregistry__", {})
    name, line = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, category, name, line, scope.get("__name__"), registry)


def _user_frame(frame: FrameType | None = None) -> FrameType | None:
    """Return the innermost frame of the user's code: on this thread, or from a frame on."""
    # Two frames up: this function's caller is one of ours.
    frame = frame or sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        # Read from the dict first: this runs for every frame of every recorded op.
        if (OWNERS[name] if name in OWNERS else owner(name)) is None:
            return frame
        frame = frame.f_back
    return None


def owner(name: str) -> str | None:
    """Return whose a file is (see ``OWNERS``), and note it there."""
    whose: str | None
    if name.startswith(_PACKAGE):
        whose = "isthmus"
    elif name.startswith((*_LIBRARIES, *_GENERATED)):
        whose = "library"
    elif name.startswith(_STDLIB) and not any(part in name for part in _INSTALLED):
        whose = "library"  # site-packages lies below the standard library's folder and is not part of it
    else:
        whose = None
    if len(OWNERS) >= _LIMIT:
        OWNERS.clear()
    OWNERS[name] = whose
    return whose
