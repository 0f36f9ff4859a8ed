"""Run a program that Isthmus exported. This file needs JAX and numpy, and may be copied anywhere.

In Python ``load("out/")(x, mask=mask)``, in a shell ``python out/run.py x=x.npy mask=mask.npy``."""

import dataclasses
import hashlib
import json
import math
import pathlib
import sys
import zipfile
from typing import Any

import jax
import numpy as np
from jax import export


def load(path: Any) -> "Program":
    """Return the program in a folder, or in a file that ends in .isthmus."""
    spec = json.loads(b"{" + read(path, "program.json"))
    if spec["format"] > 3 or spec["convention"] > export.maximum_supported_calling_convention_version:
        raise ValueError(f"{path} is too new: isthmus {spec['isthmus']} and jax {spec['jax']} wrote it")
    data, weights = memoryview(read(path, "weights.safetensors", spec)), {}
    for name, leaf in spec["weights"].items():
        weights[name] = np.frombuffer(data[slice(*leaf["bytes"])], leaf["dtype"]).reshape(leaf["shape"])
    return Program(spec, read(path, "program.mlirbc", spec), weights)


def read(path: Any, name: str, spec: Any = None) -> bytes:
    """Return a part whose checksum is right; that of program.json, which has the others, is in its first line."""
    path, (file, digest) = pathlib.Path(path), spec["parts"][name] if spec else (name, "")
    raw = (path / pathlib.Path(file).name).read_bytes() if path.is_dir() else zipfile.ZipFile(path).read(file)
    data, digest = (raw, digest) if spec else (raw[79:], raw[12:76].decode("latin"))
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"{path}: {name} is damaged, or of an older Isthmus: copy or export it again")
    return data


class Program:
    """An exported program and its weights; one that has state replaces those that change."""

    def __init__(self, spec: dict[str, Any], bytecode: bytes, weights: Any, mesh: Any = None) -> None:
        self.spec, scope = spec, export.SymbolicScope(spec["constraints"])
        trees = {"dict": spec["weights"]}, {"dict": spec["inputs"]}, spec["results"]
        *leaves, results = (plain(tree, scope) for tree in trees)
        places = shardings(spec, mesh)
        leaves[0] = {name: leaf.update(sharding=places[name]) for name, leaf in leaves[0].items()}
        zeros = jax.custom_vjp(lambda weights, inputs: jax.tree.map(jax.numpy.zeros_like, results))
        zeros.defvjp(zeros, zeros)  # not a valid rule: asking for a gradient raises instead of giving zeros
        with jax.enable_x64(True):  # JAX exports a stub with this signature, whose bytecode is then replaced
            stub = export.export(jax.jit(zeros, keep_unused=True), platforms=spec["platforms"])(*leaves)
            self.exported = dataclasses.replace(stub, mlir_module_serialized=bytecode, fun_name=spec["name"])
            self.stub, self.inputs, self.weights = stub, leaves[1], jax.device_put(weights, places)
            self.run = jax.jit(self.exported.call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs for arrays, by position or by name; a format-2 program returns a flag for each check."""
        with jax.enable_x64(True):
            outputs, state, code = self.run(self.weights, self.accept(args, kwargs))
        if failed := int(np.append(True, code).argmin() if np.ndim(code) else code or 0):
            error, message = self.spec["conditions"][failed - 1]
            raise {"IndexError": IndexError, "ValueError": ValueError}.get(error, RuntimeError)(message)
        self.weights.update(state)
        return outputs

    def accept(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs as the program takes them, or say what is wrong with them."""
        named = dict(zip(self.inputs, args, strict=False)) | kwargs
        inputs = {name: None for name, tree in self.inputs.items() if tree is None} | named
        if len(named) < len(args) + len(kwargs) or inputs.keys() != self.inputs.keys():
            raise TypeError(f"the program takes {[*self.inputs]}; it got {len(args)} unnamed and {[*kwargs]}")
        sizes: dict[str, int] = {}
        return jax.tree.map_with_path(lambda p, leaf, v: check(p, leaf, v, sizes), self.inputs, inputs)


def check(path: Any, leaf: Any, value: Any, sizes: dict[str, int]) -> Any:
    """Return an input as an array; a size that has a name must be the same everywhere."""
    value = value if hasattr(value, "dtype") else np.asarray(value)
    pairs = zip(leaf.shape, value.shape, strict=False)
    shape = [n if isinstance(n, int) else sizes.setdefault(str(n), m) for n, m in pairs]
    if value.dtype != leaf.dtype or value.ndim != len(leaf.shape) or shape != [*value.shape]:
        right, got = (f"{each.dtype}{[*each.shape]}" for each in (leaf, value))
        raise ValueError(f"input {jax.tree_util.keystr(path)} must be {right} with {sizes}; it is {got}")
    return value


def plain(tree: Any, scope: Any) -> Any:
    """Return a tree of a signature as containers of shapes and dtypes."""
    if tree is None or isinstance(tree, list):
        return tree and [plain(part, scope) for part in tree]
    if "tuple" in tree:
        return tuple(plain(part, scope) for part in tree["tuple"])
    if "dict" in tree:
        return {name: plain(part, scope) for name, part in tree["dict"].items()}
    shape = export.symbolic_shape(", ".join(map(str, tree["shape"])), scope=scope)
    return jax.ShapeDtypeStruct(shape, np.dtype(tree["dtype"]))


def shardings(spec: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Return how each weight lies on the mesh that a program of split weights needs; for other programs, None."""
    if "mesh" not in spec:
        return dict.fromkeys(spec["weights"])
    axes, devices = spec["mesh"], jax.devices()
    count = math.prod(axes.values())
    if len(devices) < count:
        raise ValueError(
            f"the program is split over {count} devices, {axes}, and JAX has {len(devices)} here"
        )
    mesh = mesh or jax.sharding.Mesh(np.array(devices[:count]).reshape([*axes.values()]), [*axes])
    specs = {name: jax.P(*map(tuple, leaf["sharding"])) for name, leaf in spec["weights"].items()}
    return {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}


if __name__ == "__main__":
    named = {name: np.load(file) for name, file in (each.split("=", 1) for each in sys.argv[1:])}
    print(load(pathlib.Path(__file__).parent)(**named))
