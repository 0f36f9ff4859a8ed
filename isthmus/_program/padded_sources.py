"""Programs for ranges of sizes on the buffers of tensors: what they read, and which arrays they may overwrite.

The counterpart of ``runner.py`` for ``RangedProgram``: a source is a ``Buffer`` or an array, one for each slot of the
program. Padded contents (``Slack``) are taken as they are. ``torch.compile`` (``_dynamo/ranged.py``) and
``isthmus.jit`` (``_lazy/replay.py``) run their programs here; lazy mode's arrays are those of its trace.

Arguments belong to the caller, so only those that are written and that nothing else holds are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from sys import getrefcount
from typing import TypeVar, cast

import jax

from isthmus._device.core import donation, mode
from isthmus._device.core.buffer import Buffer
from isthmus._device.core.resident_state import Residence
from isthmus._device.core.slack import Slack
from isthmus._graph.arguments import Value
from isthmus._graph.nodes import Node
from isthmus._graph.size_templates import Ints
from isthmus._program.ranged_program import Given, RangedProgram

Array = jax.Array
T = TypeVar("T")
Held = Array | Slack
Source = Buffer | Held
# Arrays of written arguments that die: the buffer holds them, and the function that counts.
_DYING = donation.OWNED - 1


def run(
    program: RangedProgram,
    sizes: Ints,
    sources: Sequence[Source],
    written: Set[int],
    rest: Sequence[Value],
    commit: Callable[[list[Held], Sequence[Array]], T],
    residence: Residence | None = None,
) -> T:
    """Run a program on a source for each slot; ``written`` are the slots of buffers that ``commit`` gives new contents.

    Other arguments are those of ``RangedProgram.run``.
    """
    while True:
        # Before the lock is taken: a buffer may have been recorded by another thread, whose trace is then run.
        _wait(sources)
        with donation.lock:
            found = _taken(sources, written)
            # Recorded since then: a thread that records waits for this lock, so it must not be waited for here.
            kinds: set[type] = set(map(type, found.arrays))
            if Node not in kinds:
                return program.run(sizes, found, rest, commit, residence)


def given(sources: Sequence[Source]) -> Given:
    """Return the arrays of these sources, padded ones as they are; none may be overwritten."""
    _wait(sources)
    return _taken(sources, frozenset())


def _wait(sources: Sequence[Source]) -> None:
    for source in sources:
        if isinstance(source, Buffer) and not _is_padded(source):
            _ = source.value  # puts the array into the buffer


def _taken(sources: Sequence[Source], written: Set[int]) -> Given:
    """Return what these sources hold, padded arrays as they are, and which of them may be overwritten."""
    dying = frozenset(n for n in written if _is_dying(sources, n))  # before a list of them holds them too
    return Given([_held(source) for source in sources], dying)


def _is_dying(sources: Sequence[Source], n: int) -> bool:
    """Return whether only one buffer, given once, holds its array, or the slack around it."""
    buffer = sources[n]
    # Other threads could read it after the count; an array given twice has two readers anyway.
    if donation.threaded() or sum([source is buffer for source in sources]) > 1:
        return False
    assert isinstance(buffer, Buffer)
    if getrefcount(buffer.held) != _DYING:
        return False
    return type(buffer.held) is not Slack or donation.is_unshared(buffer.held)


def _held(source: Source) -> Held:
    if not isinstance(source, Buffer):
        return source
    # A node, if another thread has recorded one; ``run`` waits then.
    return cast(Held, source.held if _is_padded(source) else donation.settled(source))


def _is_padded(source: Buffer) -> bool:
    # A recording reads exact arrays: a replay finds them by their shapes.
    return type(source.held) is Slack and mode.current.capture is None
