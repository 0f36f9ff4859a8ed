"""A set-up that is not right: wrong settings in the environment; a Python, torch or JAX that cannot serve the device.

Each in a process of its own, with fakes: a folder first on the path holds a ``jax`` that is old or does not import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import isthmus
from isthmus import config

ROOT = Path(__file__).parents[2]


def python(code: str, *path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, with folders first on its path."""
    search = os.pathsep.join(map(str, [*path, ROOT]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ISTHMUS_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": search, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )


def warned(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the warnings about settings that a process gave."""
    return [
        line.split("ConfigWarning: ")[1] for line in done.stderr.splitlines() if "ConfigWarning: " in line
    ]


# ---- settings


SHOW = "import torch, isthmus; print(isthmus.config.fallback, isthmus.config.graph_size)"


@pytest.mark.parametrize(
    ("environment", "want", "words"),
    [
        (
            {"ISTHMUS_FALLBACK": "eror"},
            "warn 5000",
            "ISTHMUS_FALLBACK='eror' is ignored: ISTHMUS_FALLBACK takes 'cpu' or 'warn' or 'error'; the default, "
            "'warn', is used",
        ),
        (
            {"ISTHMUS_GRAPH_SIZE": "0", "ISTHMUS_FALLBACK": "cpu"},
            "cpu 5000",
            "ISTHMUS_GRAPH_SIZE='0' is ignored: ISTHMUS_GRAPH_SIZE takes a positive integer; the default, 5000, is",
        ),
        (
            {"ISTHMUS_FALBACK": "error"},
            "warn 5000",
            "ISTHMUS_FALBACK is ignored: Isthmus has no setting of that name; did you mean ISTHMUS_FALLBACK?",
        ),
        (
            {"ISTHMUS_XYZ": "1"},
            "warn 5000",
            "ISTHMUS_XYZ is ignored: Isthmus has no setting of that name; there are ISTHMUS_FALLBACK, ISTHMUS_CHECK",
        ),
        ({"ISTHMUS_MODE": "fast"}, "warn 5000", "ISTHMUS_MODE takes 'eager' or 'lazy'"),
    ],
)
def test_a_wrong_variable_is_warned_about_and_left_out(
    environment: dict[str, str], want: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("ISTHMUS_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(isthmus.errors.ConfigWarning) as given:
        found = config.from_environment()
    assert f"{found.fallback} {found.graph_size}" == want
    assert len(given) == 1
    assert words in str(given[0].message)


def test_wrong_variables_do_not_break_import_torch() -> None:
    done = python(
        SHOW, ISTHMUS_FALLBACK="eror", ISTHMUS_GRAPH_SIZE="-1", ISTHMUS_LINE="on", ISTHMUS_AUTOLOAD="yes"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "warn 5000"
    assert len(warned(done)) == 3
    assert "ISTHMUS_AUTOLOAD='yes' is ignored" in done.stderr
    assert "did you mean ISTHMUS_LINES?" in done.stderr


def test_variables_that_are_right_or_empty_are_not_warned_about() -> None:
    done = python(
        SHOW,
        ISTHMUS_FALLBACK="error",
        ISTHMUS_GRAPH_SIZE=" 12 ",
        ISTHMUS_MODE="",
        ISTHMUS_AUTOLOAD="1",
        ISTHMUS_CACHE="",
    )
    assert done.stdout.strip() == "error 12", done.stderr
    assert not warned(done)


@pytest.mark.parametrize(("value", "loaded"), [("0", False), ("1", True)])
def test_autoload_says_whether_import_torch_adds_the_device(value: str, loaded: bool) -> None:
    code = """
import sys
import torch, _isthmus_autoload
_isthmus_autoload.rival = lambda: RIVAL
_isthmus_autoload.run()
print("isthmus" in sys.modules)
"""
    code = code.replace(
        "RIVAL", "'cuda'" if loaded else "None"
    )  # what would be done by default is the opposite
    done = python(code, ISTHMUS_AUTOLOAD=value, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.strip() == str(loaded), done.stderr
    assert "is ignored" not in done.stderr


def test_an_assignment_of_a_wrong_value_raises() -> None:
    with pytest.raises(
        isthmus.errors.ConfigError, match="'eror' is not a choice; choose from 'cpu', 'warn', 'error'"
    ):
        config.fallback = "eror"


# ---- Python, torch and JAX

MISSING = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "jax":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""
OLD = '__version__ = "0.9.1"\n'
BROKEN = 'raise RuntimeError("jaxlib is version 0.1, but jax needs 0.2\\nand a long story")\n'
SENTENCES = {
    "missing": "JAX is not installed, and Isthmus needs 0.10 or newer; to fix it: pip install 'jax>=0.10'",
    "old": "JAX 0.9.1 is older than 0.10, the oldest that Isthmus works with; to fix it: pip install -U 'jax>=0.10'",
    "broken": "cannot be imported (RuntimeError: jaxlib is version 0.1, but jax needs 0.2); to fix it: "
    "pip install --force-reinstall 'jax>=0.10'",
    "torch": "torch 2.9.1 is older than 2.11, the oldest that Isthmus works with; to fix it: "
    "pip install -U 'torch>=2.11'",
    "python": "Python 3.10.4 is older than 3.11, the oldest that Isthmus works with; to fix it: python3.11 -m venv",
}


class Fake:
    """What makes a set-up wrong: code to run first, and folders that come first on the path."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.sentence = SENTENCES[kind]
        self.path: list[Path] = []
        self.before = MISSING if kind == "missing" else ""
        # Once torch is imported, without the device.
        self.after = {
            "torch": "import torch; torch.__version__ = '2.9.1'\n",
            "python": "import sys, torch; sys.version_info = (3, 10, 4, 'final', 0)\n",
        }.get(kind, "")
        if kind in ("old", "broken"):
            (folder / "jax").mkdir()
            (folder / "jax" / "__init__.py").write_text(OLD if kind == "old" else BROKEN)
            self.path = [folder]
        if kind == "old":
            about = folder / "jax-0.9.1.dist-info"
            about.mkdir()
            (about / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.9.1\n")

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run code in this set-up; torch is imported without the device, so that the code says when it is added."""
        return python(self.before + self.after + code, *self.path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.fixture
def fake(request: pytest.FixtureRequest, tmp_path: Path) -> Fake:
    return Fake(request.param, tmp_path)


USE = """
import warnings
import torch, _isthmus_autoload
with warnings.catch_warnings(record=True) as given:
    warnings.simplefilter("always")
    _isthmus_autoload.run()  # as `import torch` does
print("WARNED", *[w.message for w in given if "not available" in str(w.message)])
assert torch.ones(2).sum().item() == 2
model = torch.nn.Linear(2, 2)
for use in (lambda: torch.ones(2, device="jax"), lambda: torch.ones(2).to("jax"), lambda: model.to("jax")):
    try:
        use()
    except ImportError as error:
        print("USED", type(error).__name__, error)
"""
IMPORT = """
try:
    import isthmus
    isthmus.to_jax
except ImportError as error:
    print("IMPORTED", type(error).__name__, error)
"""


@pytest.mark.parametrize("fake", ["missing", "old", "broken", "torch", "python"], indirect=True)
def test_the_first_use_and_the_import_say_what_is_wrong(fake: Fake) -> None:
    done = fake.run(USE + IMPORT + IMPORT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    used = [line for line in lines if line.startswith("USED SetupError")]
    assert len(used) == 3, done.stdout
    assert all(fake.sentence in line for line in used), used
    imported = [line for line in lines if line.startswith("IMPORTED SetupError")]
    assert len(imported) == 2, done.stdout
    assert all(fake.sentence in line for line in imported), imported
    # A JAX that is broken is only known when it is imported, which `import torch` does not do.
    (said,) = [line for line in lines if line.startswith("WARNED")]
    assert (fake.sentence in said) == (fake.sentence != SENTENCES["broken"])


@pytest.mark.parametrize("fake", ["missing", "old", "broken", "torch", "python"], indirect=True)
def test_the_command_says_what_is_wrong(fake: Fake) -> None:
    code = """
import sys, _isthmus_command
for command in ("doctor", "ops"):
    sys.argv[1:] = [command]
    print(_isthmus_command.main())
"""
    done = fake.run(code)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.isdecimal()] == ["1", "1"]
    assert done.stderr.count(fake.sentence) == 2, done.stderr
    assert "Traceback" not in done.stderr


def test_a_jax_without_metadata_is_known_by_its_module(tmp_path: Path) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(OLD)
    code = "import torch, isthmus\ntry:\n  torch.ones(2, device='jax')\nexcept ImportError as e:\n  print(e)"
    done = python(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert SENTENCES["old"] in done.stdout, done.stderr


def test_the_device_works_once_jax_is_there() -> None:
    code = (
        MISSING
        + USE
        + "sys.meta_path.pop(0)\nimport isthmus\nprint(torch.ones(2, device='jax').sum().item())"
    )
    done = python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.splitlines()[-1] == "2.0", done.stderr


@pytest.mark.parametrize(
    "use", ["torch.ones(1, device='jax')", "isthmus.jit(lambda x: x)", "isthmus.jax_function"]
)
def test_loading_leaves_numpys_random_numbers_alone(use: str) -> None:
    """Importing JAX draws from numpy's global generator, which the user may have seeded before the first tensor."""
    draws = "numpy.random.seed(0); {}; print(numpy.random.rand(3).tolist())"
    done = python("import numpy, torch, isthmus\n" + draws.format("0") + "\n" + draws.format(use))
    assert done.returncode == 0, done.stderr
    untouched, loaded = done.stdout.splitlines()
    assert loaded == untouched


def test_torch_compile_says_what_is_wrong(tmp_path: Path) -> None:
    fake = Fake("missing", tmp_path)
    code = """
import torch
try:
    torch.compile(lambda x: x + 1, backend="isthmus")(torch.ones(2))
except Exception as error:
    print(error)
"""
    done = fake.run(code)
    assert fake.sentence in done.stdout + done.stderr
