"""Collectives of a compiled program, read from XLA's text: which kinds, how many bytes each moves, and for which line.

XLA decides at compile time where devices exchange data, so its HLO is the only place that says it::

    %all-gather.2 = f32[64,16]{1,0} all-gather(%param), ..., metadata={op_name="jit(f)/model.py:12/dot_general" ...}

Bytes are those of the result on one device. The line of user code is the scope that ``_program/evaluate.py`` opens for
each node while there is a mesh.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"
# An asynchronous one is two instructions, of which the first is counted.
# A result may be a tuple of shapes, so everything up to the name of the instruction is one group.
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?\S+ = (.+?) ({_KINDS})(?:-start)?\(")
# A letter type, its bits, and for float8 how they are divided: ``f8e4m3fn[2,3]``.
_SHAPE = re.compile(r"([a-z]+)(\d+)?(?:e\dm\d\w*)?\[([\d,]*)\]")
_LINE = re.compile(r'op_name="[^"]*?([^"/()]+\.py:\d+)')


@dataclass(frozen=True)
class Collective:
    """One kind of exchange for one line: how often a run makes it, and the bytes of its results on one device."""

    kind: str
    line: str
    count: int
    bytes: int


def collectives(hlo: str) -> list[Collective]:
    """Return the collectives of a program by kind and line, those that move most first."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for text in hlo.splitlines():
        instruction = _INSTRUCTION.match(text)
        if instruction is not None:
            line = _LINE.search(text)
            key = (instruction[2], line[1] if line is not None else "")
            counts[key] += 1
            sizes[key] += sum(_bytes(*shape) for shape in _SHAPE.findall(instruction[1]))
    return [Collective(kind, line, counts[kind, line], size) for (kind, line), size in sizes.most_common()]


def _bytes(kind: str, bits: str, dims: str) -> int:
    count = math.prod(int(n) for n in dims.split(",") if n)
    return count * max(1, int(bits or 8) // 8)  # a pred has a byte
