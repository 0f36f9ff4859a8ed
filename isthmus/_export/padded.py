"""Exported programs for ranges of sizes: padded executables that ``Artifact.precompile_buckets`` adds.

The function that ``jax.export`` traced for symbolic sizes is run on padded arrays (``_runtime/padding``) and compiled
once for each combination of padded sizes. ``executables.py``, which travels with the program, pads the inputs of a
call, runs the smallest executable that they fit and cuts its results.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from isthmus._runtime.padding.program import PaddedProgram
from isthmus._runtime.padding.sizes import Refused, Sizes
from isthmus._runtime.private import forgetting_callers, without_locations
from isthmus.errors import ExportError


def compiled(
    function: Callable[..., Any],
    exported: export.Exported,
    dims: Mapping[str, Any],
    buckets: Mapping[str, Sequence[int]],
    constraints: Sequence[str],
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield an executable for each combination of padded sizes, and what the loader has to know of it.

    Sizes outside of the ``constraints`` of the export are none that an executable serves: the program refuses them.
    """
    args, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    weights, inputs = args
    leaves = [[str(n) for n in leaf.shape] for leaf in jax.tree.leaves(inputs)]
    _check(dims, leaves, buckets)
    tree: list[Any] = []

    def flat(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        outputs = function(*jax.tree.unflatten(exported.in_tree, arrays)[0])
        results, structure = jax.tree.flatten(outputs)
        tree[:] = [structure]
        return tuple(results)

    specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    try:
        least = {name: _limit(name, ">=", constraints, 1) for name in dims}
        program = PaddedProgram(flat, specs, dims, least)
        choices = [
            sorted({min(n, _limit(name, "<=", constraints, n)) for n in buckets[name]})
            for name in program.names
        ]
        for bounds in itertools.product(*choices):
            sizes = Sizes(program.symbols, dict(zip(program.names, bounds, strict=True)), 1)
            call = _Call(program, sizes, tree[0])
            padded = jax.tree.map(functools.partial(_padded, sizes), inputs)
            true_sizes = jax.ShapeDtypeStruct((len(program.names),), np.int32)
            about = {
                "names": list(program.names),
                "least": [least[name] for name in program.names],
                "bounds": list(bounds),
                "dims": leaves,
                "shapes": [list(leaf.shape) for leaf in jax.tree.leaves(padded)],
            }
            program_for = export.export(jax.jit(call))(weights, padded, true_sizes)
            # Locations are full paths of files on this machine, and would be in the executable too.
            bytecode = without_locations(program_for.mlir_module_serialized)
            bare = _Bare(dataclasses.replace(program_for, mlir_module_serialized=bytecode))
            with forgetting_callers():
                executable = jax.jit(bare).lower(weights, padded, true_sizes).compile()
            yield executable, about
    except Refused as error:
        raise ExportError(
            f"isthmus.export: this program cannot run on padded arrays: {error}\n"
            f"  to go on     precompile it for the sizes you need: artifact.precompile(*inputs)"
        ) from error


def _check(dims: Mapping[str, Any], leaves: list[list[str]], buckets: Mapping[str, Sequence[int]]) -> None:
    known = {name for shape in leaves for name in shape}
    if buckets.keys() != dims.keys() or not all(buckets.values()):
        raise ExportError(
            f"isthmus.export: buckets are for {sorted(buckets)}, and the dynamic dims are {sorted(dims)}"
        )
    if hidden := sorted(dims.keys() - known):
        raise ExportError(f"isthmus.export: no input has a dim that is {' or '.join(hidden)} by itself")


def _limit(name: str, relation: str, constraints: Sequence[str], otherwise: int) -> int:
    """Return the bound that a constraint such as ``length >= 2`` (``dims.py``) puts on a dim."""
    start = f"{name} {relation} "
    return next((int(line.removeprefix(start)) for line in constraints if line.startswith(start)), otherwise)


def _padded(sizes: Sizes, leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(sizes.padded(n) for n in leaf.shape), leaf.dtype)


class _Bare:
    """A program as an object without code of its own: JAX writes the file of a function into its executable."""

    def __init__(self, exported: export.Exported) -> None:
        self.exported = exported

    def __call__(self, *arguments: Any) -> Any:
        with forgetting_callers():  # this method is a caller too
            return self.exported.call(*arguments)


class _Call:
    """A program on padded arrays: of the weights, the inputs and the true sizes."""

    def __init__(self, program: PaddedProgram, sizes: Sizes, out_tree: Any) -> None:
        self.program, self.sizes, self.out_tree = program, sizes, out_tree

    def __call__(self, weights: Any, inputs: Any, true_sizes: jax.Array) -> Any:
        """Return the padded results, and the true sizes of all their dims, one after another."""
        program = self.program
        function, _ = program.function(self.sizes, (frozenset(),) * len(program.inputs))
        arrays, _ = function(true_sizes, *jax.tree.leaves(((weights, inputs), {})))
        known = {name: true_sizes[n].astype(jnp.int64) for n, name in enumerate(program.names)}
        sizes = self.sizes.at(known)
        dims = [sizes.true(n, jnp.int64) for shape in program.outputs for n in shape]
        return jax.tree.unflatten(self.out_tree, arrays), jnp.stack(dims) if dims else jnp.zeros(0, jnp.int64)
