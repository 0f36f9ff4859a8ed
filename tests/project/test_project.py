"""What the project promises around the code: pins, packaging, commands."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import isthmus

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    """Return the constraints by name."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def test_constraints_are_exact_and_portable() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        code = line.split("#")[0].strip()
        assert not code or re.fullmatch(r"[\w.-]+==[\w.]+", code), f"{line!r} is not a plain pin"


def test_constraints_satisfy_the_requirements() -> None:
    canonical = {name.lower().replace("_", "-"): version for name, version in pins().items()}
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    for text in wanted:
        requirement = Requirement(text)
        assert requirement.name.lower() in canonical, f"{requirement.name} is not pinned"
        assert Version(canonical[requirement.name.lower()]) in requirement.specifier, text


def test_annotations_reach_type_checkers() -> None:
    assert (ROOT / "isthmus" / "py.typed").exists()
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_extras() -> None:
    assert {"cuda", "tpu", "dev"} <= set(PROJECT["project"]["optional-dependencies"])


def test_version_is_written_once_in_effect() -> None:
    assert PROJECT["project"]["version"] == isthmus.__version__


def test_entry_points_are_callable() -> None:
    import importlib

    targets = [*PROJECT["project"]["scripts"].values()]
    for group in PROJECT["project"]["entry-points"].values():
        targets += group.values()
    for target in targets:
        module, name = target.split(":")
        assert callable(getattr(importlib.import_module(module), name)), target


def test_license_is_apache() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_ci_runs_what_a_contributor_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = script.read_text().splitlines()
    assert {"make lint", "exec make test"} <= set(commands)
    assert "set -euo pipefail" in commands  # so that lint that fails ends it


@pytest.mark.parametrize("target", ["venv", "demo", "test", "test-all", "lint"])
def test_make_target_exists(target: str) -> None:
    # -n says what would run and runs nothing.
    asked = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr


def commands_of(target: str) -> str:
    """Return the commands that a target would run."""
    return subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True).stdout


def test_make_lints_and_tests() -> None:
    for part in ("ruff check", "ruff format --check", "mypy"):
        assert part in commands_of("lint")
    for part in ("pytest", "not slow"):
        assert part in commands_of("test")
    for part in ("ruff check", "mypy", "pytest", "--xla-default"):
        assert part in commands_of("test-all")
    assert PROJECT["tool"]["mypy"]["strict"] is True
    assert PROJECT["tool"]["pytest"]["ini_options"]["xfail_strict"] is True


def test_make_installs_the_pinned_torch_first() -> None:
    said = subprocess.run(["make", "-nB", "venv"], cwd=ROOT, capture_output=True, text=True).stdout
    installs = [line for line in said.splitlines() if "pip install" in line]
    assert f"torch=={pins()['torch']}" in installs[0]
    assert all("-c constraints.txt" in line for line in installs)


def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    body = "import sys; sys.version_info = (3, 10, 0); sys.version = '3.10.0'; exec(sys.argv[2])"
    old.write_text(f'#!/bin/sh\nexec {os.path.realpath("/usr/bin/env")} python3 -c "{body}" "$@"\n')
    old.chmod(0o755)
    asked = subprocess.run(["make", "-B", "venv", f"PYTHON={old}"], cwd=ROOT, capture_output=True, text=True)
    assert asked.returncode != 0
    assert "Isthmus needs Python 3.11 or newer" in asked.stderr
