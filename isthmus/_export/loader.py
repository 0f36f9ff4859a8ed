"""Run a program that Isthmus exported. This file needs JAX and numpy, and may be copied anywhere.

In Python ``load("out/")(x, mask=mask)``, in a shell ``python out/run.py x=x.npy mask=mask.npy``.
"""

import dataclasses
import json
import pathlib
import sys
import zipfile
from typing import Any

import jax
import numpy as np
from jax import export


def load(path: Any) -> "Program":
    """Return the program in a folder, or in a file that ends in .isthmus."""
    path = pathlib.Path(path)
    read = (lambda name: (path / name).read_bytes()) if path.is_dir() else zipfile.ZipFile(path).read
    spec = json.loads(read("program.json"))
    if spec["format"] != 1 or spec["convention"] > export.maximum_supported_calling_convention_version:
        raise ValueError(f"{path} is too new: isthmus {spec['isthmus']} and jax {spec['jax']} wrote it")
    data, weights = memoryview(read("weights.safetensors")), {}
    start = 8 + int.from_bytes(data[:8], "little")
    for name, about in json.loads(bytes(data[8:start])).items():
        leaf, (low, high) = spec["weights"][name], about["data_offsets"]
        weights[name] = np.frombuffer(data[start + low : start + high], leaf["dtype"]).reshape(leaf["shape"])
    return Program(spec, read("program.mlirbc"), weights)


class Program:
    """An exported program and its weights; one that has state replaces those that change."""

    def __init__(self, spec: dict[str, Any], bytecode: bytes, weights: dict[str, Any]) -> None:
        self.spec, scope = spec, export.SymbolicScope(spec["constraints"])
        self.inputs = {name: plain(tree, scope) for name, tree in spec["inputs"].items()}
        with jax.enable_x64(True):
            self.weights = jax.device_put(weights)
            leaves = [plain(tree, scope) for tree in ({"dict": spec["weights"]}, spec["results"])]
            self.exported = exported(spec, leaves[0], self.inputs, leaves[1], bytecode)
            self.run = jax.jit(self.exported.call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns for arrays that are given by position or by name."""
        with jax.enable_x64(True):
            outputs, state, held = self.run(self.weights, self.accept(args, kwargs))
        for ok, (error, message) in zip(np.asarray(held), self.spec["conditions"], strict=True):
            if not ok:
                raise {"IndexError": IndexError, "ValueError": ValueError}.get(error, RuntimeError)(message)
        self.weights.update(state)
        return outputs

    def accept(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs as the program takes them, or say what is wrong with them."""
        given = {n: None for n, tree in self.inputs.items() if tree is None}
        given |= dict(zip(self.inputs, args, strict=False)) | kwargs
        twice = len(args) + len(kwargs) - len({*[*self.inputs][: len(args)], *kwargs})
        if twice or given.keys() != self.inputs.keys():
            raise TypeError(f"the program takes {[*self.inputs]}; it got {len(args)} unnamed and {[*kwargs]}")
        sizes: dict[str, int] = {}
        return jax.tree.map_with_path(lambda p, leaf, v: check(p, leaf, v, sizes), self.inputs, given)


def check(path: Any, leaf: Any, value: Any, sizes: dict[str, int]) -> Any:
    """Return an input as an array; a size that has a name must be the same everywhere."""
    value = value if hasattr(value, "dtype") else np.asarray(value)
    pairs = zip(leaf.shape, value.shape, strict=False)
    shape = [n if isinstance(n, int) else sizes.setdefault(str(n), m) for n, m in pairs]
    if value.dtype != leaf.dtype or value.ndim != len(leaf.shape) or shape != [*value.shape]:
        wanted, got = f"{leaf.dtype}{[*leaf.shape]}", f"{value.dtype}{[*value.shape]}"
        raise ValueError(f"input {jax.tree_util.keystr(path)} must be {wanted} with {sizes}; it is {got}")
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


def exported(spec: Any, weights: Any, inputs: Any, results: Any, bytecode: bytes) -> export.Exported:
    """Return the program for jax.export: JAX makes one of this signature, which is then given the bytecode."""
    stub = jax.custom_vjp(lambda weights, inputs: jax.tree.map(jax.numpy.zeros_like, results))
    stub.defvjp(stub, stub)  # no such rule: to ask for a gradient is an error, and not zeros
    made = export.export(jax.jit(stub, keep_unused=True), platforms=spec["platforms"])(weights, inputs)
    return dataclasses.replace(made, mlir_module_serialized=bytecode, fun_name=spec["name"])


if __name__ == "__main__":
    named = {name: np.load(file) for name, file in (each.split("=", 1) for each in sys.argv[1:])}
    print(load(pathlib.Path(__file__).parent)(**named))
