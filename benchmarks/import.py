"""What the device adds to ``import torch``: alternating runs with and without it, and its own step alone.

python benchmarks/import.py --repeats 15
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

TARGET_MS = 50.0
MEASURE = """
import time
{before}
wall, cpu = time.perf_counter(), time.process_time()
{measured}
print((time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3)
"""
IMPORT = MEASURE.format(before="", measured="import torch")
# What ``import torch`` does last, called by itself: seconds of other imports cannot hide its milliseconds.
STEP = MEASURE.format(before="import torch", measured="torch._import_device_backends()")


def milliseconds(code: str, autoload: bool) -> tuple[float, float]:
    """Return the wall and CPU time of ``code`` in a new interpreter."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    wall, cpu = ran.stdout.split()
    return float(wall), float(cpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="how many pairs of runs (15)")
    repeats = parser.parse_args().repeats
    milliseconds(IMPORT, True), milliseconds(IMPORT, False)  # fills the page cache and writes the bytecode
    rounds = [
        (milliseconds(IMPORT, False), milliseconds(IMPORT, True), milliseconds(STEP, False))
        for _ in range(repeats)
    ]
    for kind, name in enumerate(("wall", "CPU")):
        without, loaded, step = ([times[kind] for times in column] for column in zip(*rounds, strict=True))
        # Each pair ran back to back, so that what else the machine was doing nearly cancels out.
        added = statistics.median(b - a for a, b in zip(without, loaded, strict=True))
        print(f"{name} time, median of {repeats} (fastest)")
        print(f"  import torch, autoload off  {statistics.median(without):8.1f} ms  ({min(without):.1f})")
        print(f"  import torch, autoload on   {statistics.median(loaded):8.1f} ms  ({min(loaded):.1f})")
        print(f"  difference within a pair    {added:8.1f} ms")
        print(f"  the autoload step alone     {statistics.median(step):8.1f} ms  ({min(step):.1f})")
    # The difference of two imports of seconds drowns in noise on a busy machine; the step is what is ours.
    found = statistics.median(times[0] for _, _, times in rounds)
    verdict = "met" if found <= TARGET_MS else "missed"
    print(f"target: the step takes at most {TARGET_MS:.0f} ms of wall time: {verdict}")
    return 0 if found <= TARGET_MS else 1


if __name__ == "__main__":
    sys.exit(main())
