"""Executables beside an exported program, so that it starts without compiling. This file needs no torch either.

They are pickles, which run code when they are read: attach only those whose author you trust.
"""

import hashlib
import pathlib
import pickle
import platform
import warnings
import zipfile
import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable


def target() -> str:
    """Return the target of executables made here: the device, XLA's build, and a CPU's instruction sets."""
    device = jax.devices()[0]
    build = f"{device.client.platform_version} {platform.machine()}"
    info = pathlib.Path("/proc/cpuinfo")
    if device.platform == "cpu" and info.exists():
        lines = info.read_text().splitlines()
        build += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{device.platform} ({device.device_kind}), jax {jax.__version__}, build {zlib.crc32(build.encode()):08x}"


def packed(compiled: Any, inputs: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the entry of an executable in the signature (target, shapes, file) and its content."""
    content = pickle.dumps(serialize_executable.serialize(compiled))
    file = f"executable-{zlib.crc32(content):08x}.bin"
    return {"target": target(), "shapes": shapes(inputs), "file": file}, content


def packed_bucket(compiled: Any, about: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the entry of an executable for padded inputs in the signature and its content."""
    content = pickle.dumps(serialize_executable.serialize(compiled))
    file = f"executable-{zlib.crc32(content):08x}.bin"
    return {"target": target(), "file": file, **about}, content


def shapes(inputs: Any) -> list[list[int]]:
    """Return the shapes of a program's inputs, in JAX's order."""
    return [list(leaf.shape) for leaf in jax.tree.leaves(inputs)]


def attach(program: Any, path: Any) -> Any:
    """Return a program that runs the executable of this device, where its folder or file has one."""
    known = [*program.spec["executables"], *program.spec.get("buckets", [])]
    fitting = [each for each in known if each["target"] == target()]
    # Tried last to first: executables for exact sizes, then small buckets before large ones.
    fitting.sort(key=lambda each: [-1, *[-n for n in each["bounds"]]] if "bounds" in each else [0])
    if not fitting:
        have = "; ".join(each["target"] for each in known) or "none"
        message = f"{path} has no executable for {target()}, it has {have}: the program is compiled when it is called"
        warnings.warn(message, stacklevel=2)
    for each in fitting:
        content = _content(pathlib.Path(path), *program.spec["parts"][each["file"]])
        compiled = serialize_executable.deserialize_and_load(*pickle.loads(content))
        choose = _choose_padded if "bounds" in each else _choose
        program.run = choose(each, compiled, program.run)
    return program


def _content(path: pathlib.Path, file: str, digest: str) -> bytes:
    name = pathlib.Path(file).name
    content = (path / name).read_bytes() if path.is_dir() else zipfile.ZipFile(path).read(name)
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"{path}: {file} is damaged: copy or export it again")
    return content


def _choose(entry: dict[str, Any], compiled: Any, otherwise: Any) -> Any:
    def run(weights: Any, inputs: Any) -> Any:
        return (compiled if shapes(inputs) == entry["shapes"] else otherwise)(weights, inputs)

    return run


def _choose_padded(entry: dict[str, Any], compiled: Any, otherwise: Any) -> Any:
    """Return a function that runs an executable for inputs up to its padded sizes and cuts the results on the host."""

    def run(weights: Any, inputs: Any) -> Any:
        pairs = zip(entry["dims"], shapes(inputs), strict=True)
        sizes = {name: n for dims, shape in pairs for name, n in zip(dims, shape, strict=True)}
        true = [sizes[name] for name in entry["names"]]
        if not all(a <= n <= b for a, n, b in zip(entry["least"], true, entry["bounds"], strict=True)):
            return otherwise(weights, inputs)
        leaves, tree = jax.tree.flatten(inputs)
        filled = [_filled(leaf, shape) for leaf, shape in zip(leaves, entry["shapes"], strict=True)]
        results, dims = compiled(weights, jax.tree.unflatten(tree, filled), np.array(true, np.int32))
        left = iter(np.asarray(dims).tolist())
        return jax.tree.map(lambda leaf: _cut(leaf, [next(left) for _ in leaf.shape]), results)

    return run


def _filled(leaf: Any, shape: list[int]) -> Any:
    if list(leaf.shape) == shape:
        return leaf
    padded = np.zeros(shape, leaf.dtype)
    padded[tuple(slice(n) for n in leaf.shape)] = np.asarray(leaf)
    return padded


def _cut(leaf: Any, shape: list[int]) -> Any:
    if list(leaf.shape) == shape:
        return leaf
    return jax.device_put(np.ascontiguousarray(np.asarray(leaf)[tuple(slice(n) for n in shape)]))
