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


class Uncompilable(Exception):
    """torch cannot compile this call for the CPU either."""


def described(error: Exception) -> str:
    """Return an error in one line: of one that wraps a backend's, the backend's."""
    error = getattr(error, "inner_exception", error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:480]}"


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
    outside: set[str] = field(default_factory=set)
    """What no compiled program computed."""
    uncompilable: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        """``pass``, ``wrong``, ``raises``, or ``torch`` where torch itself can compile no sample."""
        if self.uncompilable and not self.samples:
            return "torch"
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
        except Uncompilable as reason:
            self.samples -= 1
            self.uncompilable.append(f"sample {number}: {reason}")
        except Exception as error:
            self.raised.append(f"sample {number}: {described(error)}")
        finally:
            self.cpu.update(counters.fallbacks)


class Expectations:
    """The rows of expectations.toml: ``gap`` does not pass, ``cpu`` runs there, ``outside`` leaves the programs."""

    def __init__(self) -> None:
        rows = tomllib.loads(EXPECTATIONS.read_text(encoding="utf-8"))
        self.gaps: list[dict[str, Any]] = rows.get("gap", [])
        self.cpu: list[dict[str, Any]] = rows.get("cpu", [])
        self.outside: list[dict[str, Any]] = rows.get("outside", [])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All of them."""
        return self.gaps + self.cpu + self.outside

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
    known = expectations.find(expectations.rows, entry)
    if limit is None or known or len(made) <= limit:
        return made
    return spread(made, limit)


def spread(made: list[Any], count: int) -> list[Any]:
    """Return some samples of many, spread evenly; none is the first, which is often trivial: one is the middle one."""
    return [made[(2 * i + 1) * len(made) // (2 * count)] for i in range(count)]


def judge(verdict: Verdict, record: Any) -> None:
    """Record a verdict for the table, and fail the test unless it is what is expected."""
    entry = verdict.entry
    if not verdict.samples and not verdict.uncompilable:
        pytest.skip("torch has no such sample for the CPU, so nothing was compared")
    detail = (verdict.wrong + verdict.raised)[:3]
    row = {**vars(entry), "status": verdict.status, "samples": verdict.samples, "cpu": sorted(verdict.cpu)}
    row |= {"outside": sorted(verdict.outside), "uncompilable": verdict.uncompilable[:3]}
    record("conformance", {**row, "detail": detail})
    if verdict.status == "torch":
        pytest.skip(f"torch cannot compile it for the CPU either: {verdict.uncompilable[0]}")
    gap = expectations.find(expectations.gaps, entry)
    if verdict.status != "pass" and gap is None:
        pytest.fail(f"{entry}: {verdict.status}\n" + "\n".join(detail), pytrace=False)
    if verdict.status == "pass" and gap is not None:
        pytest.fail(f"{entry} passes now: take it out of {EXPECTATIONS.name}", pytrace=False)
    _only_if_expected(entry, verdict.cpu, expectations.cpu, "on the CPU")
    _only_if_expected(entry, verdict.outside, expectations.outside, "outside the compiled programs")


def _only_if_expected(entry: Entry, ops: set[str], rows: list[dict[str, Any]], where: str) -> None:
    """Fail the test where ops ran somewhere that no row tells, or a row tells of some and there are none."""
    expected = expectations.find(rows, entry)
    if ops and expected is None:
        pytest.fail(f"{entry}: {where}: {', '.join(sorted(ops))}", pytrace=False)
    if expected is not None and not ops:
        pytest.fail(f"{entry} has nothing {where} now: take it out of {EXPECTATIONS.name}", pytrace=False)
