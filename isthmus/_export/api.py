"""``isthmus.export`` and ``isthmus.load``."""

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
    precompile: bool = False,
    path: str | Path | None = None,
) -> Artifact:
    """Return a model, a function or a ``torch.export.ExportedProgram`` as a program that needs no torch.

    ``args`` and ``kwargs`` are an example of its inputs; their sizes are fixed, but for those that
    ``dynamic_shapes`` names, in torch's notation or with names such as ``{"x": {0: "batch"}}``. ``platforms`` are
    those the program may run on, of ``cpu``, ``cuda``, ``rocm`` and ``tpu``; the one at hand if none is given.
    ``precompile`` adds an executable for this device and the sizes of the example. With a ``path`` all of it is also
    written there: a folder, or one file if the path ends in ``.isthmus``.
    """
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    shapes = dims.as_dims(dynamic_shapes)
    program = model
    if not isinstance(model, ExportedProgram):
        program = trace.program_of(model, args, kwargs, shapes)
    traced = trace.trace(program, shapes, platforms)
    made = artifact(traced, getattr(model, "__name__", type(model).__name__))
    if precompile:
        made.precompile(*_tensors(args), **_tensors(kwargs or {}))
    if path is not None:
        made.save(path)
    return made


def load(source: Any, *, executables: bool = False) -> nn.Module:
    """Return what was exported as a torch module, given a path or a ``jax.export.Exported``.

    With ``executables`` those that were precompiled are used where they fit this device. They are pickles, which
    run code when they are read: ask for them only where you trust who made them.
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
    whole = os.path.lexists(path / "program.json") if path.is_dir() else zipfile.is_zipfile(path)
    if not whole:
        raise ExportError(f"isthmus.load: {path} is no program that isthmus.export wrote, or it is damaged")
    try:
        program = container.read(path, executables=executables)
        return attach(program, path) if executables else program
    except OSError as error:
        raise ExportError(f"isthmus.load: {path} cannot be read: {error}") from error


def _tensors(tree: Any) -> Any:
    """Return an example's inputs with None for what is no tensor, which is compiled in."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, Tensor) else None, tree, is_leaf=_is_tensor)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
