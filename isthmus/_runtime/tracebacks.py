"""Tracebacks that show the user's lines: frames of this package, and of libraries below them, are left out.

An op that torch refuses goes through some ten functions here before the error is raised, and of those a user can use
none; in a notebook each takes ten lines of the screen. So where an error leaves this package (the entry of an op,
``isthmus.jit``, a run of recorded ops, a compiled graph), ``shorten`` takes those frames out of its traceback. Frames
of the user's stay, also those in between (the function that ``isthmus.jit`` records). No hook of Python's or IPython's
is set. ``isthmus.config.tracebacks = "full"`` leaves all frames in, and a note at the error says so.

What is raised is the same exception, so ``except`` and debuggers meet what they would; a debugger that starts from it
(``%debug``) starts in the user's frame.
"""

from __future__ import annotations

from types import TracebackType

from isthmus import config
from isthmus._runtime.user_frames import owner

NOTE = 'frames of Isthmus are left out of this traceback; isthmus.config.tracebacks = "full" shows them'
_CHAINED = 8
"""How many causes of an error are shortened too."""


def shorten(error: Exception) -> None:
    """Leave frames of ours out of an error's traceback; called where it leaves this package, before ``raise``."""
    if config.current.tracebacks == "full":
        return
    dropped, each = 0, error
    # Causes are printed as well, and have as many frames of ours.
    for _ in range(_CHAINED):
        dropped += _shorten(each)
        following = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        if not isinstance(following, Exception):
            break
        each = following
    if dropped > 1 and NOTE not in getattr(error, "__notes__", ()):  # one is the caller's own frame
        error.add_note(NOTE)


def _shorten(error: BaseException) -> int:
    """Leave the user's frames alone in a traceback; return how many frames were dropped."""
    users: list[TracebackType] = []
    dropped, tb = 0, error.__traceback__
    while tb is not None:
        if owner(tb.tb_frame.f_code.co_filename) is None:
            users.append(tb)
        else:
            dropped += 1
        tb = tb.tb_next
    new: TracebackType | None = None
    # Built from the innermost outwards, as each frame refers to the next.
    for tb in reversed(users):
        new = TracebackType(new, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    error.__traceback__ = new
    return dropped
