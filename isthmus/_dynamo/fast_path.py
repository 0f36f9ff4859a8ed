"""The shortest way into a program: a function written for calls like the last one, which leaves all others to another.

A call of a small program takes longer on its way through Python than in XLA; every frame and list on the way counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isthmus._device.core import mode
from isthmus._dynamo.program import Like
from isthmus._runtime.private import forgetting_callers

Call = Callable[..., Any]
# Of more arguments the loops of the long way cost less than a line for each.
_MOST = 16


def quick(like: Like, slow: Call) -> Call:
    """Return what runs calls like one that was made, and calls ``slow`` with the arguments of others."""
    run = like.run
    makers, count = run.specialization.returns.makers(), len(like.signatures)
    if not run.pure or makers is None or any(like.moved) or not 0 < count <= _MOST:
        return slow
    scope = {
        "here": mode.here,
        "mode": mode.current,
        "alike": like.alike,
        "slow": slow,
        "forgetting": forgetting_callers,
        "run": run.program.call,
        "none": run.program.nothing_failed,
        **{f"s{n}": signature for n, signature in enumerate(like.signatures)},
        **{f"m{n}": make for n, make in enumerate(makers)},
    }
    exec(_source(count, len(makers)), scope)
    return scope["call"]


def _source(count: int, results: int) -> str:
    places = range(count)
    args = ", ".join(f"a{n}" for n in places)
    buffers = "; ".join(f"b{n} = a{n}.untyped_storage()._buffer" for n in places)
    differs = " or ".join(f"b{n}.signature is not s{n} or a{n}.storage_offset()" for n in places)
    held = ", ".join(f"b{n}.held" for n in places)
    made = "".join(f"m{n}(found[{n}]), " for n in range(results))
    return f"""
def call({args}):
    if (mode.recording and here.lazy) or not alike({args}):
        return slow({args})
    {buffers}
    if {differs}:
        return slow({args})
    try:
        with forgetting():
            found = run({held}, none)
    except Exception:  # another thread was rewriting an argument, or there was no memory
        return slow({args})
    return ({made})
"""
