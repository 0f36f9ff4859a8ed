"""The folder or file an exported program is stored in: written so that nothing is lost, read so that nothing is wrong.

``program.json`` is the signature. It names the file of every other part with its checksum (sha256), and its first line
is the checksum of the others:

    {"sha256": "9f86d081...",
     "format": 2,
     "parts": {"weights.safetensors": ["weights.safetensors", "5e884898..."], ...},

A folder is replaced by writing the new parts beside the old ones, under other names where those are taken, and then
``program.json`` in one step: whenever a process is killed, ``program.json`` names parts that are there and whole.
Files of others in the folder are left alone.

``read`` is the strict reader of ``isthmus.load``. The loader that is copied beside programs checks the same checksums;
``read`` also refuses what nobody writes by accident: links, names that lead elsewhere, ranges that overlap.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import jax
import numpy as np
from jax import export

from isthmus._export import loader
from isthmus._runtime import files
from isthmus._runtime.private import entry_type, entry_type_if_known
from isthmus.errors import DamagedFile, ExportError

FORMAT = 2
SUFFIX = ".isthmus"
"""A path that ends so is one file; any other is a folder."""
_SIGNATURE, _PROGRAM, _WEIGHTS = "program.json", "program.mlirbc", "weights.safetensors"
_OURS = re.compile(
    r"program(-[0-9a-f]{8})?\.mlirbc|weights(-[0-9a-f]{8})?\.safetensors|executable-[0-9a-f-]{8,17}\.bin"
)
"""What parts are called: in a folder, those that ``program.json`` does not name are of an older program."""
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RecursionError, ArithmeticError)
_REMEDY = "copy it again from where it came, or export the model again"


def save(
    path: Path, spec: Mapping[str, Any], parts: Mapping[str, bytes], scripts: Mapping[str, bytes]
) -> None:
    """Write a program to a folder, or to one file if the path ends in ``.isthmus``, whole or not at all.

    ``parts`` are data, with checksums; ``scripts`` are code for people, without.
    """
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}
    spec = {**spec, "weights": _placed(spec["weights"], parts[_WEIGHTS])}
    if path.suffix == SUFFIX:
        path.parent.mkdir(parents=True, exist_ok=True)
        named = {name: [name, digest] for name, digest in digests.items()}
        with files.replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
            for name, content in {**parts, **scripts, _SIGNATURE: _sealed({**spec, "parts": named})}.items():
                archive.writestr(zipfile.ZipInfo(name), content)
        return
    path.mkdir(parents=True, exist_ok=True)
    with files.locked(path):
        taken = _taken(path)
        named = {name: [_free(name, digest, taken), digest] for name, digest in digests.items()}
        for name, content in parts.items():
            files.write(path / named[name][0], content)
        for name, content in scripts.items():
            files.write(path / name, content)
        files.write(path / _SIGNATURE, _sealed({**spec, "parts": named}))
        kept = {file for file, _ in named.values()}
        for left in path.iterdir():
            if _OURS.fullmatch(left.name) and left.name not in kept:
                left.unlink(missing_ok=True)


def read(path: Path) -> loader.Program:
    """Return the program at a path, if it is as it was written."""
    for last in (False, False, True):
        before = _version(path)
        try:
            return _read(path)
        except (DamagedFile, FileNotFoundError):
            if last or _version(path) == before:
                raise  # else another process replaced it meanwhile
    raise AssertionError  # the last try returns or raises


def part(path: Path, spec: Any, name: str) -> bytes:
    """Return the content of one part, if it is as it was written."""
    try:
        file, digest = spec["parts"][name] if spec else (name, "")
        if not isinstance(file, str) or not isinstance(digest, str) or PurePath(file).name != file:
            raise ValueError(f"{file!r} is no name of a file beside {_SIGNATURE}")
        if path.is_dir():
            if not stat.S_ISREG((path / file).lstat().st_mode):
                raise ValueError(f"{file} is a link or no file")
        else:
            _check_archive(path, file)
        return loader.read(path, name, spec)
    except FileNotFoundError as error:
        raise DamagedFile(path, name, "it is not there", _REMEDY) from error
    except OSError:
        raise  # no fault of the file's
    except Exception as error:  # zipfile raises a dozen types for files that are none
        raise DamagedFile(path, name, _reason(error), _REMEDY) from error


def _read(path: Path) -> loader.Program:
    text = part(path, None, _SIGNATURE)
    try:
        spec = json.loads(b"{" + text, object_pairs_hook=_unique)
        known = spec["format"] == FORMAT
        known = known and spec["convention"] <= export.maximum_supported_calling_convention_version
        writer = f"isthmus {spec['isthmus']} and jax {spec['jax']}"
    except _MALFORMED as error:
        raise DamagedFile(path, _SIGNATURE, _reason(error), _REMEDY) from error
    if not known:
        raise ExportError(
            f"isthmus.load: {path} is too new: {writer} wrote it\n"
            f"  to go on     update isthmus and jax, or export the model again"
        )
    data, bytecode = part(path, spec, _WEIGHTS), part(path, spec, _PROGRAM)
    try:
        weights = _arrays(data, spec["weights"])
    except _MALFORMED as error:
        raise DamagedFile(path, _WEIGHTS, _reason(error), _REMEDY) from error
    try:
        _check_names(spec)
        program = loader.Program(spec, bytecode, weights)
        _check_types(program)
        return program
    except (OSError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # such as a device without memory
    except Exception as error:  # MLIR's are of no common type
        raise DamagedFile(path, _SIGNATURE, _reason(error), _REMEDY) from error


def _sealed(spec: Mapping[str, Any]) -> bytes:
    """Return a signature as JSON, with the checksum of all other lines in the first."""
    rest = json.dumps(spec, indent=1).removeprefix("{\n").encode()
    return b'{"sha256": "%s",\n' % hashlib.sha256(rest).hexdigest().encode() + rest


def _placed(leaves: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """Return what the signature tells of the weights, with the bytes of the file that each takes."""
    start, header = _header(data)
    placed = {}
    for name, leaf in leaves.items():
        low, high = header[name]["data_offsets"]
        placed[name] = {**leaf, "bytes": [start + low, start + high]}
    return placed


def _header(data: bytes) -> tuple[int, dict[str, Any]]:
    """Return where the arrays of a safetensors file start, and what it tells of them."""
    start = 8 + int.from_bytes(data[:8], "little")
    if start > len(data):
        raise ValueError(f"its header takes {start - 8} bytes, and the file has {len(data)}")
    header = json.loads(data[8:start], object_pairs_hook=_unique)
    header.pop("__metadata__", None)
    return start, header


def _arrays(data: bytes, leaves: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights; together they must take every byte behind the header, and each byte once."""
    at, header = _header(data)
    if header.keys() != leaves.keys():
        raise ValueError(f"it has {sorted(header)}, and {_SIGNATURE} {sorted(leaves)}")
    start, found = at, {}
    for name in sorted(leaves, key=lambda name: leaves[name]["bytes"]):
        shape, dtype, (low, high) = (
            leaves[name]["shape"],
            np.dtype(leaves[name]["dtype"]),
            leaves[name]["bytes"],
        )
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name} has the shape {shape}")
        if (low, high) != (at, at + dtype.itemsize * math.prod(shape)):
            raise ValueError(f"{name} takes bytes {low} to {high}, which does not fit {dtype}{shape} at {at}")
        if header[name]["data_offsets"] != [low - start, high - start]:
            raise ValueError(f"{name} is elsewhere in its header than in {_SIGNATURE}")
        found[name] = np.frombuffer(data, dtype, math.prod(shape), low).reshape(shape)
        at = high
    if at != len(data):
        raise ValueError(f"it has {len(data) - at} bytes too many")
    return found


