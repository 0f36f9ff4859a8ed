"""Files and folders that are written whole or not at all.

Whatever Isthmus writes goes into a new file beside its place, reaches the disk (fsync), and is renamed to its place: a
full disk, an exception or ``kill -9`` at any byte leaves the old file as it was.

    with files.replacing("model.isthmus") as file:
        file.write(content)

A folder is made in a staging folder beside its place and exchanged with the old one:

    with files.staging(path) as stage:
        write_into(stage / "new")
        files.swap(stage / "new", path)

Linux exchanges two folders in one system call. Elsewhere two renames do, and a process killed between them leaves the
old folder in its staging folder: ``whole`` finds it there for a reader, and the next ``staging`` puts it back.

Temporary names start with ``.isthmus-`` and a hash of the name they are for. Their writer holds a lock (flock) on them,
so those whose lock is free were left by a process that died, and the next writer in the same folder removes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import io
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from isthmus.errors import IsthmusError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")
_PREFIX, _SUFFIX = ".isthmus-", ".tmp"
_REPLACED, _NAME = "replaced", "name"
"""In a staging folder: the old folder, between the two renames, and a file that holds the name it had."""
_A_DAY = 86_400.0  # where there are no locks, a temporary file this old counts as abandoned
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, durable: bool = True, mode: int = 0o666
) -> Iterator[IO[bytes]]:
    """Yield a file to write; it takes the place of ``path`` when the block ends, unless the block raises.

    A link is followed, and the mode of the file that is replaced is kept. ``durable=False`` does not wait for the disk:
    for files with a checksum, which may be lost with the power. A pipe or a device is written as it is.
    """
    # What the link leads to is replaced, never the link.
    target = Path(os.path.realpath(path))
    # A pipe or a device has no file beside it to be renamed.
    if target.exists() and not target.is_file():
        with open(target, "wb") as special:
            yield special
        return
    remove_abandoned(target.parent)
    handle, name = _new_file(target, mode)
    try:
        with io.BufferedWriter(io.FileIO(handle, "wb")) as file:  # type: ignore[type-var]
            yield file
            file.flush()
            if durable:
                os.fsync(handle)
            if target.exists():
                # The mode of the old file, which a user may have set.
                os.chmod(name, stat.S_IMODE(target.stat().st_mode))
            if fcntl is None:
                file.close()  # Windows renames no open file
            # Before the file is closed, which frees its lock: another writer would take it for abandoned.
            os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    if durable:
        sync_folder(target.parent)


def write(path: str | os.PathLike[str], content: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
    """Write one file whole or not at all."""
    with replacing(path, durable=durable, mode=mode) as file:
        file.write(content)


@contextlib.contextmanager
def staging(path: Path) -> Iterator[Path]:
    """Yield a new folder beside ``path``, which is removed when the block ends, with what is left in it."""
    remove_abandoned(path.parent)
    handle, stage = _new_folder(path)
    try:
        (stage / _NAME).write_bytes(os.fsencode(path.name))
        yield stage
    finally:
        # Otherwise the old folder, in here, is the only one there is: it stays for ``whole`` to find.
        if os.path.lexists(path) or not (stage / _REPLACED).exists():
            _remove_stage(stage)
        if handle is not None:
            os.close(handle)


def swap(new: Path, path: Path) -> None:
    """Put a folder of a staging folder at ``path``; what was there stays in the staging folder."""
    if not os.path.lexists(path):
        os.rename(new, path)
    elif not _exchange(new, path):
        old = new.parent / _REPLACED
        os.rename(path, old)
        try:
            os.rename(new, path)
        except BaseException:
            # The new folder could not be put there, so the old one goes back.
            with contextlib.suppress(OSError):  # another process has put its folder there
                os.rename(old, path)
            raise
    sync_folder(path.parent)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes that ask for the same from writing to a folder, where the file system has locks."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def whole(path: Path) -> Path:
    """Return the folder to read for ``path``: that of a process killed between two renames, if it has none itself."""
    if os.path.lexists(path):
        return path
    old = [
        stage / _REPLACED
        for stage in _temporary(path.parent, _mark(path.name))
        if (stage / _REPLACED).is_dir()
    ]
    return max(old, key=lambda folder: folder.stat().st_mtime, default=path)


def identity(path: Path) -> tuple[int, int, int] | None:
    """Return a value that differs between a file or folder and its replacement; None where there is none."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino, about.st_mtime_ns


