"""``isthmus export`` and ``isthmus run``: write a model as a program, and run a program on arrays from files::

    isthmus export mypackage.models:make_model --args "i64[batch=2,length=8..64]" -o out/ --platforms cpu,cuda
    isthmus run out/ --input ids.npy -o logits.npz

``isthmus/cli.py`` parses the options and calls ``export`` and ``run``, which return the exit code. The command line is
checked before any work is done: platforms, where the output goes, the inputs, the model and whether it takes those
inputs. A mistake there is one line on stderr and exit code 2; a failure later is exit code 1.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor, nn

from isthmus._export import api
from isthmus._export.container import SUFFIX
from isthmus._runtime import files
from isthmus.errors import IsthmusError, first_line

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
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# "f32[2,8]", and within the brackets "8", "batch=8" or "length=8..64".
_SPEC = re.compile(r"(\w+)\[(.*)\]")
_SIZE = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<size>\d+)(?:\.\.(?P<high>\d+))?")


class _Misuse(IsthmusError):
    """The command line asks for what cannot be done."""


def export(target: str, inputs: Sequence[str], output: str, platforms: str, precompile: bool) -> int:
    """Write a model as a program; return the exit code."""
    try:
        chosen = _platforms(platforms)
        _check_program_path(Path(output))
        example = Example(inputs)
        model = _find(target)
        example.check(model, target)
        artifact = api.export(
            model,
            tuple(example.args),
            example.kwargs,
            dynamic_shapes=example.shapes(model),
            platforms=chosen,
            precompile=precompile,
            path=output,
        )
    except (IsthmusError, OSError) as error:
        return _fail(error)
    print(f"wrote {output} for {', '.join(artifact.spec['platforms'])}: {_inputs(artifact.spec)}")
    return 0


def run(path: str, inputs: Sequence[str], output: str | None) -> int:
    """Run a program on arrays of files and print or write its results; return the exit code."""
    try:
        if output is not None:
            _check_array_path(Path(output))
        program = _checked(lambda: api.read(path))
        args, kwargs = _loaded(inputs)
        _checked(lambda: program.accept(args, kwargs))
        outputs = program(*args, **kwargs)
        arrays = {
            _label(place): np.asarray(leaf) for place, leaf in jax.tree_util.tree_leaves_with_path(outputs)
        }
        if output is not None:
            # np.savez adds the suffix to a name, but not to an open file.
            with files.replacing(output if output.endswith(".npz") else f"{output}.npz") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
    except (IsthmusError, OSError, ValueError, TypeError, IndexError) as error:
        return _fail(error)
    for name, array in arrays.items():
        print(f"{name}: {array.dtype}{list(array.shape)}")
        if output is None:
            print(array)
    return 0


def _fail(error: Exception) -> int:
    """Print an error; return 2 for a wrong command line, 1 for a failure of the work."""
    print(
        f"isthmus: {str(error).removeprefix('isthmus.export: ').removeprefix('isthmus.load: ')}",
        file=sys.stderr,
    )
    return 2 if isinstance(error, _Misuse) else 1


def _checked(check: Callable[[], Any]) -> Any:
    """Return ``check()``, which reads a file or an input; an error of it is a mistake in the command line."""
    try:
        return check()
    except (IsthmusError, OSError, ValueError, TypeError) as error:
        raise _Misuse(str(error)) from error


def _platforms(text: str) -> list[str] | None:
    """Return the platforms that a list names, or None for the one at hand."""
    if not text:
        return None
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in PLATFORMS]
    if unknown:
        named = ", ".join(repr(name) for name in unknown)
        raise _Misuse(f"--platforms {text}: {named} is no platform; choose from {', '.join(PLATFORMS)}")
    return list(dict.fromkeys(names))


def _check_program_path(path: Path) -> None:
    """Raise unless a program can be written to a path: a folder that is made if need be, or a file.isthmus."""
    if path.suffix == SUFFIX and path.is_dir():
        raise _Misuse(f"-o {path}: is a folder, and a name that ends in {SUFFIX} is that of a file")
    if path.suffix != SUFFIX and path.exists() and not path.is_dir():
        raise _Misuse(f"-o {path}: is a file; name a folder, or a file that ends in {SUFFIX}")
    _check_writable(path, makes_folders=True)


def _check_array_path(path: Path) -> None:
    """Raise unless arrays can be written to a file of this name."""
    path = path if path.suffix == ".npz" else path.with_name(path.name + ".npz")  # as NumPy will
    if path.is_dir():
        raise _Misuse(f"-o {path}: is a folder; name a file that ends in .npz")
    _check_writable(path, makes_folders=False)


def _check_writable(path: Path, makes_folders: bool) -> None:
    """Raise unless a file or folder at ``path`` can be made or replaced."""
    if path.is_file() and not os.access(path, os.W_OK):
        raise _Misuse(f"-o {path}: the file is there already and cannot be written to")
    folder = path if path.is_dir() else path.absolute().parent
    while makes_folders and not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise _Misuse(f"-o {path}: there is no folder {folder}")
    try:
        # Permission bits say nothing about a read-only file system, and the superuser ignores them.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _Misuse(f"-o {path}: nothing can be written to {folder} ({error.strerror})") from error


def _find(target: str) -> nn.Module:
    """Return the model that ``module:attr`` names, in eval mode; a function there is called for it."""
    module, _, path = target.partition(":")
    if not module or not path:
        raise _Misuse(f"{target!r} is no MODULE:ATTR, such as mypackage.models:make_model")
    # A console script has its own folder first on the path, and not the working directory.
    sys.path.insert(0, os.getcwd())
    try:
        model: Any = importlib.import_module(module)
        for part in path.split("."):
            model = getattr(model, part)
    except (ImportError, AttributeError) as error:
        raise _Misuse(f"{target} was not found: {error}") from error
    except Exception as error:
        raise _Misuse(f"{target}: importing {module} raised {_raised(error)}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise _Misuse(f"{target} is {type(model).__name__}, which is no torch.nn.Module")
        try:
            model = model()
        except Exception as error:
            raise _Misuse(f"{target}() raised {_raised(error)}") from error
    if not isinstance(model, nn.Module):
        raise _Misuse(f"{target} gives {type(model).__name__}, which is no torch.nn.Module")
    return model.eval()


def _raised(error: Exception) -> str:
    """Return an exception of a user's code in a line, with the place it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(str(error))}{place}"


