"""Programs kept on disk by ``isthmus.config.cache``: a second process loads them, and a bad file is replaced."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import isthmus
from isthmus._runtime import compiler
from tests.interpreters import forked

PROGRAM = """
import json, torch, isthmus
x = torch.arange(6.0).reshape(2, 3).to("jax")
found = torch.compile(lambda x: torch.tanh(x @ x.T).sum(0), backend="isthmus")(x)
print(json.dumps([found.tolist(), isthmus.metrics.counts()]))
"""
X = np.arange(6.0, dtype=np.float32)


def run(cache: Path) -> tuple[list[float], dict[str, int]]:
    """Run the program in a process of its own, and return what it computed and counted."""
    ran = forked(PROGRAM, ISTHMUS_CACHE=str(cache))
    assert ran.returncode == 0, ran.stderr
    values, counts = json.loads(ran.stdout)
    return values, counts


def executables(cache: Path) -> list[Path]:
    """Return the files of a cache, without its key."""
    return [path for path in cache.iterdir() if path.name != "key"]


def test_a_second_process_starts_warm(tmp_path: Path) -> None:
    cold, counted = run(tmp_path)
    assert "loaded from disk" not in counted
    files = {path: path.read_bytes() for path in executables(tmp_path)}
    assert files
    warm, counts = run(tmp_path)
    assert warm == cold
    assert counts["loaded from disk"] == counts["compilations"] == len(files)
    assert {path: path.read_bytes() for path in executables(tmp_path)} == files


def use(folder: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder the cache of this process."""
    monkeypatch.setattr(isthmus.config, "current", replace(isthmus.config.current, cache=str(folder)))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the cache; counts begin anew."""
    use(tmp_path, monkeypatch)
    isthmus.metrics.clear()
    return tmp_path


def build(scale: float = 3.0, title: str = "", **options: Any) -> np.ndarray[Any, Any]:
    """Compile a small program, run it, and return its result."""
    made = compiler.build(lambda x: (jnp.cumsum(x) * scale,), [X], (), options, title)
    return np.asarray(made.call(X)[0])


def test_a_program_is_found_by_what_it_is(cache: Path) -> None:
    build()
    assert len(executables(cache)) == 1
    np.testing.assert_array_equal(build(5.0), np.cumsum(X) * 5)
    assert len(executables(cache)) == 2, "another program is another file"
    assert "loaded from disk" not in isthmus.metrics.counts()
    np.testing.assert_array_equal(build(), np.cumsum(X) * 3)
    assert isthmus.metrics.counts()["loaded from disk"] == 1
    build(xla_embed_ir_in_executable=True)
    assert len(executables(cache)) == 3, "other options for XLA are another file"
    assert isthmus.metrics.counts()["loaded from disk"] == 1


def test_a_program_is_found_under_another_name(cache: Path) -> None:
    """Graphs are numbered in the order a process compiles them in, which may be another one in the next process."""
    build(title="graph 1 (7 nodes)")
    np.testing.assert_array_equal(build(title="graph 2 (7 nodes)"), np.cumsum(X) * 3)
    assert isthmus.metrics.counts()["loaded from disk"] == 1
    assert len(executables(cache)) == 1


@pytest.mark.parametrize("damage", ["cut short", "nonsense", "empty"])
def test_a_bad_file_is_replaced(cache: Path, damage: str) -> None:
    build()
    (file,) = executables(cache)
    good = file.read_bytes()
    file.write_bytes({"cut short": good[: len(good) // 2], "nonsense": b"\x80nonsense", "empty": b""}[damage])
    np.testing.assert_array_equal(build(), np.cumsum(X) * 3)
    assert "loaded from disk" not in isthmus.metrics.counts()
    assert executables(cache) == [file]
    np.testing.assert_array_equal(build(), np.cumsum(X) * 3)
    assert isthmus.metrics.counts()["loaded from disk"] == 1


def test_a_folder_that_cannot_be_written_is_not_an_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").write_text("in the way")
    use(cache / "file", monkeypatch)
    np.testing.assert_array_equal(build(), np.cumsum(X) * 3)
    assert any(name.startswith("not saved to disk") for name in isthmus.metrics.counts())


def test_without_a_folder_nothing_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("", monkeypatch)
    build()
    build()
    assert "loaded from disk" not in isthmus.metrics.counts()
    assert not list(cache.iterdir())
