"""Donation: programs that overwrite the memory of their inputs, and what keeps the data safe meanwhile.

A write such as ``x.add_(1)`` runs a program that takes x's array and returns a new one. Where only x's buffer holds
that array it is *donated*: XLA puts the result into its memory, and the array is deleted. From then on, until the
result is bound to the buffer, the only copy of x is a value that this process has not stored yet. Eager plans
(``mutation.py``), lazy graphs, isthmus.jit and compiled graphs all run their programs through ``run``, which handles
the three things that could lose the value:

1. **An exception in between**: Ctrl-C, a signal handler or a debugger that raises. CPython runs signal handlers between
   bytecodes, after a call among others, so ``outputs = call(*inputs)`` may raise when the program has run and before
   ``outputs`` is set. ``run`` therefore lets an iterator make the call (unpacking has no such point after it), and
   whatever is raised afterwards, ``commit`` is done before it goes on.
2. **Another thread** that reads the array between the check of its reference count and the donation, or that writes to
   the same storage: one of two writes would be lost. While other threads exist, a thread that rewrites buffers holds
   ``lock`` and leaves a ``Rewriting`` in them *before* it counts references; a reader that finds one waits for the lock
   and reads again.
3. **A failure of the run**: XLA deletes donated arrays even if it then finds no memory to run in. Reading such a buffer
   raises an error that names the failure (``buffer.Lost``).

Whether an array may be overwritten is decided by its reference count: ``OWNED`` are the references of a buffer, of the
list of inputs and of the function that counts. It is measured at import, since it depends on the interpreter. A local
variable that holds the array while it is counted makes a donation silently a copy, so functions here take lists.
"""

from __future__ import annotations

import sys
import threading
from _thread import _count
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from typing import Any, TypeVar

from isthmus._device.core.host_tensors import copied
from isthmus._device.core.resharded import Resharded
from isthmus._device.core.slack import Slack
from isthmus._device.core.zeros import own_zeros
from isthmus._graph.nodes import Node
from isthmus._runtime import memory

T = TypeVar("T")
Array = Any
# How often a commit is begun again when something is raised inside it: each time is another Ctrl-C.
# A person does not press Ctrl-C sixteen times within a commit; a step that fails as often never will do.
_ATTEMPTS = 16

lock = threading.RLock()
"""Held while a program runs on its resident state, and by a thread that rewrites buffers beside other threads."""


def _measured() -> int:
    """Return ``sys.getrefcount`` of an array that one buffer and one list hold."""
    # Exactly what a call has: one reference in a buffer, one in the list of inputs, and that of the count.
    held = [object()]
    inputs = [held[0]]
    return sys.getrefcount(inputs[0])


OWNED = _measured()


# Not a function of ours: every op that writes asks.
threaded: Callable[[], int] = _count
"""Return how many Python threads the process has beside the main one.

Autograd's device threads do not count: they run while the thread that called backward waits for them.
"""


class Rewriting:
    """A buffer holds this while a program rewrites its array: the inputs of that program, and which of them it is.

    It has no reference to the array itself, whose count decides whether it is donated.
    """

    __slots__ = ("index", "inputs")

    def __init__(self, inputs: list[Array], index: int) -> None:
        self.inputs, self.index = inputs, index


class Resident:
    """A buffer holds this while its array stays with a program between runs (``resident_state.py``).

    ``residence.give_back()`` puts the arrays of that program back into all of their buffers.
    """

    __slots__ = ("residence",)

    def __init__(self, residence: Any) -> None:
        self.residence = residence


ELSEWHERE = frozenset({Rewriting, Resident})
"""Markers of arrays that a program has."""

MARKERS = frozenset({*ELSEWHERE, Resharded, Slack})
"""Types of what a buffer holds while its array is elsewhere, larger or split; no program takes them for an input.

An entry reads ``held`` and passes it on unseen, since a look at every input of every op would cost more than a failure
now and then: JAX raises a TypeError for a marker, the entry asks ``is_unready``, settles the buffers and runs again.
"""


def settled(buffer: Any) -> Array:
    """Return the array or node that a buffer holds, once any marker in it is gone."""
    # Under the lock: a thread that rewrites the buffer has it until the result is bound.
    with lock:
        while type(buffer.held) in MARKERS:
            held = buffer.held
            if type(held) is Rewriting:
                # No other thread has the lock, so either an interrupt left this behind, or a signal handler asks in
                # the thread that rewrites the buffer, which binds its result in any case.
                buffer.held = held.inputs[held.index]
            # Both have what is needed to make the exact array; no program works on it.
            elif type(held) is Slack or type(held) is Resharded:
                buffer.held = held.exact()
            else:
                # The array is with a program between its runs, which puts it back for all of its buffers at
                # once.
                held.residence.give_back()
                if buffer.held is held:
                    raise RuntimeError("the program that keeps this tensor's array has lost it")
        return buffer.held


def is_unready(inputs: Sequence[Any]) -> bool:
    """Return whether one of the inputs is no array: a node that another thread recorded, or a marker."""
    return not _UNREADY.isdisjoint(map(type, inputs))


_UNREADY = frozenset({Node, *MARKERS})


