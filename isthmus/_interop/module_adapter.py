"""JAX modules as what torch needs of them: arrays with names, and a pure function of these."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from isthmus.errors import IsthmusError

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Leaf:
    """An array of a module: its name as torch writes names, and whether it is a parameter."""

    name: str
    array: Any
    trained: bool


class Source(abc.ABC):
    """A JAX module, whatever its library."""

    leaves: list[Leaf]
    draws: bool

    @abc.abstractmethod
    def writes(self, training: bool) -> bool:
        """Return whether a call may change arrays that are not parameters."""

    @abc.abstractmethod
    def call(
        self, arrays: Sequence[Any], key: Any, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        """Return what the module returns, and its arrays after the call: the same objects where nothing changed."""

    @abc.abstractmethod
    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Return what the library's own programs use, with these arrays."""

    def __deepcopy__(self, memo: Any) -> Source:
        return self  # it never changes, and its copies share what was compiled


class Tree:
    """A pytree taken apart into arrays and what is constant in it."""

    def __init__(self, tree: Any) -> None:
        found, self.spec = jax.tree_util.tree_flatten_with_path(tree)
        self.paths = [path for path, leaf in found if is_array(leaf)]
        self.arrays = [leaf for _, leaf in found if is_array(leaf)]
        self._at = [n for n, (_, leaf) in enumerate(found) if is_array(leaf)]
        self._constants = [None if is_array(leaf) else leaf for _, leaf in found]

    def holding(self, arrays: Sequence[Any]) -> Any:
        """Return the tree with other arrays."""
        leaves = list(self._constants)
        for n, array in zip(self._at, arrays, strict=True):
            leaves[n] = array
        return jax.tree.unflatten(self.spec, leaves)

    def arrays_of(self, tree: Any) -> list[Any]:
        """Return the arrays of a tree that has at least the leaves of this one."""
        found = dict(jax.tree_util.tree_flatten_with_path(tree)[0])
        gone = [path for path in self.paths if path not in found]
        if gone:
            raise IsthmusError(f"isthmus.jax_module: the call removed {name_of(gone[0])} from the module")
        return [found[path] for path in self.paths]


def is_array(value: Any) -> bool:
    """Return whether torch has a tensor for a value."""
    return isinstance(value, (jax.Array, np.ndarray)) and not is_key(value)


def is_key(value: Any) -> bool:
    """Return whether a value is an array of random keys."""
    return isinstance(value, jax.Array) and bool(jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key))


def is_inexact(array: Any) -> bool:
    """Return whether an array can have a gradient."""
    return bool(jax.numpy.issubdtype(array.dtype, jax.numpy.inexact))


def name_of(path: Path) -> str:
    """Return a path of a pytree as torch writes names: ``layers.0.kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
