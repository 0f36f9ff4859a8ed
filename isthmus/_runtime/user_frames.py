"""Lines of the user's code: the innermost frame whose file is neither ours nor a library's under us."""

from __future__ import annotations

import sys
import sysconfig
import warnings
from pathlib import Path
from types import FrameType

import jax
import torch

_PACKAGE = str(Path(__file__).parent.parent) + "/"
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) + "/" for module in (torch, jax))
_STDLIB = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib")})
_INSTALLED = ("site-packages/", "dist-packages/")
_GENERATED = ("<isthmus ", "<frozen ", "<eval_with_key>")

OWNERS: dict[str, str | None] = {}
"""Whose files are, by name: None for the user's, "isthmus" for ours, "library" for those of others."""


def user_line() -> str:
    """Return the file and line of the user's code that is running, or "" on a thread that has none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if (OWNERS[name] if name in OWNERS else owner(name)) is None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def warn_user(category: type[Warning], text: str) -> None:
    """Warn of the line of the user's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if (OWNERS[name] if name in OWNERS else owner(name)) is None:
            break
        frame = frame.f_back
    if frame is None:
        warnings.warn(text, category, stacklevel=2)
        return
    scope = frame.f_globals
    registry = scope.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, category, name, frame.f_lineno, scope.get("__name__"), registry)


def owner(name: str) -> str | None:
    """Return what a file is: see ``OWNERS``."""
    if name.startswith(_PACKAGE):
        found: str | None = "isthmus"
    elif name.startswith((*_LIBRARIES, *_GENERATED)):
        found = "library"
    elif name.startswith(_STDLIB) and not any(part in name for part in _INSTALLED):
        found = "library"  # contextlib, copy and threading call us for somebody
    else:
        found = None
    OWNERS[name] = found
    return found
