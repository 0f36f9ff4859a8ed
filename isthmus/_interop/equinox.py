"""The adapter for Equinox modules, with the ``equinox.nn.State`` beside those that have one.

Only ``modules.py`` imports this file, and only for a module whose library is imported already.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax

from isthmus._interop.module_adapter import Array, ArrayTree, ModuleAdapter, NamedArray, is_inexact, name_of
from isthmus.errors import IsthmusError


class EquinoxAdapter(ModuleAdapter):
    """An ``equinox.Module``: inexact arrays are parameters, as for Equinox; other arrays and the state are buffers.

    Arrays are in one list, the module's before the state's.
    """

    def __init__(self, module: Any, state: Any, method: Callable[..., Any] | None) -> None:
        if state is not None and not isinstance(state, eqx.nn.State):
            raise IsthmusError(
                "isthmus.jax_module: beside an Equinox module comes its state, the second of what "
                "equinox.nn.make_with_state(...)(...) returns, or nothing"
            )
        self.method = method or type(module).__call__
        self.module, self.state = ArrayTree(module), ArrayTree(state)
        names = [name_of(path) for path in self.module.paths]
        state_names = _state_names(module, self.state)
        self.named_arrays = [
            *[NamedArray(n, a, is_inexact(a)) for n, a in zip(names, self.module.arrays, strict=True)],
            *[NamedArray(n, a, False) for n, a in zip(state_names, self.state.arrays, strict=True)],
        ]
        self.key = inspect.signature(self.method).parameters.get("key")
        self.draws = self.key is not None

    def writes(self, training: bool) -> bool:
        return bool(self.state.arrays)

    def call(
        self,
        arrays: Sequence[Array],
        key: Array | None,
        training: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, list[Array]]:
        count = len(self.module.arrays)
        module = eqx.nn.inference_mode(self.module.with_arrays(arrays[:count]), value=not training)
        # A method without a default for its key must be passed one: None where nothing is drawn.
        if self.key is not None and (key is not None or self.key.default is inspect.Parameter.empty):
            kwargs = {"key": key, **kwargs}
        if not self.state.arrays:
            return self.method(module, *args, **kwargs), list(arrays)
        out = self.method(module, *args, state=self.state.with_arrays(arrays[count:]), **kwargs)
        if not (isinstance(out, tuple) and out and isinstance(out[-1], eqx.nn.State)):
            raise IsthmusError(
                "isthmus.jax_module: a module with state returns the new state last, in a tuple"
            )
        after = [*arrays[:count], *self.state.arrays_of(out[-1])]
        return out[0] if len(out) == 2 else out[:-1], after

    def rebuild(self, arrays: Sequence[Array]) -> Any:
        count = len(self.module.arrays)
        module = self.module.with_arrays(arrays[:count])
        return (module, self.state.with_arrays(arrays[count:])) if self.state.arrays else module


def _state_names(module: Any, state: ArrayTree) -> list[str]:
    """Return names of a state's arrays: the path in the module of the ``StateIndex`` that each belongs to.

    A state is a mapping from indices to arrays with no public way to list it. So a state of numbers in place of arrays
    is looked up with each index of the module, and the numbers say which array that index has.
    """
    if not state.arrays:
        return []
    numbered = state.with_arrays(range(len(state.arrays)))
    is_index = lambda value: isinstance(value, eqx.nn.StateIndex)  # noqa: E731
    names = [f"state.{n}" for n in range(len(state.arrays))]
    for path, index in jax.tree_util.tree_flatten_with_path(module, is_leaf=is_index)[0]:
        if is_index(index):
            for inner_path, n in jax.tree_util.tree_flatten_with_path(numbered.get(index))[0]:
                names[n] = name_of((*path, *inner_path))
    return names
