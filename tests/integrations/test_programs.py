"""The programs of real libraries that docs/libraries.md says work still work."""

from __future__ import annotations

import json

import pytest

from tests.integrations import programs
from tests.integrations.try_libraries import PAGE, RESULTS, outcome, page

ROWS = json.loads(RESULTS.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in programs.load() if name in ROWS])
def test_a_program_does_what_the_page_says(name: str) -> None:
    row = outcome(name)
    if row["verdict"] == "not tried":
        pytest.skip(f"{row['library']} is not installed: make test-integrations")
    assert row["verdict"] == ROWS[name]["verdict"], row["note"]


def test_the_page_is_of_the_rows() -> None:
    assert PAGE.read_text() == page(ROWS)


def test_every_row_has_a_program() -> None:
    assert set(ROWS) <= set(programs.load())
