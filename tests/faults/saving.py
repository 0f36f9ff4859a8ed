"""Saves in processes that fail or die at a chosen step, or at any time: each is forked from one that has imported all.

``python saving.py`` reads commands, a line of JSON each, and answers each with the exit status of the fork: negative
for the signal that ended it, RAISED where the save said that the disk is full, MANAGED where it could do without the
step that failed, 0 where all went well.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RAISED, MANAGED = 3, 6
STEPS = ("fsync", "replace", "rename", "unlink", "chmod", "mkdir")
"""Functions of ``os`` that are steps of a save, besides every write to a file."""


class Steps:
    """Counts the steps of a save, and does something at one of them."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.at, self.act, self.done = at, act, 0

    def step(self) -> None:
        """Count one, and act if it is the one."""
        self.done += 1
        if self.done - 1 == self.at:
            self.act()

    def patches(self) -> dict[tuple[Any, str], Any]:
        """Return what to put in the place of functions, by where they are."""
        steps = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                # Half of it, so that a file is cut short and not merely missing.
                super().write(bytes(data)[: len(data) // 2])
                self.seek(-(len(data) // 2), os.SEEK_CUR)
                steps.step()
                return super().write(data)

        def counted(real: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                steps.step()
                return real(*args, **kwargs)

            return call

        return {(io, "FileIO"): File, **{(os, name): counted(getattr(os, name)) for name in STEPS}}


def full_disk() -> None:
    """Fail as a write to a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die() -> None:
    """End this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


class Saver:
    """A process that forks others, which save."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __call__(self, kind: str, sources: list[Path], path: Path, **options: Any) -> int:
        """Save what is at ``sources`` to ``path``, each in another process, and return the exit status of the last.

        ``die_at`` or ``fail_at`` is the step at which it dies or finds the disk full; ``seconds`` lets it save again
        and again, and kills it then.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        command = {"kind": kind, "sources": [*map(str, sources)], "path": str(path), **options}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _saves(kind: str, source: Path, path: Path) -> Callable[[], None]:
    """Return a function that saves: an exported program (folder or file), a checkpoint, or a plain file."""
    from isthmus._export import container
    from isthmus._runtime import checksums, files

    if kind == "file":
        content = source.read_bytes()
        return lambda: files.write(path, content)
    if kind in ("folder", "checkpoint"):  # as isthmus.checkpoint.save, with a copy in the place of orbax

        def save() -> None:
            with files.staging(path) as stage:
                shutil.copytree(source, stage / "new", ignore=shutil.ignore_patterns(checksums.LIST))
                checksums.seal(stage / "new")
                files.swap(stage / "new", path)

        return save
    spec = json.loads((source / "program.json").read_text())
    parts = {name: (source / file).read_bytes() for name, (file, _) in spec["parts"].items()}
    scripts = {"run.py": (source / "run.py").read_bytes()}
    spec = {name: value for name, value in spec.items() if name not in ("sha256", "parts")}
    return lambda: container.save(path, spec, parts, scripts)


def _child(kind: str, source: str, path: str, **options: Any) -> int:
    from isthmus._runtime import files

    if options.get("two_renames"):
        files._exchange = lambda one, other: False
    save = _saves(kind, Path(source), Path(path))
    at = options.get("die_at", options.get("fail_at", -1))
    steps = Steps(at, die if "die_at" in options else full_disk)
    for (where, name), value in steps.patches().items():
        setattr(where, name, value)
    try:
        for _ in itertools.count() if "seconds" in options else (0,):
            save()
    except OSError as error:  # shutil.Error says of many files what happened, without a number
        return RAISED if error.errno == errno.ENOSPC or isinstance(error, shutil.Error) else 4
    return MANAGED if 0 <= at < steps.done else 0


def _main() -> None:
    from isthmus._export import container  # noqa: F401  # once, before forks

    for line in sys.stdin:
        command = json.loads(line)
        children = [_fork(command, source) for source in command.pop("sources")]
        if "seconds" in command:
            time.sleep(random.uniform(command.get("at_least", 0), command["seconds"]))
            for child in children:
                os.kill(child, signal.SIGKILL)
        for child in children:
            _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _fork(command: dict[str, Any], source: str) -> int:
    child = os.fork()
    if child == 0:
        code = 5
        try:
            code = _child(source=source, **command)
        finally:
            os._exit(code)
    return child


if __name__ == "__main__":
    _main()
