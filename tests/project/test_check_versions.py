"""``make test-versions``: a pair that fails or hangs costs its own row, and leaves nothing behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests import check_versions
from tests.check_versions import PAIRS, Failed, check, must, run

PYTHON = Path(sys.executable)
# A grandchild that would outlive the command, as pytest's workers would.
HANGS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print(child.pid, flush=True)
time.sleep(100)
"""


def is_alive(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    ran = run(PYTHON, tmp_path / "log", "-c", HANGS, limit=3)
    assert ran.returncode == 124
    assert "timed out after 3 s" in (tmp_path / "log").read_text()
    child = int(ran.stdout.split()[0])
    deadline = time.monotonic() + 20
    while is_alive(child):
        assert time.monotonic() < deadline, "a grandchild lives on"
        time.sleep(0.1)


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    must(run(PYTHON, tmp_path / "log", "-c", "print(3)"))
    with pytest.raises(Failed, match="no such release"):
        must(run(PYTHON, tmp_path / "log", "-c", "raise SystemExit('no such release')"))


@pytest.mark.parametrize("error", [Failed("pip failed"), KeyboardInterrupt()])
def test_an_environment_is_removed_whatever_becomes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(check_versions, "WORK", tmp_path)

    def environment(pair: check_versions.Pair, logs: Path) -> Path:
        (check_versions.place(pair) / "lib").mkdir(parents=True)
        raise error

    monkeypatch.setattr(check_versions, "environment", environment)
    if isinstance(error, Failed):
        row = check(PAIRS[0], keep=False)
        assert not row.good
        assert "**not installed**" in str(row)
    else:
        with pytest.raises(KeyboardInterrupt):
            check(PAIRS[0], keep=False)
    assert not check_versions.place(PAIRS[0]).exists()
