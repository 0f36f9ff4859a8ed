"""The table of changes, with libraries made up here: when a change is made, and what happens where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus import integrations
from tests.interpreters import forked_early

MADE_UP = """
import json, sys, warnings
from pathlib import Path
folder = Path(sys.argv[1])
package = folder / "stable_baselines3" / "common"
package.mkdir(parents=True)
# A folder without this file would give way to the real library, where that is installed.
for part in (package, package.parent):
    (part / "__init__.py").touch()
(package / "utils.py").write_text(sys.argv[2])
sys.path.insert(0, str(folder))
import torch, isthmus
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from stable_baselines3.common import utils
"""
LIBRARY = """
import torch
def get_device(device="auto"):
    return torch.device("cpu" if device == "auto" else device)
"""


def answer(code: str, *arguments: str, libraries: str) -> object:
    """Run code after a made-up library was imported and return what it printed in JSON."""
    done = forked_early(MADE_UP + code, *arguments, ISTHMUS_LIBRARIES=libraries)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("setting", "taken"), [("on", "jax"), ("auto", "cpu"), ("off", "cpu")])
def test_the_setting_decides(setting: str, taken: str, tmp_path: Path) -> None:
    code = "print(json.dumps([utils.get_device().type, utils.get_device('cpu').type, len(caught)]))"
    assert answer(code, str(tmp_path), LIBRARY, libraries=setting) == [taken, "cpu", 0]


def test_a_library_with_other_names_works_as_it_is(tmp_path: Path) -> None:
    code = """
print(json.dumps([utils.other(), [str(w.message) for w in caught], list(isthmus.integrations.failed)]))
"""
    value, warned, failed = answer(code, str(tmp_path), "def other(): return 3", libraries="on")
    assert (value, failed) == (3, ["get_device"])
    assert len(warned) == 1
    assert "was left as it is: get_device could not be changed" in warned[0]


def test_the_report_names_the_setting_that_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    from isthmus.integrations import stable_baselines3

    monkeypatch.setattr(integrations, "LIBRARIES", {"stable_baselines3": ("pytest",)})
    monkeypatch.setattr(stable_baselines3, "takes", lambda: "cpu")
    [(library, said)] = integrations.report()
    assert library == "stable_baselines3"
    assert f"(checked with {integrations.checked(library)}): takes 'cpu'; " in said
    assert "ISTHMUS_LIBRARIES=on" in said
    monkeypatch.setattr(stable_baselines3, "takes", lambda: 1 / 0)
    [(_, said)] = integrations.report()
    assert said.endswith("did not say: ZeroDivisionError: division by zero")

    def another_torch() -> str:
        # As transformers does, whose own words do not name what is wrong.
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'TrainingArguments'.") from error

    monkeypatch.setattr(stable_baselines3, "takes", another_torch)
    [(_, said)] = integrations.report()
    assert "did not say: RuntimeError: operator torchvision::nms does not exist; to fix it: install" in said


def test_every_change_has_its_function() -> None:
    import importlib

    for change in integrations.TABLE:
        module = importlib.import_module(f"isthmus.integrations.{change.library}")
        assert callable(getattr(module, change.function))
        assert callable(module.takes)
        assert change.library in integrations.LIBRARIES
