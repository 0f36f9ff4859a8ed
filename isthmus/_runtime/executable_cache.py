"""Executables kept on disk, so that a second process starts warm: found by a hash of what XLA is given.

JAX serializes executables as pickles, which run code when they are read, and XLA's own part is machine code. So a file
is read only if nobody but this user can have written it: the folder and the file belong to the user, no group and no
other may write to them, and the file starts with a checksum (HMAC-SHA256) of its name and content, with a key that is
made when the folder is first used and that only the user can read. A file that was damaged or came from elsewhere has
another checksum; it is removed, and the program is compiled again.

JAX's own persistent cache cannot stand in for this one: it is switched on for a whole process, by settings that are
the user's.

Files are written whole (``files``), so several processes may share a folder. It is kept under
``config.cache_size`` megabytes by removing the files that were unused for longest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import pickle
import platform
import re
import secrets
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from isthmus import config
from isthmus._runtime import counters, files

_DIGEST = 32
"""The bytes of an HMAC-SHA256, and of a key."""
_KEY = "key"
_OURS = re.compile("[0-9a-f]{64}")
"""What executables are called; whatever else is in the folder is left alone."""
_LOOK_AGAIN = 64
"""After so many files written, a folder's size is measured again: other processes write to it, too."""


def load(lowered: Any, donate: tuple[int, ...], options: Mapping[str, Any]) -> Any:
    """Return the executable that was saved for this program, or None."""
    folder = _folder()
    if folder is None:
        return None
    path = folder / _name(lowered, donate, options)
    try:
        content = _content(path)
    except (OSError, _Refused) as error:
        if not isinstance(error, FileNotFoundError):
            _drop(path, error)
        return None
    try:
        found = serialize_executable.deserialize_and_load(*pickle.loads(content))
    except Exception as error:  # of another build of XLA: compile again and replace it
        _drop(path, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the files unused for longest go first
    counters.count("loaded from disk")
    return found


def save(compiled: Any, lowered: Any, donate: tuple[int, ...], options: Mapping[str, Any]) -> None:
    """Keep an executable for the next process; one that cannot be kept is not an error."""
    if not config.cache:
        return
    try:
        folder = _folder(make=True)
        if folder is None:
            return
        path = folder / _name(lowered, donate, options)
        content = pickle.dumps(serialize_executable.serialize(compiled))
        if len(content) + _DIGEST > _limit():
            counters.count("not saved to disk: too large")
            return
        # Not worth waiting for the disk: a file that a power failure cuts short has another checksum.
        files.write(path, _digest(path, content) + content, durable=False, mode=0o600)
        _sizes(folder).add(len(content) + _DIGEST)
    except Exception as error:
        counters.count(f"not saved to disk: {type(error).__name__}")


class _Refused(Exception):
    """A file or folder that is not ours alone, or not what was written."""


def _folder(make: bool = False) -> Path | None:
    """Return the folder of executables, if there is one that nobody else can write to."""
    if not config.cache:
        return None
    folder = Path(config.cache)
    try:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(config.cache)
    except OSError:
        if make:
            raise
        return None  # nothing was saved there
    if not files.is_ours(found):
        _warn_of(config.cache)
        return None
    _tidied(folder)
    return folder


@functools.cache
def _warn_of(folder: str) -> None:
    """Say, once in a process, why a folder is not used."""
    counters.count("cache folder refused")
    warnings.warn(
        f"isthmus.config.cache = {folder!r} is not used: it belongs to another user or others may write to it, and "
        f"executables run code when they are loaded; chmod go-w it, or name a folder of your own",
        stacklevel=2,
    )


@functools.cache
def _tidied(folder: Path) -> None:
    """Remove, once in a process, what processes that died have left."""
    files.remove_abandoned(folder)


def _content(path: Path) -> bytes:
    """Return what was written to a file, if this user wrote it and it is unchanged."""
    data = _read(path)
    if not hmac.compare_digest(data[:_DIGEST], _digest(path, data[_DIGEST:])):
        raise _Refused("another checksum")
    return data[_DIGEST:]


def _read(path: Path) -> bytes:
    """Return the bytes of a file that nobody else can write to; it is opened before it is looked at."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or not files.is_ours(found):
            raise _Refused("not ours")
        return file.read()


def _digest(path: Path, content: bytes) -> bytes:
    """Return the checksum of a file; its name is part of it, for it says which program this is."""
    return hmac.digest(_key(path.parent), path.name.encode() + b"\0" + content, "sha256")


def _key(folder: Path) -> bytes:
    """Return the key of a folder; a new one where there is none, with which no older file agrees."""
    try:
        key = _read(folder / _KEY)
    except (FileNotFoundError, _Refused):
        key = b""
    if len(key) != _DIGEST:
        (folder / _KEY).unlink(
            missing_ok=True
        )  # files.write would keep the mode of one that others may write to
        files.write(folder / _KEY, secrets.token_bytes(_DIGEST), mode=0o600)
        key = _read(folder / _KEY)  # another process may have been later
    return key


def _drop(path: Path, error: Exception) -> None:
    """Remove a file that cannot be used."""
    counters.count(f"dropped from disk: {type(error).__name__.strip('_')}")
    with contextlib.suppress(OSError):
        path.unlink()


def _limit() -> int:
    return int(config.cache_size) * 2**20


class _Sizes:
    """How large a folder is, as far as this process knows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.total, self.writes = folder, 0, 0

    def add(self, size: int) -> None:
        """Count a file that was written, and make room if the folder is too large."""
        self.total += size
        if self.writes % _LOOK_AGAIN == 0 or self.total > _limit():
            self.total = self._shrink()
        self.writes += 1

    def _shrink(self) -> int:
        """Remove the files unused for longest down to nine tenths of the limit, if it is passed; return the size."""
        entries = []
        with os.scandir(self.folder) as found:
            for entry in found:
                with contextlib.suppress(OSError):  # another process may have removed it
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode) and _OURS.fullmatch(entry.name):
                        entries.append((about.st_mtime, about.st_size, entry.path))
        total = sum(size for _, size, _ in entries)
        if total <= _limit():
            return total
        for _, size, path in sorted(entries):
            if total <= _limit() * 9 // 10:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
        return total


@functools.cache
def _sizes(folder: Path) -> _Sizes:
    return _Sizes(folder)


@functools.cache
def _host() -> str:
    """Return what programs for the CPU depend on: the instructions it has."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()}"


def _name(lowered: Any, donate: tuple[int, ...], options: Mapping[str, Any]) -> str:
    """Return the name of a program's file, a hash of all that its executable depends on."""
    device = jax.local_devices()[0]
    version = (jax.__version__, device.device_kind, device.client.platform_version)
    parts = (version, _host(), config.xla_flags(), donate, lowered.in_tree, lowered.out_tree)
    text = f"{parts} {sorted(options.items())} {lowered.as_text()}"
    return hashlib.sha256(text.encode()).hexdigest()
