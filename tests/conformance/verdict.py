"""The verdict on one entry of a database, and the gaps we know of."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from isthmus._runtime import counters
from tests.conformance.values import Mismatch

EXPECTATIONS = Path(__file__).parent.parent / "expectations.toml"


@dataclass(frozen=True)
class Entry:
    """What is judged: one entry of a database, one thing done with it, one dtype."""

    suite: str
    name: str
    kind: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}-{self.dtype}"


@dataclass
class Verdict:
    """What was seen while the samples of an entry ran."""

    entry: Entry
    samples: int = 0
    wrong: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    cpu: set[str] = field(default_factory=set)

    @property
    def status(self) -> str:
        """``pass``, ``wrong`` or ``raises``."""
        return "wrong" if self.wrong else "raises" if self.raised else "pass"

    @contextlib.contextmanager
    def sample(self, number: int) -> Iterator[None]:
        """Run the body as one sample: what it raises and what falls to the CPU is noted."""
        counters.clear()
        self.samples += 1
        try:
            yield
        except Mismatch as mismatch:
            self.wrong.append(f"sample {number}: {mismatch}")
        except Exception as error:
            first = str(error).strip().split("\n")[0][:240]
            self.raised.append(f"sample {number}: {type(error).__name__}: {first}")
        finally:
            self.cpu.update(counters.fallbacks)


class Expectations:
    """The rows of expectations.toml: ``gap`` for what does not pass, ``cpu`` for what runs there."""

    def __init__(self) -> None:
        rows = tomllib.loads(EXPECTATIONS.read_text(encoding="utf-8"))
        self.gaps: list[dict[str, Any]] = rows.get("gap", [])
        self.cpu: list[dict[str, Any]] = rows.get("cpu", [])

    @staticmethod
    def find(rows: list[dict[str, Any]], entry: Entry) -> dict[str, Any] | None:
        """Return the row that speaks of an entry."""
        for row in rows:
            named = row["suite"] == entry.suite and entry.name in row["names"]
            kind = entry.kind in row.get("kinds", [entry.kind])
            if named and kind and entry.dtype in row.get("dtypes", [entry.dtype]):
                return row
        return None


expectations = Expectations()


def chosen(samples: Iterable[Any], entry: Entry, limit: int | None) -> list[Any]:
    """Return the samples to run: all, or as many as asked for unless the entry is known to be special."""
    made = list(samples)
    known = any(expectations.find(rows, entry) for rows in (expectations.gaps, expectations.cpu))
    if limit is None or known or len(made) <= limit:
        return made
    return [made[i * len(made) // limit] for i in range(limit)]


def judge(verdict: Verdict, record: Any) -> None:
    """Record a verdict for the table, and fail the test unless it is what is expected."""
    entry = verdict.entry
    if not verdict.samples:
        pytest.skip("torch has no such sample for the CPU, so nothing was compared")
    gap, cpu = (expectations.find(rows, entry) for rows in (expectations.gaps, expectations.cpu))
    detail = (verdict.wrong + verdict.raised)[:3]
    row = {**vars(entry), "status": verdict.status, "samples": verdict.samples}
    record("conformance", {**row, "cpu": sorted(verdict.cpu), "detail": detail})
    if verdict.status != "pass" and gap is None:
        pytest.fail(f"{entry}: {verdict.status}\n" + "\n".join(detail), pytrace=False)
    if verdict.status == "pass" and gap is not None:
        pytest.fail(f"{entry} passes now: take it out of {EXPECTATIONS.name}", pytrace=False)
    if verdict.cpu and cpu is None:
        pytest.fail(f"{entry}: on the CPU: {', '.join(sorted(verdict.cpu))}", pytrace=False)
    if cpu is not None and not verdict.cpu:
        pytest.fail(f"{entry} stays on the device now: take it out of {EXPECTATIONS.name}", pytrace=False)
