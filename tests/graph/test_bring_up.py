"""The page that brings up a backend: its program runs, on its backend, and what it says of graphs is so."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import isthmus

PAGE = (Path(__file__).parents[2] / "docs" / "bring-up-a-backend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page() -> Iterator[dict[str, Any]]:
    """Yield what the page's program defines, once it has run."""
    (program,) = [code for language, code in BLOCKS if language == "python"]
    names: dict[str, Any] = {"__name__": "page"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(compile(program, "bring-up-a-backend.md", "exec"), names)
        yield names
    finally:
        isthmus.config.backend = "xla"


def test_it_is_a_page() -> None:
    (program,) = [code for language, code in BLOCKS if language == "python"]
    assert len(program.splitlines()) < 120
    assert "_graph" not in program


def test_its_losses_are_those_of_its_own_backend(page: dict[str, Any]) -> None:
    compiled, ran = [], []

    class Counting(page["Mine"]):  # type: ignore[misc]
        def compile(self, graph: Any) -> Any:
            compiled.append(graph)
            run = super().compile(graph)
            return lambda *values: ran.append(1) or run(*values)

    isthmus.register_backend("counting", Counting())
    isthmus.config.backend = "counting"
    with isthmus.lazy():
        losses = page["train"]("jax")
    assert losses == page["losses"]
    assert len(ran) == 5
    # The first step has no gradients yet; from the second on all are one program.
    assert len(compiled) <= 2
    shown = str(compiled[-1]).splitlines()
    (claimed,) = [code for language, code in BLOCKS if language == "text" and "%a0" in code]
    for line in claimed.splitlines():
        assert line in (*shown, "..."), line


def test_a_lowering_that_is_missing_is_named(page: dict[str, Any]) -> None:
    isthmus.config.backend = "mine"
    x = torch.randn(3).to("jax")
    with isthmus.lazy():
        y = x.sort().values
        with pytest.raises(NotImplementedError, match=r"no lowering for aten\.sort"):
            y.tolist()


def test_the_reference_trains_the_same(page: dict[str, Any]) -> None:
    isthmus.config.backend = "reference"
    with isthmus.lazy():
        torch.testing.assert_close(page["train"]("jax"), page["losses"])
