"""Why a recorded graph ran, and which line of the user's code asked for it: what ``isthmus.metrics`` reports.

The reason is stated by the code that needs a value, in a ``with mode.reason("...")`` block (``_device/core/mode.py``);
the line is that of the innermost frame of the user's.
"""

from __future__ import annotations

from isthmus._device.core import mode
from isthmus._graph.graph import Graph
from isthmus._lazy import recompile_warnings
from isthmus._runtime import counters
from isthmus._runtime.user_frames import user_line

# A value is read where no block says why: by code of the user's that holds a buffer, or by a rare path of ours.
_READ = "a read"


def cause_and_line(because: str = "") -> tuple[str, str]:
    """Return why a graph runs, ``because`` if that is given, and the user's file and line, "" if there is none."""
    return because or mode.outermost_reason() or _READ, user_line()


def note(cause: str, line: str, graph: Graph, known: bool, refusal: str = "") -> None:
    """Count a run of a recorded graph, its cause and line, and whether its program was ``known``.

    ``refusal`` says what could not be padded where a program for a range of sizes would have served.
    """
    counters.count_materialisation(cause, line, known)
    if known:
        recompile_warnings.reset(line)
    else:
        recompile_warnings.note(line, graph, refusal)
