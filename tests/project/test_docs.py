"""The documents: every Python example runs, every link leads somewhere."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from isthmus import config
from isthmus._dynamo.options import Options
from tests.interpreters import forked, fresh

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "tests" / "README.md"])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str]]:
    """Return the Python blocks of every document and where they are."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[1] == "python":
                line = text[: match.start()].count("\n") + 1
                found.append((f"{document.relative_to(ROOT)}:{line}", match[2]))
    return found


EXAMPLES = examples()


def test_there_are_examples() -> None:
    files = {where.rsplit(":", 1)[0] for where, _ in EXAMPLES}
    assert {"README.md", "docs/add-a-lowering.md"} <= files
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize(("where", "code"), EXAMPLES, ids=[where for where, _ in EXAMPLES])
def test_example_runs_without_touching_the_cpu(where: str, code: str) -> None:
    # A process of its own: examples set options and define ops, as a reader's first program does. The first example a
    # reader sees has a new interpreter, so that imports are tested as well.
    run = fresh if where == EXAMPLES[0][0] else forked
    ran = run(code, ISTHMUS_FALLBACK="error")
    assert ran.returncode == 0, f"{where}\n{ran.stderr}"
    assert "Warning" not in ran.stderr, f"{where}\n{ran.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{document.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_named_files_and_targets_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:isthmus|tests|docs|benchmarks|examples)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`make ([a-z-]+)`", text):
        assert target in targets, f"{document.name} names make {target}"


def test_the_list_of_operators_is_current() -> None:
    import torch

    if not torch.__version__.startswith("2.13"):
        pytest.skip("the page is written for torch 2.13, and which ops there are depends on the version")
    ran = forked("import runpy; print(runpy.run_path('docs/make_ops.py')['text'](), end='')")
    assert ran.returncode == 0, ran.stderr
    assert (ROOT / "docs" / "ops.md").read_text(encoding="utf-8") == ran.stdout, "run `make docs`"


def test_the_list_of_settings_is_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_settings.py"))["text"]()
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == page, "run `make docs`"
    variables = [each.metadata["variable"] for each in fields(config.Settings)]
    for name in [*variables, config.AUTOLOAD, *[each.name for each in fields(Options)]]:
        assert f"`{name}`" in page
