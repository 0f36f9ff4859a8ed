"""``Artifact``: an exported model in memory, and how it becomes files.

``api.export`` makes one from what ``trace.py`` traced. It holds JAX's ``Exported`` (the StableHLO), the weights as
arrays and ``spec``, the signature that ``program.json`` stores::

    {"format": 3, "name": "Linear", "platforms": ["cpu"], "inputs": {"input": {"dtype": "float32", "shape": [1, 3]}},
     "results": {...}, "weights": {"weight": {"dtype": "float32", "shape": [2, 3]}, ...}, "conditions": [], ...}

``container.py`` writes and reads the files, ``loader.py`` (copied beside them as ``run.py``) runs the program without
torch, ``module.py`` runs it as a torch module. Nothing in an artifact may name files of the machine that exported it:
JAX puts locations into StableHLO and executables, and they are taken out here.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import torch
from jax import export

from isthmus._device.core.host_tensors import cpu_from_array
from isthmus._export import container, executables, loader, padded, signature_trees
from isthmus._export.meshes import mesh_for
from isthmus._export.trace import Traced
from isthmus._graph.graph import Graph
from isthmus._interop.arrays import to_jax
from isthmus._runtime import placement
from isthmus._runtime.compiler import portable, scoped_x64
from isthmus._runtime.dtypes import to_torch_dtype
from isthmus._runtime.private import forgetting_callers, without_locations
from isthmus.errors import ExportError

if TYPE_CHECKING:
    from isthmus._export.module import ProgramModule

# The dtypes that safetensors has.
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
    graph: Graph
    """What is computed, as it was given to JAX: ``print`` shows it; it is not written to files."""
    function: Callable[..., Any]
    """The program as JAX traces it: of the weights and the inputs."""
    dims: dict[str, Any]
    """Its dynamic dims by name."""
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
        mesh = mesh_for(self.spec)
        return loader.Program(self.spec, self.exported.mlir_module_serialized, self.weights, mesh)

    def precompile(self, *args: Any, **kwargs: Any) -> None:
        """Add an executable for this device and inputs of these sizes.

        It is used where it fits and where ``isthmus.load`` is called with ``executables=True``.
        """
        if "mesh" in self.spec:
            raise ExportError(
                "isthmus.export: executables are for one device, and this program is for a mesh\n"
                "  to go on     export it without precompile: it is compiled when it is called first"
            )
        program = self.program()
        inputs = program.accept(to_jax(args), to_jax(kwargs))
        with scoped_x64(), forgetting_callers():  # else the executable would name the callers' files
            compiled = jax.jit(_Call(program.exported)).lower(program.weights, inputs).compile()
        about, content = executables.packed(compiled, inputs)
        known = [each for each in self.spec["executables"] if each != about]
        self.spec["executables"] = [*known, about]
        self.executables[about["file"]] = content

    def precompile_buckets(self, buckets: Mapping[str, Sequence[int]]) -> None:
        """Add executables for this device that serve every size up to those of ``buckets``, on padded arrays.

        Arguments:
            buckets: padded sizes for each dynamic dim, such as ``{"batch": [8], "length": [16, 64]}``.

        They are used where they fit and where ``isthmus.load`` is called with ``executables=True``. Sizes larger than
        all buckets are compiled exactly. ``isthmus.errors.ExportError`` is raised for a program without padding rules.
        """
        if "mesh" in self.spec:
            raise ExportError(
                "isthmus.export: executables are for one device, and this program is for a mesh"
            )
        with scoped_x64(), portable():
            for compiled, about in padded.compiled(
                self.function, self.exported, self.dims, buckets, self.spec["constraints"]
            ):
                entry, content = executables.packed_bucket(compiled, about)
                known = [each for each in self.spec["buckets"] if each != entry]
                self.spec["buckets"] = [*known, entry]
                self.executables[entry["file"]] = content

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
    """A program as an object without code of its own: JAX writes the file of a function into its executable."""

    def __init__(self, exported: export.Exported) -> None:
        self.exported = exported

    def __call__(self, weights: dict[str, jax.Array], inputs: dict[str, Any]) -> Any:
        with forgetting_callers():  # this method is a caller too
            return self.exported.call(weights, inputs)


def artifact(traced: Traced, name: str) -> Artifact:
    """Return a traced program with its signature and the versions it was made by."""
    # Locations are full paths of files on this machine.
    bytecode = without_locations(traced.exported.mlir_module_serialized)
    exported = dataclasses.replace(traced.exported, mlir_module_serialized=bytecode)
    args, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    # Arrays never change, so training the model further does not change the artifact.
    weights = to_jax(traced.weights)
    mesh = placement.home.mesh if placement.home is not None and exported.nr_devices > 1 else None
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
        "weights": {
            key: {**signature_trees.array(value), **({} if mesh is None else _split(weights[key]))}
            for key, value in args[0].items()
        },
        "kinds": traced.kinds,
        "tied": traced.tied,
        "executables": [],
        "buckets": [],
    }
    if mesh is not None:
        spec["mesh"] = dict(mesh.shape)
    return Artifact(exported, weights, spec, traced.graph, traced.function, traced.dims)


def _split(array: jax.Array) -> dict[str, Any]:
    """Return the entry of a weight that says which axes of the mesh split each dim."""
    sharding = placement.sharding_of(array)
    parts = [] if sharding is None else [(part,) if isinstance(part, str) else part for part in sharding.spec]
    return {"sharding": [list(part or ()) for part in parts]}


def _stored(weights: Mapping[str, jax.Array]) -> bytes:
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise ExportError(
            "isthmus.export: weights are written with safetensors: pip install safetensors"
        ) from error
    return save({name: _tensor(array) for name, array in weights.items()})


def _tensor(array: jax.Array) -> torch.Tensor:
    """Return an array as safetensors takes it; other dtypes are written as bytes, and the signature names them."""
    tensor = cpu_from_array(array, to_torch_dtype(array.dtype))
    return tensor if array.dtype.name in _KNOWN else tensor.reshape(-1).view(torch.uint8)
