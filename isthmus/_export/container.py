"""The folder or file that stores an exported program: writing never loses the old one, reading verifies every byte.

``program.json`` is the signature. It names the file of every other part with its checksum (sha256), and its first line
is the checksum of the others:

    {"sha256": "9f86d081...",
     "format": 3,
     "parts": {"weights.safetensors": ["weights.safetensors", "5e884898..."], ...},

A folder is replaced by writing the new parts beside the old ones, under other names where those are taken, and then
``program.json`` in one step: whenever a process is killed, ``program.json`` names parts that are there and whole.
Files of others in the folder are left alone.

``read`` is the strict reader of ``isthmus.load``. The loader that is copied beside programs checks the same checksums;
``read`` also refuses what no accident writes: links, names that lead out of the folder, ranges that overlap. Every
refusal is ``DamagedFile`` with the part and the reason; an error of the file system stays an ``OSError``.
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
from isthmus._export.meshes import mesh_for
from isthmus._runtime import files
from isthmus._runtime.private import entry_type, entry_type_if_known
from isthmus.errors import DamagedFile, ExportError, IsthmusError

FORMAT = 3
"""3: a program returns the number of the first value check that failed, or 0. 2, still read: a flag for each check."""
SUFFIX = ".isthmus"
"""A path that ends so is one file; any other is a folder."""
_SIGNATURE, _PROGRAM, _WEIGHTS = "program.json", "program.mlirbc", "weights.safetensors"
_OURS = re.compile(
    r"program(-[0-9a-f]{8})?\.mlirbc|weights(-[0-9a-f]{8})?\.safetensors|executable-[0-9a-f-]{8,17}\.bin"
)
"""File names of parts: in a folder, those that ``program.json`` does not name belong to an older program."""
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
                # A ZipInfo has a fixed date: the same program is the same bytes.
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
        # Last: until program.json was replaced, the old parts were in use.
        used = {name for name, _ in named.values()}
        for old in path.iterdir():
            if _OURS.fullmatch(old.name) and old.name not in used:
                old.unlink(missing_ok=True)


def read(path: Path, *, executables: bool = False) -> loader.Program:
    """Return the program at a path, if it is as it was written: with ``executables``, those included."""
    # In a folder, the signature is what is replaced last.
    version = path / _SIGNATURE if path.is_dir() else path
    spec, contents = files.steadily(lambda: _contents(path, executables), lambda: files.identity(version))
    try:
        weights = _arrays(contents[_WEIGHTS], spec["weights"])
    except _MALFORMED as error:
        raise DamagedFile(path, _WEIGHTS, _reason(error), _REMEDY) from error
    try:
        _check_names(spec)
        program = loader.Program(spec, contents[_PROGRAM], weights, mesh_for(spec))
        _check_types(program)
        return program
    except (OSError, MemoryError, jax.errors.JaxRuntimeError, ExportError):
        raise  # not the file's fault: such as a device without memory
    except Exception as error:  # MLIR's are of no common type
        raise DamagedFile(path, _SIGNATURE, _reason(error), _REMEDY) from error


def signature(path: Path) -> dict[str, Any]:
    """Return the signature of the program at a path, if it is as it was written."""
    with _Stored(path) as stored:
        return stored.signature()


def _contents(path: Path, executables: bool) -> tuple[dict[str, Any], dict[str, bytes]]:
    with _Stored(path) as stored:
        spec = stored.signature()
        try:
            more = [each["file"] for each in _executables(spec)] if executables else []
        except _MALFORMED as error:
            raise DamagedFile(path, _SIGNATURE, _reason(error), _REMEDY) from error
        return spec, {name: stored.part(name, spec) for name in (_WEIGHTS, _PROGRAM, *more)}


def _executables(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of all executables; older programs have none for buckets."""
    return [*spec["executables"], *spec.get("buckets", [])]


