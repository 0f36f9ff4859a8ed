"""``isthmus.export`` and ``isthmus.load``: the public functions, and what ties the files of this folder together."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export as jax_export
from torch import Tensor, nn
from torch.export import ExportedProgram

from isthmus._export import container, dims, loader, trace
from isthmus._export.artifact import Artifact, artifact
from isthmus._export.executables import attach
from isthmus._export.module import ExportedModule, ProgramModule
from isthmus.errors import ExportError


def export(
    model: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    platforms: Sequence[str] | None = None,
    precompile: bool | Mapping[str, Sequence[int]] = False,
    path: str | Path | None = None,
) -> Artifact:
    """Return a model as a StableHLO program with its weights, which runs without torch.

    Arguments:
        model: a module, a function, or a ``torch.export.ExportedProgram``.
        args: an example of its inputs; their sizes are fixed, but for those that ``dynamic_shapes`` names.
        kwargs: inputs by name.
        dynamic_shapes: in torch's notation, or with names such as ``{"x": {0: "batch"}}``.
        platforms: where the program may run: any of ``cpu``, ``cuda``, ``rocm``, ``tpu``; by default the one at hand.
        precompile: whether to add an executable for this device and the sizes of the example; or padded sizes for each
            dynamic dim, such as ``{"length": [16, 64]}``, of which an executable each serves all sizes up to it.
        path: where to write it as well: a folder, or one file if the path ends in ``.isthmus``.

    Returns:
        An ``Artifact``: ``module()`` runs it, ``save(path)`` writes it, ``stablehlo`` is its text.

    Example:
        >>> import torch, isthmus
        >>> artifact = isthmus.export(torch.nn.ReLU(), torch.ones(2, 3), dynamic_shapes={"input": {0: "batch"}})
        >>> artifact.module()(torch.tensor([[-1.0, 0.0, 2.0]])).tolist()
        [[0.0, 0.0, 2.0]]
    """
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    shapes = dims.as_dims(dynamic_shapes)
    program = model
    if not isinstance(model, ExportedProgram):
        program = trace.program_of(model, args, kwargs, shapes)
    traced = trace.trace(program, shapes, platforms)
    exported = artifact(traced, getattr(model, "__name__", type(model).__name__))
    if isinstance(precompile, Mapping):
        exported.precompile_buckets(precompile)
    elif precompile:
        exported.precompile(*_tensors(args), **_tensors(kwargs or {}))
    if path is not None:
        exported.save(path)
    return exported


def load(source: Any, *, executables: bool = False) -> nn.Module:
    """Return an exported program as a torch module.

    Arguments:
        source: a path that ``isthmus.export`` wrote, an ``Artifact``, or a ``jax.export.Exported``.
        executables: whether to use precompiled executables where they fit this device. They are pickles, which run code
            when they are read: ask for them only where you trust who made them.

    Returns:
        A ``torch.nn.Module`` without gradients. ``isthmus.errors.DamagedFile`` is raised for a file that is not as it
        was written, ``isthmus.errors.ExportError`` for one that is no exported program.

    Example:
        >>> import os, tempfile, torch, isthmus
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "relu.isthmus")
        >>> artifact = isthmus.export(torch.nn.ReLU(), torch.ones(3), path=path)
        >>> isthmus.load(path)(torch.tensor([-1.0, 0.0, 2.0])).tolist()
        [0.0, 0.0, 2.0]
        >>> folder.cleanup()
    """
    if isinstance(source, jax_export.Exported):
        return ExportedModule(source)
    if isinstance(source, Artifact):
        return source.module()
    return ProgramModule(read(source, executables=executables))


def read(path: str | Path, *, executables: bool = False) -> loader.Program:
    """Return the program at a path as a function of arrays."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"isthmus.load: there is no {path}")
    # A link counts as a program here: the strict reader then refuses it with the reason.
    whole = os.path.lexists(path / "program.json") if path.is_dir() else zipfile.is_zipfile(path)
    if not whole:
        raise ExportError(f"isthmus.load: {path} is no program that isthmus.export wrote, or it is damaged")
    try:
        program = container.read(path, executables=executables)
        return attach(program, path) if executables else program
    except OSError as error:
        raise ExportError(f"isthmus.load: {path} cannot be read: {error}") from error


def _tensors(tree: Any) -> Any:
    """Return an example's inputs with None for those that are no tensors: their values are compiled in."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, Tensor) else None, tree, is_leaf=_is_tensor)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
