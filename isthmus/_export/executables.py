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


def shapes(inputs: Any) -> list[list[int]]:
    """Return the shapes of a program's inputs, in JAX's order."""
    return [list(leaf.shape) for leaf in jax.tree.leaves(inputs)]


def attach(program: Any, path: Any) -> Any:
    """Return a program that runs the executable of this device, where its folder or file has one."""
    known = program.spec["executables"]
    fitting = [each for each in known if each["target"] == target()]
    if not fitting:
        have = "; ".join(each["target"] for each in known) or "none"
        message = f"{path} has no executable for {target()}, it has {have}: the program is compiled when it is called"
        warnings.warn(message, stacklevel=2)
    for each in fitting:
        content = _content(pathlib.Path(path), *program.spec["parts"][each["file"]])
        compiled = serialize_executable.deserialize_and_load(*pickle.loads(content))
        program.run = _choose(each["shapes"], compiled, program.run)
    return program


def _content(path: pathlib.Path, file: str, digest: str) -> bytes:
    name = pathlib.Path(file).name
    content = (path / name).read_bytes() if path.is_dir() else zipfile.ZipFile(path).read(name)
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"{path}: {file} is damaged: copy or export it again")
    return content


def _choose(compiled_for: list[list[int]], compiled: Any, otherwise: Any) -> Any:
    def run(weights: Any, inputs: Any) -> Any:
        return (compiled if shapes(inputs) == compiled_for else otherwise)(weights, inputs)

    return run