def steadily(read: Callable[[], T], version: Callable[[], Any]) -> T:
    """Return ``read()``; where it raises because another process replaced the files meanwhile, call it again."""
    for _ in range(50):  # a writer that replaces them faster than this is no accident
        before = version()
        try:
            return read()
        except Exception:
            if version() == before:
                raise
    raise IsthmusError("the files are replaced faster than they can be read: copy them, and read the copy")


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files and folders of processes that died, and put back what they were about to replace."""
    # Every writer tidies up: a process that died cannot.
    for left in _temporary(folder, _PREFIX):
        with contextlib.suppress(OSError), _if_abandoned(left) as abandoned:
            if not abandoned:
                continue
            if not left.is_dir():
                left.unlink()
                continue
            if (left / _REPLACED).exists():
                path = folder / Path(os.fsdecode((left / _NAME).read_bytes())).name
                if not os.path.lexists(path):
                    os.rename(left / _REPLACED, path)
            _remove_stage(left)


def _remove_stage(stage: Path) -> None:
    """Remove a staging folder, or leave it to the next writer: the save itself is done, or has failed."""
    try:
        # First it stops looking like something to put back, since it loses its files one by one.
        os.rename(stage / _REPLACED, stage / "removed")
    except FileNotFoundError:
        pass
    except OSError:
        return
    shutil.rmtree(stage, ignore_errors=True)


def sync_tree(folder: Path) -> dict[str, str]:
    """Bring all files of a folder to the disk, and return their checksums (sha256) by their names in it."""
    digests = {}
    # In the order of names, so that two runs write the same list.
    for place, folders, names in os.walk(folder):
        folders.sort()  # the list of checksums is the same on every machine
        for name in sorted(names):
            file = Path(place, name)
            with open(file, "rb") as opened:
                digests[file.relative_to(folder).as_posix()] = checksum(opened)
                os.fsync(opened.fileno())
        sync_folder(Path(place))
    return digests


def checksum(file: IO[bytes]) -> str:
    """Return the sha256 of an open file."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    if os.name == "nt":  # Windows opens no folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such thing
            raise
    finally:
        os.close(handle)


def is_ours(about: os.stat_result) -> bool:
    """Return whether no other user can write to a file or folder: this user owns it, and its mode says so."""
    if not hasattr(os, "geteuid"):  # Windows, where modes say nothing
        return True
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _mark(name: str) -> str:
    """Return how temporary names for a place begin; a hash, since a name may be as long as names can be."""
    return f"{_PREFIX}{hashlib.sha256(os.fsencode(name)).hexdigest()[:12]}-"


def _temporary(folder: Path, mark: str) -> list[Path]:
    """Return temporary files and folders by how they begin; only this user's, since others may not plant any."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if _is_temporary(entry, mark)]
    except OSError:
        return []


def _is_temporary(entry: os.DirEntry[str], mark: str) -> bool:
    if not entry.name.startswith(mark) or not entry.name.endswith(_SUFFIX) or entry.is_symlink():
        return False
    return not hasattr(os, "geteuid") or entry.stat(follow_symlinks=False).st_uid == os.geteuid()


def _new_file(target: Path, mode: int) -> tuple[int, Path]:
    """Make a temporary file and lock it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    while True:
        name = target.parent / f"{_mark(target.name)}{secrets.token_hex(8)}{_SUFFIX}"
        handle = os.open(name, flags, mode)
        if _claim(handle, name):
            return handle, name
        os.close(handle)


def _new_folder(path: Path) -> tuple[int | None, Path]:
    """Make a staging folder and lock it."""
    while True:
        name = path.parent / f"{_mark(path.name)}{secrets.token_hex(8)}{_SUFFIX}"
        name.mkdir(mode=0o700)
        if fcntl is None:
            return None, name
        handle = os.open(name, os.O_RDONLY)
        if _claim(handle, name):
            return handle, name
        os.close(handle)


def _claim(handle: int, name: Path) -> bool:
    """Lock a new temporary file; return whether it is still there: without a lock it looked abandoned for a moment."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)  # waits for a process that is about to remove it
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(name))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _if_abandoned(left: Path) -> Iterator[bool]:
    """Yield whether a temporary file has lost its writer, and keep others from claiming it meanwhile."""
    if fcntl is None:
        yield _is_old(left)
        return
    handle = os.open(left, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        except OSError:  # a file system without locks
            free = _is_old(left)
        yield free
    finally:
        os.close(handle)


def _is_old(left: Path) -> bool:
    return time.time() - left.stat().st_mtime > _A_DAY


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, so that no moment has neither; return whether this system can."""
    call = _renameat2()
    if call is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    return bool(call(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)


@functools.cache
def _renameat2() -> Any:
    """Return Linux's renameat2, which Python does not have, or None."""
    try:
        call = ctypes.CDLL(None).renameat2  # glibc 2.28
    except (AttributeError, OSError, TypeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    call.restype = ctypes.c_int
    return call