def hide(buffers: Sequence[Any], inputs: list[Array], places: Sequence[int]) -> None:
    """Read buffers into their places among the inputs and leave markers in them; the caller holds the lock."""
    for buffer, index in zip(buffers, places, strict=True):
        # Another buffer of the same call may be the same one, hidden a moment ago: its array is already ours.
        held = buffer.held
        inputs[index] = held.inputs[held.index] if type(held) is Rewriting else held
        buffer.held = Rewriting(inputs, index)


def show(buffers: Sequence[Any], inputs: list[Array], places: Sequence[int]) -> None:
    """Undo ``hide`` for buffers that still hold their marker: the program did not run."""
    for buffer, index in zip(buffers, places, strict=True):
        if type(buffer.held) is Rewriting:
            buffer.held = inputs[index]


def is_unshared(slack: Slack) -> bool:
    """Return whether only this slack holds its arrays, so that a program may overwrite either of them.

    Whoever takes a slack for dead by its own reference count asks this as well: a read of the buffer replaces the slack
    in it by ``unpadded``, which then is the contents of a tensor although nothing but a trace holds the slack.
    """
    # As of an array in a list: one reference is the slack's, the other is that of the count.
    alone = OWNED - 1
    if sys.getrefcount(slack.array) != alone:
        return False
    return slack.unpadded is None or sys.getrefcount(slack.unpadded) == alone


def is_owned(inputs: list[Array], places: Sequence[int], hidden: bool = False) -> bool:
    """Return whether only their buffers, unless those are hidden, and this list hold the arrays.

    Zeros that new tensors share are replaced in the list by zeros that only the list holds.
    """
    # A hidden buffer holds a marker and not the array, so there is one reference less.
    owned = OWNED - hidden
    # Not in a function of the array: how often a call counts its arguments depends on what runs Python's frames
    # (CPython's own loop, or Dynamo's).
    return all([sys.getrefcount(inputs[index]) <= owned or own_zeros(inputs, index) for index in places])


def own(inputs: list[Array], places: Sequence[int] | None = None, hidden: bool = False) -> list[Array]:
    """Replace arrays at these places, or all, that something else holds by copies; return the same list."""
    owned = OWNED - hidden
    for index in range(len(inputs)) if places is None else places:
        if sys.getrefcount(inputs[index]) != owned:
            inputs[index] = copied(inputs[index])
    return inputs


def take(inputs: list[Array], places: Sequence[int], buffers: Sequence[Any]) -> Callable[[], None] | None:
    """Make the arrays at these places, read from these buffers, safe to donate; return a function that undoes it.

    The caller holds the lock. Other threads wait for the buffers from here on, and arrays that something else holds are
    copied.
    """
    # One thread alone: nothing can read a buffer between the count and the donation.
    if not threaded():
        own(inputs, places)
        return None
    undo = partial(show, buffers, inputs, places)
    try:
        hide(buffers, inputs, places)
        own(inputs, places, hidden=True)
    except BaseException:
        # Also after an interrupt in the middle: ``show`` leaves buffers alone that hold no marker.
        finish(undo)
        raise
    return undo


def run(
    call: Callable[..., Any],
    inputs: Sequence[Any],
    commit: Callable[[Any], T],
    undo: Callable[[], None] | None = None,
    check: Callable[[Any], None] | None = None,
) -> T:
    """Run a program and hand its results to ``commit``, which is finished whatever is raised meanwhile.

    ``commit`` only binds values, so that doing it twice is doing it once; ``undo`` is done if the program did not run.
    ``check`` may raise for its results, of programs that donate nothing: then they are not bound.
    A program that finds no memory is tried once more after what is not needed was dropped.
    """
    outputs: Any = None
    try:
        try:
            # One bytecode stores what the iterator yields: no signal handler can run between the call's return
            # and the assignment, as it could after ``outputs = call(*inputs)``.
            (outputs,) = starmap(call, (inputs,))
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
            memory.make_room(error, inputs)
            # Only a second failure is the user's to see; the first may be due to caches that have been dropped
            # now.
            (outputs,) = starmap(call, (inputs,))
        if check is not None:
            # While ``check`` looks at them they are not ``outputs``: if it raises, the block below must not
            # commit.
            unchecked, outputs = outputs, None
            check(unchecked)
            outputs = unchecked
        return commit(outputs)
    except BaseException as error:
        # The program has run and its inputs are gone, so the results are bound before anything is raised.
        if outputs is not None:
            finish(lambda: commit(outputs))
        elif undo is not None:
            finish(undo)
        if memory.is_exhausted(error):
            raise memory.exhausted(error) from error
        raise


def finish(step: Callable[[], Any]) -> None:
    """Do a step that must be done whatever is raised meanwhile, by beginning it again.

    The caller raises the error that it has at hand. So an interrupt (Ctrl-C, ``sys.exit`` in a signal handler) that
    came during the step is raised from here once the step is done: the caller's error would take its place. A step that
    always fails raises its own error after ``_ATTEMPTS`` tries.
    """
    interrupt: BaseException | None = None
    for attempt in range(_ATTEMPTS):
        try:
            step()
            break
        except BaseException as error:
            if attempt == _ATTEMPTS - 1:
                raise
            if not isinstance(error, Exception):
                interrupt = error
    if interrupt is not None:
        raise interrupt