class _Stored:
    """The files of a folder or of an archive, opened once: another process may replace it meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.archive: zipfile.ZipFile | None = None
        if not path.is_dir():
            try:
                self.archive = zipfile.ZipFile(path)
            except OSError:
                raise
            except Exception as error:  # zipfile raises a dozen types for files that are none
                raise DamagedFile(path, "the archive", _reason(error), _REMEDY) from error

    def __enter__(self) -> _Stored:
        return self

    def __exit__(self, *_: object) -> None:
        if self.archive is not None:
            self.archive.close()

    def signature(self) -> dict[str, Any]:
        """Return the signature, whose first line is the checksum of the others."""
        data = self._read(_SIGNATURE, _SIGNATURE)
        first, _, rest = data.partition(b"\n")
        try:
            if first + b"\n" != _seal(rest):
                raise ValueError("its checksum is wrong, or an older Isthmus wrote it, without one")
            spec = json.loads(b"{" + rest, object_pairs_hook=_unique)
            known = spec["format"] in (2, FORMAT)
            known = known and spec["convention"] <= export.maximum_supported_calling_convention_version
            writer = f"isthmus {spec['isthmus']} and jax {spec['jax']}"
        except _MALFORMED as error:
            raise DamagedFile(self.path, _SIGNATURE, _reason(error), _REMEDY) from error
        if not known:
            raise ExportError(
                f"isthmus.load: {self.path} is too new: {writer} wrote it\n"
                f"  to go on     update isthmus and jax, or export the model again"
            )
        return dict(spec)

    def part(self, name: str, spec: dict[str, Any]) -> bytes:
        """Return the content of a part that the signature names."""
        try:
            file, digest = spec["parts"][name]
            if not isinstance(file, str) or PurePath(file).name != file:
                raise ValueError(f"{file!r} is no name of a file beside {_SIGNATURE}")
        except _MALFORMED as error:
            raise DamagedFile(self.path, name, _reason(error), _REMEDY) from error
        data = self._read(name, file)
        if hashlib.sha256(data).hexdigest() != digest:
            raise DamagedFile(self.path, name, "its checksum is wrong", _REMEDY)
        return data

    def _read(self, name: str, file: str) -> bytes:
        try:
            return self._of_folder(file) if self.archive is None else self._of_archive(self.archive, file)
        except FileNotFoundError as error:
            raise DamagedFile(self.path, name, "it is not there", _REMEDY) from error
        except OSError:
            raise  # the file system's fault, not the file's
        except Exception as error:
            raise DamagedFile(self.path, name, _reason(error), _REMEDY) from error

    def _of_folder(self, file: str) -> bytes:
        if not stat.S_ISREG((self.path / file).lstat().st_mode):
            raise ValueError(f"{file} is a link, or no file")
        return (self.path / file).read_bytes()

    def _of_archive(self, archive: zipfile.ZipFile, file: str) -> bytes:
        same = [info for info in archive.infolist() if info.filename == file]
        if len(same) != 1:
            raise ValueError(f"{file} is there {len(same)} times" if same else f"{file} is not there")
        # Parts are stored without compression, so a part larger than the archive would be a zip bomb.
        if same[0].file_size > self.path.stat().st_size:
            raise ValueError(
                f"{file} says that it has {same[0].file_size} bytes, and the whole archive has fewer"
            )
        return archive.read(same[0])


def _sealed(spec: Mapping[str, Any]) -> bytes:
    """Return a signature as JSON, with the checksum of all other lines in the first."""
    rest = json.dumps(spec, indent=1).removeprefix("{\n").encode()
    return _seal(rest) + rest


def _seal(rest: bytes) -> bytes:
    return b'{"sha256": "%s",\n' % hashlib.sha256(rest).hexdigest().encode()


def _placed(leaves: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """Return the signature's entries of the weights, with the range of bytes in the file that each takes."""
    start, header = _header(data)
    entries = {}
    for name, leaf in leaves.items():
        low, high = header[name]["data_offsets"]
        entries[name] = {**leaf, "bytes": [start + low, start + high]}
    return entries


