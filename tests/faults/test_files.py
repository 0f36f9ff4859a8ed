"""Saves that fail or are killed at any step leave the old file whole, or the new one, and nothing else behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import isthmus
from isthmus._export import container, loader
from isthmus._runtime import checksums, files
from isthmus.errors import IsthmusError

from . import saving

RESULTS = {"old": 1.0, "new": 2.0}
KINDS = ["file", "program.isthmus", "program", "folder", pytest.param("checkpoint", marks=pytest.mark.slow)]
"""A folder is written as a checkpoint is, and orbax has no part in it."""
WAYS = [
    *[(kind, False) for kind in ("file", "program.isthmus", "program", "folder")],
    ("folder", True),
    pytest.param("checkpoint", False, marks=pytest.mark.slow),
    pytest.param("checkpoint", True, marks=pytest.mark.slow),
]
"""Kinds, and whether two folders are exchanged by two renames, as on systems that have no other way."""
ROOT = saving.ROOT


@pytest.fixture(scope="module")
def saver() -> Iterator[saving.Saver]:
    """A process that forks others, which save."""
    made = saving.Saver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an old and a new one of each kind: exported programs, checkpoints, plain files."""
    folder = tmp_path_factory.mktemp("sources")
    for name, value in RESULTS.items():
        model = nn.Linear(2, 1, bias=False)
        nn.init.constant_(model.weight, value / 2)
        isthmus.export(model, torch.ones(1, 2), path=folder / f"program-{name}")
        isthmus.checkpoint.save(folder / f"checkpoint-{name}", {"weight": torch.full((50,), value)})
        (folder / f"file-{name}").write_bytes(name.encode() * 100_000)
        (folder / f"folder-{name}" / "more").mkdir(parents=True)
        for part in ("a", "more/b"):
            (folder / f"folder-{name}" / part).write_text(name)
    return folder


def read(kind: str, path: Path) -> str:
    """Return which of the two is at a path; damage raises."""
    if kind == "file":
        data = path.read_bytes()
        name = data[:3].decode()
        assert data == name.encode() * 100_000
        return name
    if kind == "folder":
        return files.steadily(lambda: read_folder(path), lambda: files.identity(files.whole(path)))
    if kind == "checkpoint":
        value = isthmus.checkpoint.load(path)["weight"].cpu()
        assert bool((value == value[0]).all())
        return {number: name for name, number in RESULTS.items()}[value[0].item()]
    if kind == "loader":
        weight = loader.load(path).weights["weight"]
    else:  # what isthmus.load checks before it gives the program to JAX, which would take most of the time here
        spec, contents = files.steadily(
            lambda: container._contents(path, False), lambda: path.stat().st_mtime_ns
        )
        weight = container._arrays(contents["weights.safetensors"], spec["weights"])["weight"]
    return {number / 2: name for name, number in RESULTS.items()}[float(weight[0, 0])]


def read_folder(path: Path) -> str:
    folder = files.whole(path)
    checksums.verify(folder, path)
    names = {(folder / part).read_text() for part in ("a", "more/b")}
    (name,) = names
    return name


class Place:
    """Somewhere to save to: what is there, and what was left beside it."""

    def __init__(self, kind: str, folder: Path, sources: Path, saver: saving.Saver) -> None:
        self.kind, self.sources, self.saver = kind, sources, saver
        self.path = folder / ("out" + Path(kind).suffix)
        self.folder = folder

    def save(self, name: str, **options: Any) -> int:
        """Save the old or the new one in another process, and return its exit status."""
        kind = self.kind.partition(".")[0]
        return self.saver(
            kind, [self.sources / f"{kind}-{each}" for each in name.split()], self.path, **options
        )

    def read(self) -> str:
        """Return which of the two is there."""
        return read(self.kind, self.path)

    def run(self) -> str:
        """Return the same, from a program that was run, with torch and without it."""
        if "program" not in self.kind:
            return self.read()
        found = isthmus.load(self.path)(torch.ones(1, 2)).item()
        assert {number: name for name, number in RESULTS.items()}[found] == read("loader", self.path)
        return self.read()

    def left(self) -> list[str]:
        """Return temporary files and folders, wherever they are."""
        return [str(path) for path in self.folder.rglob(".isthmus-*")]


@pytest.fixture
def place(kind: str, tmp_path: Path, sources: Path, saver: saving.Saver) -> Place:
    return Place(kind, tmp_path, sources, saver)


@pytest.mark.parametrize(("kind", "two_renames"), WAYS)
def test_a_full_disk_at_every_step(place: Place, two_renames: bool) -> None:
    failed = 0
    for step in range(200):
        assert place.save("old") == 0
        status = place.save("new", fail_at=step, two_renames=two_renames)
        found = place.read()
        assert not place.left() or status == saving.MANAGED, (
            "where it is the removing that fails, something is left"
        )
        if status == 0:
            break
        assert status == saving.RAISED or (status == saving.MANAGED and found == "new")
        failed += found == "old"
    assert failed > 3
    assert found == "new"
    assert step < 199


@pytest.mark.parametrize(("kind", "two_renames"), WAYS)
def test_killed_at_every_step(place: Place, two_renames: bool) -> None:
    seen = {"old": 0, "new": 0}
    left = 0
    for step in range(200):
        assert place.save("old") == 0
        status = place.save("new", die_at=step, two_renames=two_renames)
        left += bool(place.left())
        seen[place.read()] += 1
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert seen["old"] > 3
    assert seen["new"] > 0
    assert left > 0, "a process that died left nothing, so nothing was tested"
    assert place.save("old") == 0
    assert not place.left()
    assert [path.name for path in place.folder.iterdir()] == [place.path.name]


