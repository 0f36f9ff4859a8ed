"""Lines of the user's code: the innermost frame that is neither ours nor torch's nor JAX's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import jax
import torch

import isthmus

_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) + "/" for module in (isthmus, torch, jax))
_users: dict[CodeType, bool] = {}


def user_line() -> str:
    """Return the file and line of the user's code that is running, or "" on a thread that has none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_users(code: CodeType) -> bool:
    known = _users.get(code)
    if known is None:
        name = code.co_filename
        known = _users[code] = not name.startswith((*_LIBRARIES, "<isthmus ", "<frozen "))
    return known
