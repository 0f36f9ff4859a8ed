"""The line on the terminal while a compilation takes long: who sees it, and what it says."""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import isthmus
from isthmus._runtime import progress

NEVER = 3600.0
TIMEOUT = 60.0


class Terminal(io.StringIO):
    """A stream that may be a terminal, and says when it is first written to."""

    def __init__(self, tty: bool = True) -> None:
        super().__init__()
        self.tty, self.written = tty, threading.Event()

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as what the module takes for stderr, and no patience."""
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))  # pytest sets sys.stderr itself
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    return stream


def test_a_long_compilation_is_announced_and_its_time_told(terminal: Terminal) -> None:
    with progress.line("forward 0 (3 nodes)"):
        assert terminal.written.wait(TIMEOUT)
        assert terminal.getvalue() == "isthmus: compiling forward 0 (3 nodes) ..."
    first, last = terminal.getvalue().split("\r")
    assert re.fullmatch(r"isthmus: compiled forward 0 \(3 nodes\) in \d+\.\d s\n", last)
    assert len(last) > len(first), "the second line covers the first"


def test_a_compilation_that_fails_is_not_called_compiled(terminal: Terminal) -> None:
    with contextlib.suppress(ZeroDivisionError), progress.line("it"):
        assert terminal.written.wait(TIMEOUT)
        raise ZeroDivisionError
    assert terminal.getvalue().partition("\r")[2].startswith("isthmus: stopped compiling it in ")


def test_a_short_compilation_says_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", NEVER)
    before = threading.active_count()
    with progress.line("forward 0"):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before, "nothing is left to write later"
    assert terminal.getvalue() == ""


def test_a_notebook_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # As ipykernel has it: a stream that is no terminal, known by where its class is from.
    kernel_stream = type("OutStream", (Terminal,), {"__module__": "ipykernel.iostream"})
    stream = kernel_stream(tty=False)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    with progress.line("forward 0"):
        assert stream.written.wait(TIMEOUT)
    assert re.search(r"\risthmus: compiled forward 0 in \d+\.\d s\n", stream.getvalue())


@pytest.mark.parametrize("why", ["not a terminal", "off", "no title"])
def test_nobody_to_tell(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "not a terminal":
        terminal.tty = False
    if why == "off":
        monkeypatch.setattr(isthmus.config, "current", replace(isthmus.config.current, progress="off"))
    before = threading.active_count()
    with progress.line("" if why == "no title" else "forward 0"):
        assert threading.active_count() == before, "nothing waits to write"
    assert terminal.getvalue() == ""


def test_compiled_graphs_have_a_title_and_single_ops_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []

    @contextlib.contextmanager
    def line(title: str) -> Iterator[None]:
        titles.append(title)
        yield

    monkeypatch.setattr(progress, "line", line)
    torch._dynamo.reset()
    x = torch.arange(7.0).to("jax")
    torch.compile(lambda x: x.sin() * 3, backend="isthmus")(x)
    torch.hypot(x, x)
    graphs = [title for title in titles if title]
    assert len(graphs) == 1
    assert re.fullmatch(r"inference \d+ \(4 nodes\)", graphs[0])
