"""Equinox modules, with the state beside those that have one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax

from isthmus._interop.module_adapter import Leaf, Source, Tree, is_inexact, name_of
from isthmus.errors import IsthmusError


class Equinox(Source):
    """An ``equinox.Module``: its inexact arrays are parameters, as Equinox has it, and its state changes."""

    def __init__(self, module: Any, state: Any, method: Callable[..., Any] | None) -> None:
        if state is not None and not isinstance(state, eqx.nn.State):
            raise IsthmusError(
                "isthmus.jax_module: beside an Equinox module comes its state, the second of what "
                "equinox.nn.make_with_state(...)(...) returns, or nothing"
            )
        self.method = method or type(module).__call__
        self.module, self.state = Tree(module), Tree(state)
        names = [name_of(path) for path in self.module.paths]
        self.leaves = [
            *[Leaf(n, a, is_inexact(a)) for n, a in zip(names, self.module.arrays, strict=True)],
            *[Leaf(n, a, False) for n, a in zip(_names(module, self.state), self.state.arrays, strict=True)],
        ]
        # A method that must be given a key is given None where none is drawn.
        self.key = inspect.signature(self.method).parameters.get("key")
        self.draws = self.key is not None

    def writes(self, training: bool) -> bool:
        return bool(self.state.arrays)

    def call(
        self, arrays: Sequence[Any], key: Any, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        count = len(self.module.arrays)
        module = eqx.nn.inference_mode(self.module.holding(arrays[:count]), value=not training)
        if self.key is not None and (key is not None or self.key.default is inspect.Parameter.empty):
            kwargs = {"key": key, **kwargs}
        if not self.state.arrays:
            return self.method(module, *args, **kwargs), list(arrays)
        found = self.method(module, *args, state=self.state.holding(arrays[count:]), **kwargs)
        if not (isinstance(found, tuple) and found and isinstance(found[-1], eqx.nn.State)):
            raise IsthmusError(
                "isthmus.jax_module: a module with state returns the new state last, in a tuple"
            )
        after = [*arrays[:count], *self.state.arrays_of(found[-1])]
        return found[0] if len(found) == 2 else found[:-1], after

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        count = len(self.module.arrays)
        module = self.module.holding(arrays[:count])
        return (module, self.state.holding(arrays[count:])) if self.state.arrays else module


def _names(module: Any, state: Tree) -> list[str]:
    """Return the names of a state's arrays: where in the module the index of each is."""
    if not state.arrays:
        return []
    numbered = state.holding(range(len(state.arrays)))
    is_index = lambda value: isinstance(value, eqx.nn.StateIndex)  # noqa: E731
    names = [f"state.{n}" for n in range(len(state.arrays))]
    for path, index in jax.tree_util.tree_flatten_with_path(module, is_leaf=is_index)[0]:
        if is_index(index):
            for within, n in jax.tree_util.tree_flatten_with_path(numbered.get(index))[0]:
                names[n] = name_of((*path, *within))
    return names
