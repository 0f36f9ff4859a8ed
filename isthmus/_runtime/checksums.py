"""Checksums of a folder's files, in one of them: whether a checkpoint is still what was written.

``isthmus.sha256`` is a list that ``sha256sum -c isthmus.sha256`` checks too; its last line, a comment there, is the
checksum of the list itself.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path, PurePosixPath

from isthmus._runtime import files
from isthmus.errors import DamagedFile

LIST = "isthmus.sha256"
_REMEDY = "copy it again from where it came, or load an older checkpoint"


def seal(folder: Path) -> None:
    """Write the list of checksums of a folder's files, after all of them have reached the disk."""
    digests = files.sync_tree(folder)
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()
    files.write(folder / LIST, lines + b"# %s\n" % hashlib.sha256(lines).hexdigest().encode())


def verify(folder: Path, shown: object) -> None:
    """Raise DamagedFile, about the path ``shown``, if a file is not as it was sealed; folders without a list pass."""
    if not os.path.lexists(folder / LIST):
        return
    for name, digest in _listed(folder, shown).items():
        reason = _difference(folder, name, digest)
        if reason:
            raise DamagedFile(shown, name, reason, _REMEDY)


def _listed(folder: Path, shown: object) -> dict[str, str]:
    if not stat.S_ISREG((folder / LIST).lstat().st_mode):
        raise DamagedFile(shown, LIST, "it is a link or no file", _REMEDY)
    # The last line is the list's own checksum, behind a mark that ``sha256sum`` takes for a comment.
    lines, mark, digest = (folder / LIST).read_bytes().rpartition(b"# ")
    if not mark or hashlib.sha256(lines).hexdigest().encode() + b"\n" != digest:
        raise DamagedFile(shown, LIST, "its checksum is wrong", _REMEDY)
    pairs = [line.partition("  ") for line in lines.decode("utf-8", "surrogateescape").split("\n") if line]
    names = {name: digest for digest, _, name in pairs}
    if len(names) != len(pairs):
        raise DamagedFile(shown, LIST, "it has a name twice", _REMEDY)
    return names


def _difference(folder: Path, name: str, digest: str) -> str:
    """Return the reason to refuse a file of a list; "" where there is none."""
    inside = PurePosixPath(name)
    # A list is a file like others, and another program may have written it.
    if inside.is_absolute() or ".." in inside.parts or not inside.parts:
        return "its name leads out of the checkpoint"
    # From the outermost folder inwards: a link on the way would lead elsewhere as well.
    for above in (*reversed(inside.parents), inside):
        try:
            mode = (folder / above).lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return "it is not there"
        is_expected = stat.S_ISREG if above is inside else stat.S_ISDIR
        if above.parts and not is_expected(mode):
            return "it is a link, or not the file it was"
    with open(folder / name, "rb") as file:
        return "" if files.checksum(file) == digest else "its checksum is wrong"
