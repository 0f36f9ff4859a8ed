"""Check Isthmus against the torch and JAX releases it claims to work on; run by ``make test-versions``.

One virtual environment per row of ``PAIRS``, made and removed one after the other under ``build/versions/``, whatever
becomes of it: the registry's torch is its CUDA build, several gigabytes each. In each environment, as a user would
install it (``pip install .``, not an editable install):

1. ``isthmus doctor`` must find nothing wrong;
2. every Python block of README.md must run;
3. a selection of the test suite, spread evenly over all of its files (``pytest --spread``), must pass.

The rows go into ``docs/versions.md``; a run of a few pairs (``--pair 2.15.0:3.13``) replaces their rows only.
Uses nothing but the standard library, so that any Python can start it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "versions"
SOURCE = WORK / "source"
TABLE = ROOT / "docs" / "versions.md"
TORCH = ("2.11.0", "2.12.1", "2.14.1", "2.15.0")
# JAX 0.10 is the last that runs on Python 3.11; the newest JAX is checked on the newest Python.
SURROUNDINGS = (("3.11", "jax>=0.10,<0.11"), ("3.13", "jax"))
TESTS = 300
# Seconds for each pip install (several gigabytes), for a short command, and for the tests: on a busy machine, too.
INSTALLING, SHORT, TESTING = 3600, 600, 7200
# What the tests import. transformers and flax hold torch and JAX to no version that matters here.
TEST_PACKAGES = (
    "equinox",
    "expecttest",
    "flax",
    "hypothesis",
    "optax",
    "orbax-checkpoint",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "transformers",
)
HEAD = """# Versions

`make test-versions` wrote this table: for each pair an environment of its own, with Isthmus installed as a user does.
*doctor* is `isthmus doctor`, *README* counts the blocks of README.md that ran, *tests* is a selection spread over
every file of the test suite. torch 2.13.0 with JAX 0.10 on Python 3.11 is what `make test` runs in full.

| torch | JAX | Python | doctor | README | tests | checked on |
| --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Pair:
    """One environment: a torch release, a JAX requirement and a Python version."""

    torch: str
    jax: str
    python: str

    @property
    def name(self) -> str:
        """The pair as it is named on the command line and on disk."""
        return f"{self.torch}:{self.python}"


@dataclass(frozen=True)
class Row:
    """What was seen of a pair: one line of the table."""

    cells: tuple[str, ...]
    good: bool

    def __str__(self) -> str:
        return "| " + " | ".join(self.cells) + " |"


PAIRS = [Pair(torch, jax, python) for torch in TORCH for python, jax in SURROUNDINGS]


def interpreter(version: str) -> str | None:
    """Return a working ``python3.x``: from PATH, else from pyenv (whose shims on PATH may be switched off)."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += sorted(map(str, pyenv.glob(f"{version}.*/bin/python")), reverse=True)
    for candidate in filter(None, candidates):
        try:
            asked = subprocess.run([candidate, "-c", "import venv"], capture_output=True, timeout=SHORT)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if asked.returncode == 0:
            return candidate
    return None


def snapshot() -> None:
    """Copy the sources, so that what is checked stays the same while they are worked on."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    shutil.rmtree(SOURCE, ignore_errors=True)
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, SOURCE / name)


def place(pair: Pair) -> Path:
    """Return the folder of a pair's virtual environment."""
    return WORK / pair.name.replace(":", "-py")


def environment(pair: Pair, logs: Path) -> Path:
    """Make the virtual environment of a pair and return its Python; raise ``Failed`` where that does not work."""
    where = place(pair)
    python = where / "bin" / "python"
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if not (where / ".installed").exists():
        base = interpreter(pair.python)
        if base is None:
            raise Failed(f"python{pair.python} is neither on PATH nor in pyenv")
        must(run(Path(base), logs / "venv.log", "-m", "venv", "--clear", str(where)))
        packages = [f"torch=={pair.torch}", pair.jax]
        must(run(python, logs / "pip-pair.log", *pip, *packages, limit=INSTALLING))
        must(run(python, logs / "pip-tests.log", *pip, *TEST_PACKAGES, limit=INSTALLING))
        (where / ".installed").touch()
    # Always anew: the sources may have changed since the environment was made.
    anew = (*pip, "--no-deps", "--force-reinstall", str(SOURCE))
    must(run(python, logs / "pip-isthmus.log", *anew, limit=INSTALLING))
    return python


class Failed(Exception):
    """An environment cannot be made."""


def must(ran: subprocess.CompletedProcess[str]) -> None:
    """Raise unless a command succeeded."""
    if ran.returncode:
        raise Failed(f"{' '.join(ran.args)}: {(ran.stdout + ran.stderr).strip()[-500:]}")