def _check_names(spec: dict[str, Any]) -> None:
    """Refuse a signature whose lists do not fit each other."""
    weights, tied, conditions = spec["weights"], spec["tied"], spec["conditions"]
    if spec["kinds"].keys() != weights.keys() | tied.keys() or not set(tied.values()) <= weights.keys():
        raise ValueError(
            f"kinds has {sorted(spec['kinds'])}, and the weights are {sorted({**weights, **tied})}"
        )
    if spec["results"]["tuple"][2]["shape"] != [len(conditions)]:
        raise ValueError(f"the program has not {len(conditions)} conditions")
    for error, message in conditions:
        if not isinstance(error, str) or not isinstance(message, str):
            raise ValueError(f"a condition is {error!r}, {message!r}")


def _check_types(program: loader.Program) -> None:
    """Refuse a signature that tells other shapes or dtypes than the code: JAX would convert, or fail in MLIR."""
    exported = program.exported
    if program.spec["convention"] != exported.calling_convention_version:
        return  # of an older JAX, which passed arguments otherwise
    told = entry_type_if_known(program.stub.mlir_module_serialized)
    if told is not None and told != (real := entry_type(exported.mlir_module_serialized)):
        raise ValueError(f"it says that the program is {told}, and the program is {real}")


def _check_archive(path: Path, file: str) -> None:
    """Refuse an archive with two files of one name, or one that says it is larger than the archive."""
    with zipfile.ZipFile(path) as archive:
        same = [info for info in archive.infolist() if info.filename == file]
    if len(same) != 1:
        raise ValueError(f"{file} is there {len(same)} times" if same else f"{file} is not there")
    if same[0].file_size > path.stat().st_size:
        raise ValueError(
            f"{file} says that it has {same[0].file_size} bytes, which is more than the archive has"
        )


def _taken(folder: Path) -> dict[str, str]:
    """Return the files that the program in a folder consists of, with their checksums."""
    if not (folder / _SIGNATURE).exists():
        return {}
    try:
        spec = json.loads(b"{" + part(folder, None, _SIGNATURE))
        return dict(spec["parts"].values())
    except (DamagedFile, OSError, *_MALFORMED):
        # One without checksums, or damaged: other programs may still read it by the usual names.
        return {_PROGRAM: "", _WEIGHTS: ""}


def _free(name: str, digest: str, taken: Mapping[str, str]) -> str:
    """Return the name for a new part: its own, unless the old program has another part there."""
    if taken.get(name, digest) == digest:
        return name
    stem, dot, suffix = name.partition(".")
    return f"{stem}-{digest[:8]}{dot}{suffix}"


def _version(path: Path) -> Any:
    """Return what changes when a program is replaced."""
    try:
        found = (path / _SIGNATURE if path.is_dir() else path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; of two values by one name, Python would take the last and others the first."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is there twice")
    return found


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