def _header(data: bytes) -> tuple[int, dict[str, Any]]:
    """Return where the arrays of a safetensors file start, and its header: dtype, shape and offsets of each."""
    start = 8 + int.from_bytes(data[:8], "little")
    if start > len(data):
        raise ValueError(f"its header takes {start - 8} bytes, and the file has {len(data)}")
    header = json.loads(data[8:start], object_pairs_hook=_unique)
    header.pop("__metadata__", None)
    return start, header


def _arrays(data: bytes, leaves: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights; together they must take every byte behind the header, and each byte once."""
    position, header = _header(data)
    if header.keys() != leaves.keys():
        raise ValueError(f"it has {sorted(header)}, and {_SIGNATURE} {sorted(leaves)}")
    start, arrays = position, {}
    for name in sorted(leaves, key=lambda name: leaves[name]["bytes"]):
        shape, dtype, (low, high) = (
            leaves[name]["shape"],
            np.dtype(leaves[name]["dtype"]),
            leaves[name]["bytes"],
        )
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name} has the shape {shape}")
        if (low, high) != (position, position + dtype.itemsize * math.prod(shape)):
            raise ValueError(
                f"{name} takes bytes {low} to {high}, which does not fit {dtype}{shape} at {position}"
            )
        if header[name]["data_offsets"] != [low - start, high - start]:
            raise ValueError(f"{name} is elsewhere in its header than in {_SIGNATURE}")
        arrays[name] = np.frombuffer(data, dtype, math.prod(shape), low).reshape(shape)
        position = high
    if position != len(data):
        raise ValueError(f"it has {len(data) - position} bytes too many")
    return arrays


def _check_names(spec: dict[str, Any]) -> None:
    """Refuse a signature whose lists do not fit each other."""
    weights, tied, conditions = spec["weights"], spec["tied"], spec["conditions"]
    if spec["kinds"].keys() != weights.keys() | tied.keys() or not set(tied.values()) <= weights.keys():
        raise ValueError(
            f"kinds has {sorted(spec['kinds'])}, and the weights are {sorted({**weights, **tied})}"
        )
    code = {"dtype": "int32", "shape": []} if conditions else None
    flags = {"dtype": "bool", "shape": [len(conditions)]}
    if spec["results"]["tuple"][2] != (flags if spec["format"] == 2 else code):
        raise ValueError(f"the program has not {len(conditions)} conditions")
    for error, message in conditions:
        if not isinstance(error, str) or not isinstance(message, str):
            raise ValueError(f"a condition is {error!r}, {message!r}")


def _check_types(program: loader.Program) -> None:
    """Refuse a signature with other shapes or dtypes than the code has: JAX would convert, or fail in MLIR."""
    exported = program.exported
    if program.spec["convention"] != exported.calling_convention_version:
        return  # of an older JAX, which passed arguments otherwise
    declared = entry_type_if_known(program.stub.mlir_module_serialized)
    if declared is not None and declared != (real := entry_type(exported.mlir_module_serialized)):
        raise ValueError(f"it says that the program is {declared}, and the program is {real}")


def _taken(folder: Path) -> dict[str, str]:
    """Return the files that the program in a folder consists of, with their checksums."""
    if not (folder / _SIGNATURE).exists():
        return {}
    try:
        return dict(signature(folder)["parts"].values())
    except (IsthmusError, OSError, *_MALFORMED):
        # One without checksums, of a newer Isthmus, or damaged: others may still read it by the usual names.
        return {_PROGRAM: "", _WEIGHTS: ""}


def _free(name: str, digest: str, taken: Mapping[str, str]) -> str:
    """Return the name for a new part: its own, unless the old program has another part there."""
    if taken.get(name, digest) == digest:
        return name
    stem, dot, suffix = name.partition(".")
    return f"{stem}-{digest[:8]}{dot}{suffix}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; of two values with one name Python would take the last, and other readers the first."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is there twice")
    return unique


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