class Example:
    """Inputs as the command line names them: tensors, and which of their sizes are dynamic."""

    def __init__(self, inputs: Sequence[str]) -> None:
        self.args: list[Tensor] = []
        self.kwargs: dict[str, Tensor] = {}
        self.dims: dict[str, Any] = {}
        self._sizes: dict[str, tuple[int, int | None]] = {}
        self._shapes: dict[Any, dict[int, Any]] = {}
        for text in inputs:
            name, spec = _named(text)
            key = len(self.args) if name is None else name
            if key in self._shapes:
                raise _Misuse(f"--args has two inputs called {name}")
            tensor, self._shapes[key] = self._tensor(spec)
            if name is None:
                self.args.append(tensor)
            else:
                self.kwargs[name] = tensor

    def check(self, model: nn.Module, target: str) -> None:
        """Raise unless the model takes such inputs by position and by name."""
        signature = inspect.signature(model.forward)
        try:
            signature.bind(*self.args, **self.kwargs)
        except TypeError as error:
            takes = ", ".join(signature.parameters) or "nothing"
            raise _Misuse(
                f"--args does not fit {target}: {error}; its forward takes {takes}, and --args gives "
                f"{len(self.args)} unnamed and {', '.join(self.kwargs) or 'none'} by name"
            ) from error
        # torch.export names dynamic sizes by the parameter they belong to, and *args has no names.
        kinds = [p.kind for p in list(signature.parameters.values())[: len(self.args)]]
        if self.dims and (len(kinds) < len(self.args) or inspect.Parameter.VAR_POSITIONAL in kinds):
            raise _Misuse(
                f"--args gives sizes names, and {target} takes *args: only inputs with names have them"
            )

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
            array = _array(text)
            try:
                return torch.from_numpy(array), {}
            except TypeError as error:
                raise _Misuse(f"{text} holds {array.dtype}, which no tensor has") from error
        match = _SPEC.fullmatch(text)
        if match is None or match[1] not in _DTYPES:
            raise _Misuse(
                f"{text!r} is no input: write f32[2,8] or a file.npy; dtypes are {', '.join(_DTYPES)}"
            )
        sizes, dims = [], {}
        for dim, part in enumerate(match[2].split(",") if match[2] else []):
            size = _SIZE.fullmatch(part.strip())
            if size is None or (size["high"] and not size["name"]):
                raise _Misuse(f"{part!r} in {text!r} is no size: write 8, batch=8, or length=8..64")
            sizes.append(int(size["size"]))
            if size["name"]:
                dims[dim] = self._dim(size["name"], int(size["size"]), size["high"])
        dtype = _DTYPES[match[1]]
        # Integers are zeros: they may be indices, and 0 is in range wherever there is anything to index.
        is_inexact = dtype.is_floating_point or dtype.is_complex
        return torch.randn(sizes, dtype=dtype) if is_inexact else torch.zeros(sizes, dtype=dtype), dims

    def _dim(self, name: str, size: int, limit: str | None) -> Any:
        """Return the dynamic dim of a name, which has one size in the example and one limit."""
        high = int(limit) if limit else None
        if high is not None and high < size:
            raise _Misuse(f"--args: {name}={size}..{high} ends below where it begins")
        known = self._sizes.setdefault(name, (size, high))
        if known[0] != size or (high is not None and known[1] != high):
            raise _Misuse(f"--args gives {name} two values, {_range(*known)} and {_range(size, high)}")
        return self.dims.setdefault(name, torch.export.Dim(name, max=high))


def _range(size: int, high: int | None) -> str:
    return str(size) if high is None else f"{size}..{high}"


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
    is_array = isinstance(tree, dict) and "dtype" in tree
    return f"{tree['dtype']}[{', '.join(map(str, tree['shape']))}]" if is_array else "(nested)"
