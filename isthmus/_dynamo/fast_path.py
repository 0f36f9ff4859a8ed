"""The shortest way into a program: a function written for calls like the last one, which leaves all others to another.

A call of a small program takes longer on its way through Python than in XLA; every frame and list on the way counts.
``x + 1`` compiled takes 9.9 us of thread time by the function written here and 13.0 us without (least of 40 rounds in
turn, of which about 7 are Dynamo's). For two arguments and one result it is::

    def call(a0, a1):
        if (mode.recording and here.lazy) or watchers or not alike(a0, a1):
            return slow(a0, a1)
        b0 = a0.untyped_storage()._buffer; b1 = a1.untyped_storage()._buffer
        if b0.signature is not s0 or a0.storage_offset() or b1.signature is not s1 or a1.storage_offset():
            return slow(a0, a1)
        try:
            with forgetting():
                found = run(b0.held, b1.held, none)
        except Exception:  # another thread was rewriting an argument, or there was no memory
            return slow(a0, a1)
        return (m0(found[0]), )
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isthmus._device.core import mode
from isthmus._dynamo.program import LastCall
from isthmus._dynamo.running import Run
from isthmus._runtime import watching
from isthmus._runtime.private import forgetting_callers

Call = Callable[..., Any]
# Of more arguments the loops of the long way cost less than a line for each.
_MOST = 16


def quick(like: LastCall, slow: Call) -> Call:
    """Return a function that runs calls like one that was made, and calls ``slow`` with the arguments of others."""
    run = like.run
    if not isinstance(run, Run):
        return slow
    makers, count = run.specialization.returns.makers(run.shardings), len(like.signatures)
    if not run.pure or makers is None or any(like.moved) or not 0 < count <= _MOST:
        return slow
    scope: dict[str, Any] = {
        "here": mode.here,
        "mode": mode.current,
        "watchers": watching.watchers,
        "alike": like.alike,
        "slow": slow,
        "forgetting": forgetting_callers,
        "run": run.program.call,
        "none": run.program.nothing_failed,
        **{f"s{n}": signature for n, signature in enumerate(like.signatures)},
        **{f"m{n}": make for n, make in enumerate(makers)},
    }
    exec(compile(_source(count, len(makers)), "<isthmus fast path>", "exec"), scope)
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
    if (mode.recording and here.lazy) or watchers or not alike({args}):
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
