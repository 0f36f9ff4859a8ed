"""Guards on values: a truth that was read while a function was recorded, and has to be what it was at every replay.

``isthmus.jit`` replays a program without the function's Python, so a value that Python reads must not change. Libraries
read truths of their inputs to choose a faster way, as transformers does of padding masks: ``if mask.all()``. Such a
read is answered, the program that computes it is kept, and a replay is preceded by its run::

    def step(tokens, mask):          # mask.all() is read: False
        ...
    fast(tokens, mask)               # recorded; guard: all(mask) is False
    fast(tokens, mask)               # the same array: nothing to compute
    fast(tokens, other)              # all(other) is computed and waited for: False, so the recording is replayed
    fast(tokens, ones)               # True: another recording

Only truths of arguments are answered: two values at most, so two recordings. A number would be another one at every
call, and what a function computes of its own state is known only once the step before has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch

from isthmus._graph.nodes import Leaf, Node, reachable
from isthmus._lazy import programs
from isthmus._lazy.trace import trace
from isthmus._program.ranged_program import Given, RangedProgram


class ValueGuard:
    """A truth computed of arguments, by their places, and what it was when it was read."""

    def __init__(self, node: Node, places: Mapping[int, int]) -> None:
        # No donation: the arrays are arguments, and the program that follows reads them too.
        match = programs.ranged((node,), donate=False)
        self.sizes = () if match is None else match.sizes
        program: Any = match.program if match is not None else programs.family_of((node,)).find(frozenset())
        self.program = program
        self.constants = self.program.pack_numbers(trace.numbers, trace.offsets)
        slots: list[int] = [*program.slots]
        self.places = [places[id(trace.origins[at]())] for at in slots]
        arrays = [trace.arrays[at] for at in slots]
        self.value = self._compute(arrays)
        self.truth = bool(self.value)
        self._remember(arrays)

    def _compute(self, arrays: Sequence[Any]) -> Any:
        if isinstance(self.program, RangedProgram):
            rest = self.program.compiled.arguments([], self.constants, [])
            return self.program.run(self.sizes, Given([*arrays]), rest, lambda values, _: values[0])
        return self.program.call(*self.program.arguments([*arrays], self.constants, []))[0]

    def _remember(self, arrays: Sequence[Any]) -> None:
        # Weakly: an array that a guard held could not be donated.
        self.last = [ref(array) for array in arrays]

    def holds(self, buffers: Sequence[Any]) -> bool:
        """Return whether the truth is what it was, given the buffer of each argument."""
        arrays = [buffers[place].value for place in self.places]
        if all([before() is now for before, now in zip(self.last, arrays, strict=True)]):
            return True  # arrays never change
        if bool(self._compute(arrays)) != self.truth:
            return False
        self._remember(arrays)
        return True


def guarded(node: object, places: Mapping[int, int]) -> ValueGuard | None:
    """Return the guard of a value that is read; None where it is no truth, or not computed of arguments alone."""
    # One byte: a single boolean.
    if type(node) is not Node or node.type.dtype != torch.bool or node.type.nbytes != 1:
        return None
    leaves = [n.call for n in reachable([node]) if isinstance(n.call, Leaf)]
    arrays = [leaf.index for leaf in leaves if leaf.kind == "array"]
    # A draw would make another value each time.
    if any(leaf.kind not in ("array", "number", "offset") for leaf in leaves):
        return None
    # Arrays that the function did not get as arguments change between calls, out of sight.
    if not all(id(trace.origins[at]()) in places for at in arrays):
        return None
    return ValueGuard(node, places)
