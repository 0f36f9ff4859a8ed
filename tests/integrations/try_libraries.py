"""Run the programs of real libraries on the CPU and on the device, and write docs/libraries.md from what happened.

    python -m tests.integrations.try_libraries             # all that are installed
    python -m tests.integrations.try_libraries timm peft   # some; the rows of others stay

Each program runs in an interpreter of its own, with a time limit. ``results.json`` beside this file keeps the rows, so
a part can be run again. A row says "works" only if the results were compared with CPU torch's, and lay on the device.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integrations import programs
from tests.interpreters import fresh

RESULTS = Path(__file__).parent / "results.json"
PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
HEAD = (Path(__file__).parent / "libraries_head.md").read_text()

CHILD = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, tests.integrations.torchvision_names
from tests.integrations.try_libraries import compared
print()
print("RESULT " + json.dumps(compared(sys.argv[1])))
"""


def compared(name: str) -> dict[str, Any]:
    """Run a program on both devices and say how the results compare."""
    import torch

    import isthmus

    one = programs.load()[name]
    wanted = _leaves(one.run("cpu"))
    isthmus.metrics.clear()
    results = _leaves(one.run("jax"))
    fallen = list(isthmus.metrics.fallbacks())
    if not results or not any(
        isinstance(leaf, torch.Tensor) and leaf.device.type == "jax" for leaf in results
    ):
        return {"verdict": "does not work", "note": "the results are on the CPU"}
    if len(results) != len(wanted):
        return {"verdict": "does not work", "note": f"{len(results)} results, {len(wanted)} on the CPU"}
    worst = max(_difference(a, b) for a, b in zip(results, wanted, strict=True))
    if not worst <= one.tolerance:
        return {
            "verdict": "does not work",
            "note": f"differs from the CPU by {worst:.1e} of the largest value",
        }
    note = f"within {_bound(worst)} of the CPU"
    return {"verdict": "works", "note": note, "fallbacks": fallen}


def _bound(worst: float) -> str:
    """Return the power of ten that a difference stays below, so that a row does not change with each run."""
    return next((f"1e-{digits}" for digits in (7, 6, 5, 4, 3) if worst <= 10.0**-digits), f"{worst:.0e}")


def _leaves(found: Any) -> list[Any]:
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(found) if leaf is not None]


def _difference(ours: Any, theirs: Any) -> float:
    """Return the largest difference relative to the largest value, or infinity where shape, dtype or NaNs differ."""
    import torch

    ours, theirs = torch.as_tensor(ours).detach(), torch.as_tensor(theirs).detach()
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    if not ours.numel():
        return 0.0
    wide = torch.complex128 if ours.is_complex() else torch.float64
    ours, theirs = ours.cpu().to(wide), theirs.cpu().to(wide)
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return float("inf")
    gap = (ours - theirs).abs().nan_to_num(0.0).max().item()
    return gap / max(theirs.abs().nan_to_num(0.0).max().item(), 1e-30) if gap else 0.0


def outcome(name: str, timeout: float = 280) -> dict[str, Any]:
    """Run a program in a new interpreter and return its row."""
    one = programs.load()[name]
    row: dict[str, Any] = {"library": one.library, "what": one.what, "settings": one.settings}
    try:
        row["version"] = importlib.metadata.version(one.library)
    except importlib.metadata.PackageNotFoundError:
        return {**row, "version": "", "verdict": "not tried", "note": "it was not installed"}
    settings = dict(pair.split("=", 1) for pair in one.settings.split())
    try:
        done = fresh(CHILD, name, timeout=timeout, HF_HUB_OFFLINE="1", **settings)
    except subprocess.TimeoutExpired:
        return {**row, "verdict": "does not work", "note": f"no answer within {timeout:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return {**row, **json.loads(line.removeprefix("RESULT "))}
    last = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
    error = next((line for line in reversed(last) if not line.startswith(" ") and ": " in line), last[-1])
    print(done.stderr[-3000:], file=sys.stderr)
    return {**row, "verdict": "does not work", "note": error[:200]}


def page(rows: dict[str, dict[str, Any]]) -> str:
    """Return the text of docs/libraries.md."""
    known = [rows[name] for name in programs.load() if name in rows and rows[name]["verdict"] != "not tried"]
    lines = [HEAD, "| library | release | tried | result |", "| --- | --- | --- | --- |"]
    for row in sorted(known, key=lambda row: (row["library"].lower(), row["what"])):
        with_setting = f" with `{row['settings']}`" if row["settings"] else ""
        result = f"{row['verdict']}{with_setting}: {row['note']}"
        if row.get("fallbacks"):
            shown = ", ".join(f"`{op}`" for op in row["fallbacks"][:3])
            more = f" and {len(row['fallbacks']) - 3} more" if len(row["fallbacks"]) > 3 else ""
            result += f"; on the CPU: {shown}{more}"
        cells = (row["library"], row["version"], row["what"], result.replace("|", "\\|"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(wanted: list[str]) -> None:
    """Run the programs whose name or library was asked for, each row written when it is known."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, one in programs.load().items():
        if wanted and name not in wanted and one.library not in wanted:
            continue
        rows[name] = outcome(name)
        print(
            f"{name:28} {rows[name]['verdict']:14} {rows[name]['note']} {rows[name].get('fallbacks') or ''}",
            flush=True,
        )
        RESULTS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