@pytest.mark.parametrize("times", [4, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_time(place: Place, times: int) -> None:
    assert place.save("old") == 0
    for n in range(times):
        assert place.save("new" if n % 2 else "old", seconds=0.1, two_renames=n % 4 > 1) == -signal.SIGKILL
        assert place.run() in RESULTS
    assert place.save("new") == 0
    assert place.run() == "new"
    assert not place.left()


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_save_that_is_killed_leaves_nothing_or_all(place: Place) -> None:
    for step in range(200):
        status = place.save("new", die_at=step)
        if os.path.lexists(place.path) and (
            place.kind != "program" or (place.path / "program.json").exists()
        ):
            break
        assert status == -signal.SIGKILL
        with pytest.raises((FileNotFoundError, IsthmusError)):
            place.read() if place.kind != "program" else isthmus.load(place.path)
    assert step > 3
    assert place.read() == "new"


@pytest.mark.parametrize("kind", KINDS)
def test_several_processes_at_once(place: Place) -> None:
    assert place.save("old") == 0
    thread = threading.Thread(target=place.save, args=("old new",), kwargs={"at_least": 0.5, "seconds": 0.7})
    thread.start()
    reads = 0
    while thread.is_alive():
        assert place.read() in RESULTS
        reads += 1
    assert reads > 3
    assert place.save("new") == 0
    assert place.read() == "new"
    assert not place.left()


def test_what_else_is_in_a_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("mine")
    (tmp_path / "weights.txt").write_text("mine")
    artifact = isthmus.export(nn.Linear(2, 1), torch.ones(1, 2), path=tmp_path)
    artifact.save(tmp_path)
    isthmus.export(nn.Linear(2, 1), torch.ones(1, 2), path=tmp_path, precompile=True)
    isthmus.export(nn.Linear(2, 1), torch.ones(1, 2), path=tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {name.partition("-")[0].partition(".")[0] for name in names} == {
        *("README", "weights", "program", "run", "precompiled")
    }
    assert len(names) == 7, "parts of programs that were replaced are gone"
    assert isthmus.load(tmp_path)(torch.ones(1, 2)).shape == (1, 1)


def test_links_modes_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    files.write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640
    mask = os.umask(0o027)
    try:
        files.write(tmp_path / "other", b"new")
    finally:
        os.umask(mask)
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o640
    files.write(tmp_path / ("x" * 255), b"a name as long as names can be")
    files.write("/dev/null", b"new")
    assert not Path("/dev/null").is_file()
    assert len(list(tmp_path.iterdir())) == 4


def test_temporary_files_of_others_are_left_alone(tmp_path: Path) -> None:
    with files.replacing(tmp_path / "a") as file:
        file.write(b"a")
        (written,) = tmp_path.iterdir()
        files.remove_abandoned(tmp_path)  # as another process does: this one is being written
        assert written.exists()
    (tmp_path / ".isthmus-link.tmp").symlink_to(tmp_path / "a")
    files.remove_abandoned(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"a"
    assert (tmp_path / ".isthmus-link.tmp").is_symlink()


def test_only_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("home", "file"):
        with pytest.raises(IsthmusError, match="is no checkpoint, and is not replaced"):
            isthmus.checkpoint.save(tmp_path / name, {"x": 1}, force=True)
    assert (tmp_path / "home" / "thesis").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    isthmus.checkpoint.save(tmp_path / "empty", {"x": 1})
    assert isthmus.checkpoint.load(tmp_path / "empty") == {"x": 1}


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint: '.*nowhere'"):
        isthmus.checkpoint.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(IsthmusError, match="empty is no orbax checkpoint"):
        isthmus.checkpoint.load(tmp_path / "empty")


def test_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    isthmus.checkpoint.save(tmp_path / "a", {"x": torch.ones(3)})
    ran = subprocess.run(
        ["sha256sum", "-c", "--strict", "--quiet", checksums.LIST], cwd=tmp_path / "a", capture_output=True
    )
    assert (ran.returncode, ran.stdout) == (0, b""), ran.stderr


SAVES = """
import itertools, sys, torch, isthmus
path = sys.argv[1]
print("ready", flush=True)
for n in itertools.count():
    isthmus.checkpoint.save(path, {"weight": torch.full((1000,), float(n)), "n": n}, force=True)
    print(n, flush=True)
"""


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_checkpoints_of_a_process_that_is_killed(tmp_path: Path, times: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    rng = np.random.default_rng(0)
    for _ in range(times):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SAVES), str(tmp_path / "a")],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline() == "0\n"
        threading.Event().wait(rng.uniform(0, 0.5))
        process.kill()
        said = [int(line) for line in process.stdout.read().split()]
        process.wait()
        found = isthmus.checkpoint.load(tmp_path / "a")
        assert found["n"] >= max(said, default=0)
        assert bool((found["weight"].cpu() == found["n"]).all())
    isthmus.checkpoint.save(tmp_path / "a", {"x": 1}, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


LIMITED = """
import resource, sys, torch, isthmus
isthmus.checkpoint.save(sys.argv[1], {"weight": torch.rand(100_000)}, force=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    isthmus.checkpoint.save(sys.argv[1], {"weight": torch.rand(200_000)}, force=True)
except Exception as error:
    print(type(error).__name__, error)
    sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [10, 100, 400, 1000, 10_000, 100_000, 700_000])
def test_a_checkpoint_that_cannot_be_written(tmp_path: Path, limit: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "a"), str(limit)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 3, ran.stderr
    assert isthmus.checkpoint.load(tmp_path / "a")["weight"].shape == (100_000,)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
