"""Adapters for Flax: linen modules with their variables beside them, nnx modules with their variables inside.

Only ``modules.py`` imports this file, and only for a module whose library is imported already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import core, linen, nnx

from isthmus._interop.module_adapter import (
    Array,
    ArrayTree,
    ModuleAdapter,
    NamedArray,
    Path,
    is_inexact,
    is_key,
    name_of,
)
from isthmus.errors import IsthmusError


class LinenAdapter(ModuleAdapter):
    """A ``flax.linen.Module`` and its variables; in train mode, collections other than ``params`` change."""

    def __init__(self, module: linen.Module, variables: Any, method: Any, rngs: Sequence[str]) -> None:
        self.module, self.method, self.rngs = module, method, tuple(rngs)
        self.tree = ArrayTree(core.unfreeze(_checked(variables)))
        # A path begins with the collection: params, batch_stats, ...
        self.mutable = sorted({path[0].key for path in self.tree.paths} - {"params"})
        self.named_arrays = [
            NamedArray(name_of(path[1:]), array, path[0].key == "params" and is_inexact(array))
            for path, array in zip(self.tree.paths, self.tree.arrays, strict=True)
        ]
        self.draws = bool(self.rngs)

    def writes(self, training: bool) -> bool:
        return training and bool(self.mutable)

    def call(
        self,
        arrays: Sequence[Array],
        key: Array | None,
        training: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, list[Array]]:
        rngs = {} if key is None else {n: jax.random.fold_in(key, i) for i, n in enumerate(self.rngs)}
        variables = self.tree.with_arrays(arrays)
        kwargs = {"rngs": rngs, "method": self.method, **kwargs}
        if not self.writes(training):
            return self.module.apply(variables, *args, **kwargs), list(arrays)
        out, updates = self.module.apply(variables, *args, mutable=self.mutable, **kwargs)
        return out, self.tree.arrays_of({**variables, **core.unfreeze(updates)})

    def rebuild(self, arrays: Sequence[Array]) -> Any:
        return self.tree.with_arrays(arrays)


def _checked(variables: Any) -> Any:
    if not isinstance(variables, Mapping) or (variables and "params" not in variables):
        raise IsthmusError(
            "isthmus.jax_module: a linen module comes with its variables, as module.init returns them: "
            '{"params": ..., "batch_stats": ...}'
        )
    return variables


class NnxAdapter(ModuleAdapter):
    """A ``flax.nnx.Module``; each ``Param`` is a parameter, and random streams start from the key of each call."""

    def __init__(self, module: nnx.Module, method: Callable[..., Any] | None) -> None:
        self.method = method or type(module).__call__
        self.graph, params, self.streams, rest = _split(module)
        self.tree = ArrayTree((params, rest))
        self.named_arrays = [
            NamedArray(name_of(_without_value(path[1:])), array, path[0].idx == 0 and is_inexact(array))
            for path, array in zip(self.tree.paths, self.tree.arrays, strict=True)
        ]
        self.draws = bool(jax.tree.leaves(self.streams))

    def writes(self, training: bool) -> bool:
        return not all(named.trained for named in self.named_arrays)

    def call(
        self,
        arrays: Sequence[Array],
        key: Array | None,
        training: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, list[Array]]:
        streams = self._streams(key)
        before = jax.tree.leaves(streams)
        params, rest = self.tree.with_arrays(arrays)
        module = nnx.merge(self.graph, params, streams, rest)
        if training:
            module.train()
        else:
            module.eval()
        out = self.method(module, *args, **kwargs)
        # The call changed the module in place: splitting it again gives its variables after the call.
        _, params, streams, rest = _split(module)
        after = jax.tree.leaves(streams)
        # A stream that was drawn from has another count. Without a key, its numbers would be the same at every call.
        if key is None and any(old is not new for old, new in zip(before, after, strict=True)):
            raise IsthmusError(
                f"isthmus.jax_module: {type(module).__name__} draws random numbers in eval mode too; "
                f"say random_in_eval=True"
            )
        return out, self.tree.arrays_of((params, rest))

    def _streams(self, key: Array | None) -> Any:
        """Return the module's random streams, started from a key if there is one."""
        leaves, tree = jax.tree.flatten(self.streams)
        if key is not None:
            leaves = [_reseeded(leaf, jax.random.fold_in(key, n)) for n, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, leaves)

    def rebuild(self, arrays: Sequence[Array]) -> Any:
        params, rest = self.tree.with_arrays(arrays)
        return nnx.merge(self.graph, params, self._streams(None), rest)


def _split(module: nnx.Module) -> Any:
    """Return the structure of a module, its parameters, its random streams and its other variables."""
    return nnx.split(module, nnx.Param, nnx.RngState, ...)


def _reseeded(leaf: Array, key: Array) -> Array:
    """Return new keys, of the same generator, for an array of keys; a stream's count stays as it is."""
    if not is_key(leaf):
        return leaf
    seed = jax.random.bits(key)
    return jax.random.split(jax.random.key(seed, impl=jax.random.key_impl(leaf)), leaf.shape)


def _without_value(path: Path) -> Path:
    """Return the path of a variable: JAX's path to its array ends in ``.value``."""
    return path[:-1] if getattr(path[-1], "name", None) == "value" else path
