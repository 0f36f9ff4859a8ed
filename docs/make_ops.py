"""Write docs/ops.md from the registry and from what the tests expect: ``make docs``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from isthmus import coverage

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "docs" / "ops.md"
SAYS = {
    coverage.LOWERED: "a JAX function in `isthmus/_ops/`",
    coverage.DEVICE: "a kernel of the device's own in `isthmus/_device/`",
    coverage.VIEW: "a view: strides only, nothing runs",
    coverage.COMPOSITE: "taken apart by torch into ops that are here",
    coverage.DECOMPOSED: "torch's decomposition, traced into one XLA program",
    coverage.CPU: "runs on the CPU; a warning says so once",
}


def text() -> str:
    """Return the page."""
    return "\n".join([*_head(), *_tiers(), *_families(), *_cpu(), *_gaps()]) + "\n"


def _head() -> Iterator[str]:
    version = torch.__version__.split("+")[0]
    yield "# Operators"
    yield ""
    yield f"Written by `make docs` from the registry, for torch {version}. In-place and `out=` forms are derived"
    yield "from the functional op by its schema and not listed. `isthmus where OP` says which line to open."
    yield ""


def _tiers() -> Iterator[str]:
    tiers = coverage.tiers()
    yield "| what answers | functional overloads | |"
    yield "|---|---:|---|"
    yield from (f"| {tier} | {len(tiers.get(tier, []))} | {SAYS[tier]} |" for tier in coverage.TIERS)
    yield ""


def _families() -> Iterator[str]:
    yield "## Lowered, by family"
    yield ""
    for family, ops in coverage.families().items():
        names = ", ".join(f"`{str(op).removeprefix('aten.').removesuffix('.default')}`" for op in ops)
        (file,) = (ROOT / "isthmus" / "_ops").rglob(f"{family}.py")
        yield f"**[{family}](../{file.relative_to(ROOT).as_posix()})** ({len(ops)}): {names}"
        yield ""


def _rows(kind: str) -> list[dict[str, Any]]:
    rows = tomllib.loads((ROOT / "tests" / "expectations.toml").read_text(encoding="utf-8"))
    return rows.get(kind, [])


def _cpu() -> Iterator[str]:
    yield "## What runs on the CPU"
    yield ""
    yield "Of torch's own databases of operators and modules, these use the CPU for part of their samples, with"
    yield "the right result:"
    yield ""
    yield from _listed(_rows("cpu"))


def _gaps() -> Iterator[str]:
    yield "## What differs"
    yield ""
    yield "These do not agree with the CPU in every sample:"
    yield ""
    yield from _listed(_rows("gap"))


def _listed(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        names = ", ".join(f"`{name}`" for name in row["names"])
        where = ", ".join([*row.get("kinds", []), *row.get("dtypes", [])])
        yield f"- {names}{where and f' ({where})'}: {row['reason']}"
    yield ""


if __name__ == "__main__":
    OUTPUT.write_text(text(), encoding="utf-8")
