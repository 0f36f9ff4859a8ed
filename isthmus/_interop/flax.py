"""Flax modules: linen's with the variables beside them, nnx's with the variables in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import core, linen, nnx

from isthmus._interop.module_adapter import Leaf, Path, Source, Tree, is_inexact, is_key, name_of
from isthmus.errors import IsthmusError


class Linen(Source):
    """A ``flax.linen.Module`` and its variables; collections other than ``params`` change in training."""

    def __init__(self, module: linen.Module, variables: Any, method: Any, rngs: Sequence[str]) -> None:
        self.module, self.method, self.rngs = module, method, tuple(rngs)
        self.tree = Tree(core.unfreeze(_checked(variables)))
        self.changing = sorted({path[0].key for path in self.tree.paths} - {"params"})
        self.leaves = [
            Leaf(name_of(path[1:]), array, path[0].key == "params" and is_inexact(array))
            for path, array in zip(self.tree.paths, self.tree.arrays, strict=True)
        ]
        self.draws = bool(self.rngs)

    def writes(self, training: bool) -> bool:
        return training and bool(self.changing)

    def call(
        self, arrays: Sequence[Any], key: Any, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        rngs = {} if key is None else {n: jax.random.fold_in(key, i) for i, n in enumerate(self.rngs)}
        variables = self.tree.holding(arrays)
        given = {"rngs": rngs, "method": self.method, **kwargs}
        if not self.writes(training):
            return self.module.apply(variables, *args, **given), list(arrays)
        found, updates = self.module.apply(variables, *args, mutable=self.changing, **given)
        return found, self.tree.arrays_of({**variables, **core.unfreeze(updates)})

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        return self.tree.holding(arrays)


def _checked(variables: Any) -> Any:
    if not isinstance(variables, Mapping) or (variables and "params" not in variables):
        raise IsthmusError(
            "isthmus.jax_module: a linen module comes with its variables, as module.init returns them: "
            '{"params": ..., "batch_stats": ...}'
        )
    return variables


class Nnx(Source):
    """A ``flax.nnx.Module``; its ``Param`` are parameters, and its streams of random numbers start anew each call."""

    def __init__(self, module: nnx.Module, method: Callable[..., Any] | None) -> None:
        self.method = method or type(module).__call__
        self.graph, params, self.streams, rest = _split(module)
        self.tree = Tree((params, rest))
        self.leaves = [
            Leaf(name_of(_without_value(path[1:])), array, path[0].idx == 0 and is_inexact(array))
            for path, array in zip(self.tree.paths, self.tree.arrays, strict=True)
        ]
        self.draws = bool(jax.tree.leaves(self.streams))

    def writes(self, training: bool) -> bool:
        return not all(leaf.trained for leaf in self.leaves)

    def call(
        self, arrays: Sequence[Any], key: Any, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        streams = self._streams(key)
        before = jax.tree.leaves(streams)
        params, rest = self.tree.holding(arrays)
        module = nnx.merge(self.graph, params, streams, rest)
        if training:
            module.train()
        else:
            module.eval()
        found = self.method(module, *args, **kwargs)
        _, params, streams, rest = _split(module)
        after = jax.tree.leaves(streams)
        if key is None and any(old is not new for old, new in zip(before, after, strict=True)):
            raise IsthmusError(
                f"isthmus.jax_module: {type(module).__name__} draws random numbers in eval mode too; "
                f"say random_in_eval=True"
            )
        return found, self.tree.arrays_of((params, rest))

    def _streams(self, key: Any) -> Any:
        """Return the streams of random numbers as they were given, or as they start from a key."""
        leaves, spec = jax.tree.flatten(self.streams)
        if key is not None:
            leaves = [_like(leaf, jax.random.fold_in(key, n)) for n, leaf in enumerate(leaves)]
        return jax.tree.unflatten(spec, leaves)

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        params, rest = self.tree.holding(arrays)
        return nnx.merge(self.graph, params, self._streams(None), rest)


def _split(module: nnx.Module) -> Any:
    """Return the structure of a module, its parameters, its streams of random numbers and its other variables."""
    return nnx.split(module, nnx.Param, nnx.RngState, ...)


def _like(leaf: Any, key: Any) -> Any:
    """Return new keys for an array of keys; counts stay what they are."""
    if not is_key(leaf):
        return leaf
    seed = jax.random.bits(key)
    return jax.random.split(jax.random.key(seed, impl=jax.random.key_impl(leaf)), leaf.shape)


def _without_value(path: Path) -> Path:
    """Return the path of a variable, whose array JAX calls its ``value``."""
    return path[:-1] if getattr(path[-1], "name", None) == "value" else path
