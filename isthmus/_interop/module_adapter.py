"""The interface between ``jax_module`` and the libraries: a JAX module as named arrays and a pure function of them.

``modules.py`` builds ``JaxModule`` on this interface; ``flax.py`` and ``equinox.py`` implement it for linen, nnx and
Equinox. A library keeps its arrays in a pytree; ``ArrayTree`` takes the arrays out and puts others in::

    tree = ArrayTree({"params": {"Dense_0": {"kernel": k}}, "rate": 0.1})
    tree.arrays                # [k]; 0.1 is a constant of the tree
    tree.with_arrays([k2])     # {"params": {"Dense_0": {"kernel": k2}}, "rate": 0.1}
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from isthmus.errors import IsthmusError

Array = jax.Array
Path = tuple[Any, ...]


@dataclass(frozen=True)
class NamedArray:
    """An array of a module, its name in torch's style (``Dense_0.kernel``), and whether it is a parameter."""

    name: str
    array: Array
    trained: bool


class ModuleAdapter(abc.ABC):
    """A JAX module of some library. It never changes: arrays go in and come out of ``call``."""

    named_arrays: list[NamedArray]
    draws: bool
    """Whether a call can use a random key."""

    @abc.abstractmethod
    def writes(self, training: bool) -> bool:
        """Return whether a call may change arrays that are not parameters."""

    @abc.abstractmethod
    def call(
        self,
        arrays: Sequence[Array],
        key: Array | None,
        training: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, list[Array]]:
        """Return the module's result, and its arrays after the call: the same objects where nothing changed."""

    @abc.abstractmethod
    def rebuild(self, arrays: Sequence[Array]) -> Any:
        """Return the module, or its variables, with these arrays, as the library's own programs take it."""

    def __deepcopy__(self, memo: Any) -> ModuleAdapter:
        return self  # immutable, so that copies of a module share what was traced


class ArrayTree:
    """A pytree separated into its arrays, with their paths, and constants."""

    def __init__(self, tree: Any) -> None:
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(tree)
        # Positions of arrays among all leaves; the rest are constants.
        self._positions = [n for n, (_, leaf) in enumerate(leaves) if is_array(leaf)]
        self._constants = [None if is_array(leaf) else leaf for _, leaf in leaves]
        self.paths: list[Path] = [leaves[n][0] for n in self._positions]
        self.arrays: list[Array] = [leaves[n][1] for n in self._positions]

    def with_arrays(self, arrays: Sequence[Any]) -> Any:
        """Return the tree with these arrays in place of its own."""
        leaves = list(self._constants)
        for n, array in zip(self._positions, arrays, strict=True):
            leaves[n] = array
        return jax.tree.unflatten(self._tree, leaves)

    def arrays_of(self, tree: Any) -> list[Array]:
        """Return another tree's arrays at the paths of this one; leaves at other paths are left out."""
        leaves = dict(jax.tree_util.tree_flatten_with_path(tree)[0])
        missing = [path for path in self.paths if path not in leaves]
        if missing:
            raise IsthmusError(f"isthmus.jax_module: the call removed {name_of(missing[0])} from the module")
        return [leaves[path] for path in self.paths]


def is_array(value: Any) -> bool:
    """Return whether torch has a tensor for a value; it has none for random keys."""
    return isinstance(value, (jax.Array, np.ndarray)) and not is_key(value)


def is_key(value: Any) -> bool:
    """Return whether a value is an array of random keys."""
    return isinstance(value, jax.Array) and bool(jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key))


def is_inexact(array: Array) -> bool:
    """Return whether an array can have a gradient."""
    return bool(jax.numpy.issubdtype(array.dtype, jax.numpy.inexact))


def name_of(path: Path) -> str:
    """Return a path of a pytree as torch writes names: ``layers.0.kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
