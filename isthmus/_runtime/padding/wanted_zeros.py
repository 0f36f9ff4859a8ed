"""Which values of a jaxpr are read across their padding by a sum or a product of matrices, which want zeros there.

Such a read fills the padding with zeros (``Padding.fill``). A value is often read twice, once as it is and once filled:
at the second read it is in memory already, so that filling it makes a second array. Known before it is computed, the
zeros are put there by the computation itself, and every reader has the one array::

    y = tanh(x)             # wanted: zeros past the true end of axis 0
    z = y @ w               # reads the rows of y, padding too
    g = y.T @ grad          # sums over them

Only a matter of speed: a rule fills what it reads across wherever that is not known to be zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from isthmus._runtime.padding.sizes import Size, is_symbolic

Axes = frozenset[int]
NOTHING: Axes = frozenset()
MOVES = {
    "transpose",
    "squeeze",
    "reshape",
    "broadcast_in_dim",
    "convert_element_type",
    "optimization_barrier",
}
"""Primitives whose results have zeros where their operands have, so that the operands are filled instead."""


def wanted_zeros(jaxpr: Jaxpr, results: Sequence[Axes] = ()) -> Mapping[Any, Axes]:
    """Return along which axes each variable is to have zeros for padding; ``results`` says so of the outputs."""
    wanted: dict[Any, Axes] = {}

    def want(atom: Any, axes: Iterable[int]) -> None:
        if isinstance(atom, Var):
            shape = atom.aval.shape  # type: ignore[attr-defined]
            if found := frozenset(i for i in axes if is_symbolic(shape[i])):
                wanted[atom] = wanted.get(atom, NOTHING) | found

    for atom, axes in zip(jaxpr.outvars, results, strict=False):
        want(atom, axes)
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        if name == "dot_general":
            for atom, axes in zip(eqn.invars, eqn.params["dimension_numbers"][0], strict=True):
                want(atom, axes)
        elif name == "reduce_sum":
            want(eqn.invars[0], eqn.params["axes"])
        elif name in MOVES:
            for atom, result in zip(eqn.invars, eqn.outvars, strict=False):
                want(atom, _before(eqn, wanted.get(result, NOTHING)))
    return wanted


def _before(eqn: JaxprEqn, axes: Axes) -> Axes:
    """Return the axes of an operand that become these axes of the result of a move."""
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape  # type: ignore[attr-defined]
    if name == "transpose":
        return frozenset(eqn.params["permutation"][i] for i in axes)
    if name == "squeeze":
        gone = [i % len(shape) for i in eqn.params["dimensions"]]
        kept = [i for i in range(len(shape)) if i not in gone]
        return frozenset(kept[i] for i in axes)
    if name == "broadcast_in_dim":
        at = eqn.params["broadcast_dimensions"]
        return frozenset(at.index(i) for i in axes if i in at)
    if name == "reshape":
        return _unshaped(shape, eqn.outvars[0].aval.shape, axes)  # type: ignore[attr-defined]
    return axes


def _unshaped(old: Sequence[Size], new: Sequence[Size], axes: Axes) -> Axes:
    """Return the axes before a reshape that hold what is in these axes after it, as far as it is plain to see.

    Axes are taken from the front and from the back as long as they are equal; what is left is one group.
    """
    front = 0
    while front < min(len(old), len(new)) and old[front] == new[front]:
        front += 1
    back = 0
    while back < min(len(old), len(new)) - front and old[-1 - back] == new[-1 - back]:
        back += 1
    found = set()
    for i in axes:
        if i < front:
            found.add(i)
        elif i >= len(new) - back:
            found.add(i - len(new) + len(old))
        else:
            found |= {k for k in range(front, len(old) - back) if is_symbolic(old[k])}
    return frozenset(found)
