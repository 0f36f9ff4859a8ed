"""Why what was recorded runs: found on the Python stack, with the line of the user's code that asked for it."""

from __future__ import annotations

import sys
from types import FrameType

from isthmus._graph.graph import Graph
from isthmus._lazy import recompile_warnings
from isthmus._runtime import counters
from isthmus._runtime.user_frames import OWNERS, RECORDER, owner

# By file and function. A function calls others that are here as well: the one nearest to the user's code says why.
_WORDS = {
    ("fallback", "run"): "a fallback op",
    ("jit", "__call__"): "an isthmus.jit function",
    ("modes", "lazy"): "the end of a lazy block",
    ("modes", "set_mode"): "set_mode()",
    ("modes", "sync"): "sync()",
    ("storage_patches", "_clone"): "a copy of a storage",
    ("storage_patches", "__dlpack__"): "DLPack",
    ("storage_patches", "__dlpack_device__"): "DLPack",
    ("storage_patches", "_host_bytes"): "the bytes of a storage",
    ("storage_patches", "_tensor_str"): "print",
    ("program", "__call__"): "a compiled function",
    ("cpu_refusals", "attempt"): "an op tried on the CPU",
    ("sized", "entry"): "a size that depends on values",
    ("transfers", "copy_"): "copy_() to another device",
    ("transfers", "equal"): "torch.equal()",
    ("transfers", "local_scalar_dense"): ".item(), bool(), float() or int()",
    ("transfers", "to_copy"): ".cpu() or .to()",
}
# What records an op runs nothing, except where the graph has become too long.
_LIMIT = "the limit on graph size"
_READ = "a read"
_RUNNERS = ("sync_reasons", "programs")


def cause_and_line() -> tuple[str, str]:
    """Return what asked for values, in words, and the file and line of the user's code, "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    cause = ""
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        stem = OWNERS[name] if name in OWNERS else owner(name)
        if stem is None:
            return cause or _READ, f"{name}:{frame.f_lineno}"
        if stem and stem not in _RUNNERS and cause is not _LIMIT:
            recorder = stem is RECORDER and not cause
            cause = _LIMIT if recorder else _WORDS.get((stem, code.co_name), cause or _READ)
        frame = frame.f_back
    return cause or _READ, ""


def note(cause: str, line: str, graph: Graph, known: bool) -> None:
    """Count a run of what was recorded, its cause and line, and whether its program was ``known``."""
    counters.count_materialisation(cause, line, known)
    if known:
        recompile_warnings.calm(line)
    else:
        recompile_warnings.note(line, graph)
