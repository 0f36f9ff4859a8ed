"""The documents: every Python example runs, every link leads somewhere, every message is one of the code's."""

from __future__ import annotations

import ast
import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import isthmus
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


def messages() -> list[str]:
    """Return the messages that the page of troubleshooting explains, as it shows them."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [row for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) if "`" in row]
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


def texts() -> list[str]:
    """Return every string of the package's code; a value that is formatted into one is a gap in it."""
    found = []
    for file in [*(ROOT / "isthmus").rglob("*.py"), *ROOT.glob("_isthmus_*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("\0".join(part.value for part in node.values if isinstance(part, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.ClassDef):
                found.append(node.name)
    return found


def test_troubleshooting_has_the_messages_of_the_code() -> None:
    code = texts()
    assert len(messages()) > 25
    for message in messages():
        # "JitWarning: isthmus.jit records ... at every call": a class, and the words around a value in one string.
        head, _, words = message.partition(": ")
        if head.isidentifier():
            assert head in code or hasattr(torch, head), f"{message}: there is no {head}"
        else:
            words = message
        parts = [part for part in map(str.strip, words.split("...")) if part]
        assert any(all(part in text for part in parts) for text in code), f"no code says {message!r}"


def test_troubleshooting_has_every_kind_of_error() -> None:
    shown = " ".join(messages())
    # What users see of these is their own words: "... is not installed", "... has no memory of its own".
    by_their_words = {"IsthmusError", "RegistrationError", "SetupError"}
    kinds = {
        node.name
        for file in (ROOT / "isthmus").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Warning"))
    }
    assert "JitError" in kinds
    assert not [kind for kind in sorted(kinds - by_their_words) if kind not in shown]


def test_the_site_has_every_page_and_public_name() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = re.findall(r": ([\w-]+\.md)$", site, re.MULTILINE)
    assert len(pages) == len(set(pages))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= set(pages)
    hooks = ast.parse((ROOT / "docs" / "site_hooks.py").read_text(encoding="utf-8"))
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in hooks.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Dict)
    }
    names = [name for section in tables["API"].values() for name in section]
    assert sorted(names) == sorted([*isthmus.__all__, "distributed"])
    assert set(tables["OUTSIDE"].values()) <= set(pages)
