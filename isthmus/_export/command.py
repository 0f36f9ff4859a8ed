"""``isthmus export`` and ``isthmus run``: models written as programs, and programs run on arrays of files."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor, nn

from isthmus._export import api
from isthmus._runtime import files
from isthmus.errors import IsthmusError

_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
}
_SPEC = re.compile(r"(\w+)\[(.*)\]")
_SIZE = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<size>\d+)(?:\.\.(?P<high>\d+))?")


class _Misuse(IsthmusError):
    """What was asked for on the command line cannot be."""


def export(target: str, inputs: Sequence[str], output: str, platforms: str, precompile: bool) -> int:
    """Write a model as a program; return the exit code."""
    try:
        model, example = _find(target), Example(inputs)
        chosen = [name.strip() for name in platforms.split(",") if name.strip()] or None
        made = api.export(
            model,
            tuple(example.args),
            example.kwargs,
            dynamic_shapes=example.shapes(model),
            platforms=chosen,
            precompile=precompile,
            path=output,
        )
    except IsthmusError as error:
        return _fail(error)
    print(f"wrote {output} for {', '.join(made.spec['platforms'])}: {_inputs(made.spec)}")
    return 0


def run(path: str, inputs: Sequence[str], output: str | None) -> int:
    """Run a program on arrays of files and tell or write its results; return the exit code."""
    try:
        program = api.read(path)
        args, kwargs = _loaded(inputs)
        outputs = program(*args, **kwargs)
    except (IsthmusError, OSError, ValueError, TypeError, IndexError) as error:
        return _fail(error)
    found = {_label(place): np.asarray(leaf) for place, leaf in jax.tree_util.tree_leaves_with_path(outputs)}
    for name, array in found.items():
        print(f"{name}: {array.dtype}{list(array.shape)}")
        if output is None:
            print(array)
    if output is not None:
        # numpy adds the ending to a name, and not to an open file.
        with files.replacing(output if output.endswith(".npz") else f"{output}.npz") as file:
            np.savez(file, **found)  # type: ignore[arg-type]
    return 0


def _fail(error: Exception) -> int:
    print(
        f"isthmus: {str(error).removeprefix('isthmus.export: ').removeprefix('isthmus.load: ')}",
        file=sys.stderr,
    )
    return 1


def _find(target: str) -> Any:
    """Return the model that ``module:attr`` names, ready to compute."""
    module, _, path = target.partition(":")
    if not module or not path:
        raise _Misuse(f"{target!r} is no MODULE:ATTR, such as mypackage.models:make_model")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise _Misuse(f"{target} was not found: {error}") from error
    finally:
        sys.path.pop(0)
    model = found if isinstance(found, nn.Module) else found()
    if not isinstance(model, nn.Module):
        raise _Misuse(f"{target} gives {type(model).__name__}, which is no torch.nn.Module")
    return model.eval()


class Example:
    """Inputs as the command line tells them: tensors, and which of their sizes are dynamic."""

    def __init__(self, inputs: Sequence[str]) -> None:
        self.args: list[Tensor] = []
        self.kwargs: dict[str, Tensor] = {}
        self.dims: dict[str, Any] = {}
        self._shapes: dict[Any, dict[int, Any]] = {}
        for text in inputs:
            name, spec = _named(text)
            key = len(self.args) if name is None else name
            tensor, self._shapes[key] = self._tensor(spec)
            if name is None:
                self.args.append(tensor)
            else:
                self.kwargs[name] = tensor

    def shapes(self, model: nn.Module) -> Any:
        """Return torch's ``dynamic_shapes``, or None where every size is fixed."""
        if not self.dims:
            return None
        names = list(inspect.signature(model.forward).parameters)
        return {
            names[key] if isinstance(key, int) else key: shape or None for key, shape in self._shapes.items()
        }

    def _tensor(self, text: str) -> tuple[Tensor, dict[int, Any]]:
        """Return an input and its dynamic dims."""
        if text.endswith(".npy"):
            return torch.from_numpy(_array(text)), {}
        match = _SPEC.fullmatch(text)
        if match is None or match[1] not in _DTYPES:
            raise _Misuse(
                f"{text!r} is no input: write f32[2,8] or a file.npy; dtypes are {', '.join(_DTYPES)}"
            )
        sizes, dims = [], {}
        for at, part in enumerate(match[2].split(",") if match[2] else []):
            size = _SIZE.fullmatch(part.strip())
            if size is None or (size["high"] and not size["name"]):
                raise _Misuse(f"{part!r} in {text!r} is no size: write 8, batch=8, or length=8..64")
            sizes.append(int(size["size"]))
            if size["name"]:
                high = int(size["high"]) if size["high"] else None
                dims[at] = self.dims.setdefault(size["name"], torch.export.Dim(size["name"], max=high))
        dtype = _DTYPES[match[1]]
        drawn = dtype.is_floating_point or dtype.is_complex
        return torch.randn(sizes, dtype=dtype) if drawn else torch.zeros(sizes, dtype=dtype), dims


def _named(text: str) -> tuple[str | None, str]:
    name, equals, rest = text.partition("=")
    return (name, rest) if equals and name.isidentifier() else (None, text)


def _loaded(inputs: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    pairs = [_named(text) for text in inputs]
    args = [_array(file) for name, file in pairs if name is None]
    return args, {name: _array(file) for name, file in pairs if name is not None}


def _array(file: str) -> Any:
    try:
        return np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise _Misuse(f"{file} cannot be read as an array: {error}") from error


def _label(path: Any) -> str:
    return ".".join(str(getattr(part, "key", getattr(part, "idx", part))) for part in path) or "result"


def _inputs(spec: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_short(tree)}" for name, tree in spec["inputs"].items())


def _short(tree: Any) -> str:
    told = isinstance(tree, dict) and "dtype" in tree
    return f"{tree['dtype']}[{', '.join(map(str, tree['shape']))}]" if told else "(nested)"
