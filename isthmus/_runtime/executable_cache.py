"""Executables on disk, so that a second process starts warm: each in a file named by a hash of what XLA is given.

``compiler.build`` calls ``load`` before XLA and ``save`` after it; both do nothing unless ``config.cache`` names a
folder. JAX serializes executables as pickles, which run code when they are read, and XLA's own part is machine code. So
a file is read only if no other user can have written it: the folder and the file belong to this user, neither group nor
others may write to them, and the file starts with a checksum (HMAC-SHA256) of its name and content, with a key that is
made when the folder is first used and that only the user can read. A file that is damaged or came from elsewhere has
another checksum; it is removed, and the program is compiled again. Files are written whole (``files.py``), so several
processes may share a folder. It stays under ``config.cache_size`` megabytes: the least recently used files go first.

Why not JAX's persistent compilation cache (``jax_compilation_cache_dir``)? It was tried with JAX 0.10.2, on the CPU. It
works for our compile path, starts a second process as warm (a program of 24 layers: 0.44 s cold, 0.06 s warm; ours 0.63
s and 0.10 s on the same busy machine), and its files are a sixth of the size, since they are compressed. But

- it cannot be scoped to our programs. JAX opens one folder per process, at the first compilation that has one set, and
  keeps it after the setting is taken back: a user's own ``jax.jit`` then wrote to our folder, and with a folder of the
  user's opened first our programs went there and ours stayed empty. The settings have no public context manager;
- an entry is never replaced: one cut short, empty or overwritten was compiled again with a warning at every start, and
  entries are written in place, so a killed process leaves one cut short;
- one lost ``-atime`` file made every later write fail (FileNotFoundError), with a warning each;
- nothing is checked: JAX calls the folder trusted, and loads what anyone with write access has put there.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from isthmus import config
from isthmus._runtime import counters, files

Lowered = jax.stages.Lowered
_DIGEST = 32
"""The length in bytes of an HMAC-SHA256, and of a key."""
_KEY = "key"
_OURS = re.compile("[0-9a-f]{64}")
"""File names of executables; other files in the folder are left alone."""
_MODULE_NAME = re.compile(r"^module @\S+", re.MULTILINE)
_LOOK_AGAIN = 64
"""After so many files written, a folder's size is measured again: other processes write to it too."""


