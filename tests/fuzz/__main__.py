"""``python -m tests.fuzz eager 0 1000``: run random programs, and print what differs as scripts."""

from __future__ import annotations

import sys
import time

import isthmus
from tests.fuzz.programs import make
from tests.fuzz.running import difference, script, shrink


def main(mode: str, first: str, last: str) -> int:
    """Run the programs of these seeds in a mode; return how many differ."""
    isthmus.config.fallback = "cpu"
    options = {"autograd": False, "reads": False, "refusals": 0} if mode in ("jit", "compiled") else {}
    began, failures = time.perf_counter(), 0
    for seed in range(int(first), int(last)):
        lines = make(seed, **options)
        if difference(lines, mode) is not None:
            failures += 1
            lines, why = shrink(lines, lambda fewer: difference(fewer, mode))
            print(f"# program {seed}\n{script(lines, mode, why)}", flush=True)
    print(f"{int(last) - int(first)} programs, {failures} differ, {time.perf_counter() - began:.0f} s")
    return failures


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
