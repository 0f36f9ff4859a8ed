"""A pytest plugin that gathers the verdicts of every worker into a table and build/conformance.json."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import jax
import torch

OUTPUT = Path(os.environ.get("ISTHMUS_BUILD", Path(__file__).parents[2] / "build")) / "conformance.json"
AS_IT_RUNS = OUTPUT.with_suffix(".jsonl")


def pytest_addoption(parser: Any) -> None:
    """Let a run be shorter than complete."""
    told = "run at most this many samples of each entry of torch's databases, spread evenly"
    parser.addoption("--samples", type=int, default=None, metavar="N", help=told)


_rows: list[dict[str, Any]] = []


def pytest_runtest_logreport(report: Any) -> None:
    """Keep the verdict a test recorded; with xdist the process that gathers reports does so too."""
    if report.when != "call" or "PYTEST_XDIST_WORKER" in os.environ:
        return
    for name, value in report.user_properties:
        if name == "conformance":
            _keep({**value, "seconds": round(report.duration, 3)})


def _keep(row: dict[str, Any]) -> None:
    """Keep a row, also on disk: a run that is cut short is still worth reading."""
    OUTPUT.parent.mkdir(exist_ok=True)
    with AS_IT_RUNS.open("a" if _rows else "w", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    _rows.append(row)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table and write the file."""
    if not _rows:
        return
    table = summary(_rows)
    terminalreporter.section("conformance")
    terminalreporter.write_line(text(table))
    about = {"torch": torch.__version__, "jax": jax.__version__}
    rows = sorted(_rows, key=lambda r: (r["suite"], r["name"], r["kind"], r["dtype"]))
    OUTPUT.write_text(json.dumps({**about, "table": table, "entries": rows}, indent=1), encoding="utf-8")


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one line for each suite, kind and dtype: entries, how many pass, raise, are wrong, used the CPU.

    ``torch`` counts entries that torch itself cannot compile, which no percentage is of; ``outside`` those with ops
    that no compiled program computed.
    """
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["suite"], row["kind"], row["dtype"]].append(row)
    return [_line(*key, group) for key, group in sorted(groups.items())]


def _line(suite: str, kind: str, dtype: str, group: list[dict[str, Any]]) -> dict[str, Any]:
    found = Counter(row["status"] for row in group)
    counts = {name: found[name] for name in ("pass", "raises", "wrong", "torch")}
    elsewhere = {name: sum(bool(row[name]) for row in group) for name in ("cpu", "outside")}
    samples = sum(row["samples"] for row in group)
    line = {"suite": suite, "kind": kind, "dtype": dtype, "entries": len(group), **counts, **elsewhere}
    judged = len(group) - found["torch"]
    return {**line, "samples": samples, "percent": round(100 * found["pass"] / judged, 2) if judged else None}


def text(table: list[dict[str, Any]]) -> str:
    """Return the table for a person."""
    names = list(table[0])
    cells = [names, *[[str(line[name]) for name in names] for line in table]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