def load(
    lowered: Lowered, devices: Sequence[jax.Device], donate: tuple[int, ...], options: Mapping[str, Any]
) -> jax.stages.Compiled | None:
    """Return the executable that was saved for this program on these devices, or None."""
    folder = _folder()
    if folder is None:
        return None
    # The name is a hash of everything that the executable depends on, so a hit needs no further comparison.
    path = folder / _name(lowered, devices, donate, options)
    try:
        content = _content(path)
    except (OSError, _Refused) as error:
        if not isinstance(error, FileNotFoundError):
            _drop(path, error)
        return None
    # Only after the checksum: a pickle runs code when it is read.
    try:
        serialized, in_tree, out_tree = pickle.loads(content)
        compiled = serialize_executable.deserialize_and_load(
            serialized, in_tree, out_tree, execution_devices=devices
        )
    except Exception as error:  # of another build of XLA: compile again and replace it
        _drop(path, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # eviction goes by the time of the last use
    counters.count("loaded from disk")
    return compiled


def save(
    compiled: jax.stages.Compiled,
    lowered: Lowered,
    devices: Sequence[jax.Device],
    donate: tuple[int, ...],
    options: Mapping[str, Any],
) -> None:
    """Write an executable for the next process; failing to is counted and is not an error."""
    if not config.cache:
        return
    try:
        folder = _folder(make=True)
        if folder is None:
            return
        path = folder / _name(lowered, devices, donate, options)
        content = pickle.dumps(serialize_executable.serialize(compiled))
        # A file that alone passes the limit would push out all others.
        if len(content) + _DIGEST > _limit():
            counters.count("not saved to disk: too large")
            return
        # Without fsync: a file that a power failure cuts short has another checksum.
        files.write(path, _digest(path, content) + content, durable=False, mode=0o600)
        _sizes(folder).add(len(content) + _DIGEST)
    except Exception as error:
        counters.count(f"not saved to disk: {type(error).__name__}")


class _Refused(Exception):
    """A file or folder that is not ours alone, or not what was written."""


def _folder(make: bool = False) -> Path | None:
    """Return the folder of executables, if there is one that no other user can write to."""
    if not config.cache:
        return None
    folder = Path(config.cache)
    try:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if not stat.S_ISDIR(about.st_mode):
            raise NotADirectoryError(config.cache)
    except OSError:
        if make:
            raise
        return None  # nothing was saved there
    if not files.is_ours(about):
        _warn_of(config.cache)
        return None
    _tidied(folder)
    return folder


@functools.cache
def _warn_of(folder: str) -> None:
    """Warn, once in a process, why a folder is not used."""
    counters.count("cache folder refused")
    warnings.warn(
        f"isthmus.config.cache = {folder!r} is not used: it belongs to another user or others may write to it, and "
        f"executables run code when they are loaded; chmod go-w it, or name a folder of your own",
        stacklevel=2,
    )


@functools.cache
def _tidied(folder: Path) -> None:
    """Remove, once in a process, temporary files of processes that died."""
    files.remove_abandoned(folder)


def _content(path: Path) -> bytes:
    """Return the content of a file, if this user wrote it and it is unchanged."""
    data = _read(path)
    # In constant time, as for every secret: an attacker must not learn the checksum byte by byte.
    if not hmac.compare_digest(data[:_DIGEST], _digest(path, data[_DIGEST:])):
        raise _Refused("another checksum")
    return data[_DIGEST:]


def _read(path: Path) -> bytes:
    """Return the bytes of a file that no other user can write to.

    Its owner and mode are read from the open file, so that it cannot be exchanged between check and read.
    """
    # ``O_NOFOLLOW``: a link in the folder could lead to a file of another user's.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or not files.is_ours(about):
            raise _Refused("not ours")
        return file.read()


def _digest(path: Path, content: bytes) -> bytes:
    """Return the checksum of a file; its name is part of it, since the name says which program this is."""
    return hmac.digest(_key(path.parent), path.name.encode() + b"\0" + content, "sha256")


def _key(folder: Path) -> bytes:
    """Return the key of a folder; a new one where there is none, which makes every older file invalid."""
    try:
        key = _read(folder / _KEY)
    except (FileNotFoundError, _Refused):
        key = b""
    if len(key) != _DIGEST:
        # files.write keeps the mode of the file it replaces, and others may be able to write to this one.
        (folder / _KEY).unlink(missing_ok=True)
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
    """The size of a folder, as far as this process knows: measured now and then, counted in between."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.total, self.writes = folder, 0, 0

    def add(self, size: int) -> None:
        """Count a file that was written, and make room if the folder is too large."""
        self.total += size
        # Other processes write here as well, so the total is measured now and then.
        if self.writes % _LOOK_AGAIN == 0 or self.total > _limit():
            self.total = self._shrink()
        self.writes += 1

    def _shrink(self) -> int:
        """Remove least recently used files down to nine tenths of the limit, if it is passed; return the size."""
        entries = []
        with os.scandir(self.folder) as listing:
            for entry in listing:
                with contextlib.suppress(OSError):  # another process may have removed it
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode) and _OURS.fullmatch(entry.name):
                        entries.append((about.st_mtime, about.st_size, entry.path))
        total = sum(size for _, size, _ in entries)
        if total <= _limit():
            return total
        # Below the limit by a tenth, so that the next writes need not scan the folder again.
        # Oldest first: ``load`` touches the files that it uses.
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
    """Return the instruction sets of the CPU, which programs for it depend on."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()}"


def _name(
    lowered: Lowered, devices: Sequence[jax.Device], donate: tuple[int, ...], options: Mapping[str, Any]
) -> str:
    """Return the name of a program's file, a hash of all that its executable depends on."""
    # The version of the platform too: XLA's executables fit one build of it.
    version = (jax.__version__, devices[0].device_kind, devices[0].client.platform_version)
    # An executable names its devices, and each of several processes has one for those that it drives.
    place = (jax.process_index(), [device.id for device in devices])
    # The trees are not in the text of the program, but are pickled with its executable.
    parts = (version, place, _host(), config.xla_flags(), donate, lowered.in_tree, lowered.out_tree)
    # A program's name, which is for profilers, tells graphs of one process apart by the order they were compiled in.
    module = _MODULE_NAME.sub("module", lowered.as_text(), count=1)
    text = f"{parts} {sorted(options.items())} {module}"
    return hashlib.sha256(text.encode()).hexdigest()
