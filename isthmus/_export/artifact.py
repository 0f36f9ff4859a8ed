"""What is written: a folder, or one file, of StableHLO bytecode, weights, a signature, and a loader."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import torch
from jax import export

from isthmus._device.core.host_tensors import cpu_from_array
from isthmus._export import container, executables, loader, signature_trees
from isthmus._export.trace import Traced
from isthmus._interop.arrays import to_jax
from isthmus._runtime.compiler import scoped_x64
from isthmus._runtime.dtypes import to_torch_dtype
from isthmus._runtime.private import forgetting_callers, without_locations
from isthmus.errors import ExportError

if TYPE_CHECKING:
    from isthmus._export.module import ProgramModule

_KNOWN = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
}


@dataclass
class Artifact:
    """An exported model: run it with ``module()``, write it with ``save(path)``."""

    exported: export.Exported
    weights: dict[str, jax.Array]
    spec: dict[str, Any]
    executables: dict[str, bytes] = field(default_factory=dict)

    @property
    def stablehlo(self) -> str:
        """The program as text, for other compilers."""
        return str(self.exported.mlir_module())

    def module(self) -> ProgramModule:
        """Return the program as a torch module on "jax"."""
        from isthmus._export.module import ProgramModule

        return ProgramModule(self.program())

    def program(self) -> loader.Program:
        """Return the program as a function of arrays."""
        return loader.Program(self.spec, self.exported.mlir_module_serialized, self.weights)

    def precompile(self, *args: Any, **kwargs: Any) -> None:
        """Add an executable for this device and inputs like these; it is used where it fits, if it is trusted."""
        program = self.program()
        inputs = program.accept(to_jax(args), to_jax(kwargs))
        with scoped_x64(), forgetting_callers():  # JAX would write down their files, by their whole paths
            compiled = jax.jit(_Call(program.exported)).lower(program.weights, inputs).compile()
        about, content = executables.packed(compiled, inputs)
        known = [each for each in self.spec["executables"] if each != about]
        self.spec["executables"] = [*known, about]
        self.executables[about["file"]] = content

    def save(self, path: str | Path) -> None:
        """Write a folder, or one file if the path ends in ``.isthmus``; a program that is there already is replaced.

        The old one is whole until the new one is: a full disk or a killed process loses nothing.
        """
        path = Path(path)
        if path.suffix != container.SUFFIX and path.is_file():
            raise ExportError(
                f"isthmus.export: {path} is a file; name a folder, or a file that ends in {container.SUFFIX}"
            )
        parts = {
            **self.executables,
            "program.mlirbc": bytes(self.exported.mlir_module_serialized),
            "weights.safetensors": _stored(self.weights),
        }
        scripts = {"run.py": Path(loader.__file__).read_bytes()}
        if self.executables:
            scripts["precompiled.py"] = Path(executables.__file__).read_bytes()
        container.save(path, self.spec, parts, scripts)


class _Call:
    """A program as a callable without code, whose file JAX would write into an executable."""

    def __init__(self, exported: export.Exported) -> None:
        self.exported = exported

    def __call__(self, weights: dict[str, Any], inputs: dict[str, Any]) -> Any:
        with forgetting_callers():  # this function is one
            return self.exported.call(weights, inputs)


def artifact(traced: Traced, name: str) -> Artifact:
    """Return what was traced with its signature and where it comes from."""
    # Locations name files of this machine, by their whole paths.
    bytecode = without_locations(traced.exported.mlir_module_serialized)
    exported = dataclasses.replace(traced.exported, mlir_module_serialized=bytecode)
    args, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    spec = {
        "format": container.FORMAT,
        "name": name,
        "isthmus": sys.modules["isthmus"].__version__,
        "torch": torch.__version__,
        "jax": jax.__version__,
        "convention": exported.calling_convention_version,
        "platforms": list(exported.platforms),
        "constraints": traced.constraints,
        "inputs": {
            key: signature_trees.describe(args[1][key], signature_trees.array) for key in traced.inputs
        },
        "fixed": traced.fixed,
        "results": traced.results,
        "conditions": traced.conditions,
        "weights": {key: signature_trees.array(value) for key, value in args[0].items()},
        "kinds": traced.kinds,
        "tied": traced.tied,
        "executables": [],
    }
    # Arrays do not change, so that what the model learns from now on is not the program's.
    return Artifact(exported, to_jax(traced.weights), spec)


def _stored(weights: Mapping[str, jax.Array]) -> bytes:
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise ExportError(
            "isthmus.export: weights are written with safetensors: pip install safetensors"
        ) from error
    return save({name: _tensor(array) for name, array in weights.items()})


def _tensor(array: jax.Array) -> torch.Tensor:
    """Return what safetensors takes; a dtype it does not know is written as bytes, and the signature names it."""
    found = cpu_from_array(array, to_torch_dtype(array.dtype))
    return found if array.dtype.name in _KNOWN else found.reshape(-1).view(torch.uint8)