def run(
    python: Path, log: Path, *arguments: str, folder: Path | None = None, limit: int = SHORT
) -> subprocess.CompletedProcess[str]:
    """Run a command of the environment with its output in ``log``; a time-out is a failure and ends its children."""
    command = [str(python), *arguments]
    # From a folder without sources, so that the installed package is what runs. In a session of its own: pytest's
    # workers and the processes of tests would outlive it, and hold gigabytes.
    with subprocess.Popen(
        command,
        cwd=folder or log.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
            code = process.returncode
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise  # Ctrl-C, which no longer reaches the children by itself
            out, err = process.communicate()
            code, err = 124, f"{err}\ntimed out after {limit} s"
    log.write_text(out + err, encoding="utf-8")
    return subprocess.CompletedProcess(command, code, out, err)


def blocks() -> list[str]:
    """Return the Python blocks of README.md."""
    text = (SOURCE / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def check(pair: Pair, keep: bool) -> Row:
    """Install a pair, examine it, remove it and return its row."""
    started = time.monotonic()
    logs = WORK / f"logs-{pair.name.replace(':', '-py')}"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    try:
        row = examine(pair, environment(pair, logs), logs)
    except Failed as error:
        print(error, file=sys.stderr)
        cells = (pair.torch, pair.jax, pair.python, "**not installed**", "0", "none")
        row = Row((*cells, datetime.date.today().isoformat()), False)
    finally:
        if not keep:
            shutil.rmtree(place(pair), ignore_errors=True)
    took = time.monotonic() - started
    print(f"{pair.name}: {'good' if row.good else 'BAD'} in {took:.0f} s, logs in {logs}", flush=True)
    return row


def examine(pair: Pair, python: Path, logs: Path) -> Row:
    """Run doctor, the README's blocks and tests in an environment, and return its row."""
    versions = run(
        python,
        logs / "versions.log",
        "-c",
        "from importlib.metadata import version as v; print(v('torch'), v('jax'), v('jaxlib'))",
    ).stdout.split()
    doctor = run(python, logs / "doctor.log", "-m", "isthmus.cli", "doctor")
    readme = [run(python, logs / f"readme-{n}.log", "-c", code) for n, code in enumerate(blocks())]
    ran = sum(block.returncode == 0 for block in readme)
    tests = run(
        python, logs / "tests.log", "-m", "pytest", "-n", "2", "-m", "not slow", "--samples", "1",
        # What a newer release deprecates is news, not a failure.
        "-W", "ignore::DeprecationWarning", "-W", "default::FutureWarning",
        "--spread", str(TESTS), folder=SOURCE, limit=TESTING,
    )  # fmt: skip
    summary = (tests.stdout.strip().splitlines() or ["nothing ran"])[-1].strip("= ")
    good = doctor.returncode == 0 and ran == len(readme) and tests.returncode == 0
    cells = (
        versions[0].split("+")[0] if versions else pair.torch,
        versions[1] if len(versions) > 1 else pair.jax,
        pair.python,
        "healthy" if doctor.returncode == 0 else "**problems**",
        f"{ran} of {len(readme)}",
        re.sub(r" in .*", "", summary),
        datetime.date.today().isoformat(),
    )
    return Row(cells, good)


def write(rows: dict[tuple[str, str], str]) -> None:
    """Write the table, rows sorted by torch and Python."""
    TABLE.write_text(HEAD + "\n".join(rows[key] for key in sorted(rows)) + "\n", encoding="utf-8")


def written() -> dict[tuple[str, str], str]:
    """Return the rows that the table has, by torch and Python version."""
    if not TABLE.exists():
        return {}
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d", line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {(c[0], c[2]): line for c, line in zip(cells, lines, strict=True)}


def main() -> int:
    """Check the pairs asked for and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pair", action="append", choices=[pair.name for pair in PAIRS], help="default: all")
    parser.add_argument("--keep", action="store_true", help="leave the environment under build/versions/")
    options = parser.parse_args()
    chosen = [pair for pair in PAIRS if options.pair is None or pair.name in options.pair]
    known = {(pair.torch, pair.python) for pair in PAIRS}
    rows = {key: row for key, row in written().items() if key in known}
    bad = []
    snapshot()
    for number, pair in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] torch {pair.torch}, {pair.jax}, Python {pair.python}", flush=True)
        row = check(pair, options.keep)
        rows[row.cells[0], row.cells[2]] = str(row)
        write(rows)  # after each pair: hours of work survive an interruption
        if not row.good:
            bad.append(pair.name)
    if bad:
        print(f"not good: {', '.join(bad)}; the logs in {WORK} say why", file=sys.stderr)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
