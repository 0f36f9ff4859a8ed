"""What people who only have Isthmus installed pay for it: ``import torch``, and calls on CPU tensors.

First, alternating runs of ``import torch`` with and without the device, and its own step alone. Then calls that
the device has to answer differently for its own tensors, each on CPU tensors: in a torch without it, with it installed,
and after the first tensor on "jax". Every number is the fastest of many runs in processes that take turns.

python benchmarks/import.py --repeats 15
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

TARGET_MS = 50.0
TARGET_RATIO = 1.1
TARGET_EXTRA_NS = 50.0
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

# The statement, and how many of it make one measurement: about a tenth of a millisecond.
CALLS = {
    "tensor.data_ptr()": 1500,
    "storage.nbytes()": 2000,
    "storage.data_ptr()": 2000,
    "len(storage)": 2000,
    "storage.is_shared()": 1000,
    "storage.copy_(other)": 100,
    "tensor.untyped_storage()": 1000,
    "tensor.__dlpack__()": 50,
    "repr(tensor)": 3,
    "copy.deepcopy(tensor)": 8,
    "model.to('cpu')": 10,
    "torch.UntypedStorage(8)": 200,
}
# The one name on the way of CPU tensors that import torch has to replace (patches.py says why).
NEW = {"torch.UntypedStorage(8)"}
TIME_CALLS = """
import copy, json, sys, timeit, torch
if sys.argv[1] == "used":
    torch.ones(2, device="jax")
torch.set_num_threads(1)
tensor = torch.arange(6.0)
storage, other = tensor.untyped_storage(), torch.ones(6).untyped_storage()
model = torch.nn.Linear(3, 2)
fastest = {}
for _ in range(400):
    for call, number in json.loads(sys.argv[2]).items():
        each = timeit.Timer(call, globals=globals()).timeit(number) / number * 1e9
        fastest[call] = min(each, fastest.get(call, each))
print(json.dumps(fastest))
"""


def run(code: str, autoload: bool, *args: str) -> str:
    """Run code in a new interpreter and return what it printed."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0"}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def milliseconds(code: str, autoload: bool) -> tuple[float, float]:
    """Return the wall and CPU time of ``code`` in a new interpreter."""
    wall, cpu = run(code, autoload).split()
    return float(wall), float(cpu)


def measure_import(repeats: int) -> bool:
    """Print what ``import torch`` takes with the device and without, and return whether the targets are met."""
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
    step = statistics.median(times[0] for _, _, times in rounds)
    without = statistics.median(times[0] for times, _, _ in rounds)
    ratio = (without + step) / without
    met = step <= TARGET_MS and ratio <= TARGET_RATIO
    print(f"import torch takes {ratio:.2f} times as long by the step; target: at most {TARGET_RATIO}")
    print(f"target: the step takes at most {TARGET_MS:.0f} ms of wall time: {'met' if met else 'missed'}")
    return met


def measure_calls(repeats: int) -> bool:
    """Print what calls on CPU tensors take in each kind of process, and return whether the targets are met."""
    kinds = {"without": False, "installed": True, "used": True}
    fastest: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    for _ in range(repeats):
        for kind, autoload in kinds.items():
            for call, time in json.loads(run(TIME_CALLS, autoload, kind, json.dumps(CALLS))).items():
                fastest[kind][call] = min(time, fastest[kind].get(call, time))
    print(
        f"\n{'on CPU tensors, fastest, ns':28} {'without':>9} {'installed':>9} {'ratio':>6} {'used':>9} {'extra':>7}"
    )
    for call in CALLS:
        without, installed, used = (fastest[kind][call] for kind in kinds)
        ratio, extra = installed / without, used - installed
        print(f"  {call:26} {without:9.1f} {installed:9.1f} {ratio:6.2f} {used:9.1f} {extra:7.1f}")
    ratios = [fastest["installed"][call] / fastest["without"][call] for call in CALLS if call not in NEW]
    # More than a microsecond drowns 50 ns in noise, and a slot that C calls Python through costs that much by itself.
    short = [call for call in CALLS if fastest["without"][call] < 1000 and not call.startswith("len")]
    extras = [fastest["used"][call] - fastest["installed"][call] for call in short]
    print(f"largest ratio once installed {max(ratios):.2f}; target: at most {TARGET_RATIO}")
    print(
        f"most added by the first 'jax' tensor {max(extras):.0f} ns; target: under {TARGET_EXTRA_NS:.0f} ns"
    )
    return max(ratios) <= TARGET_RATIO and max(extras) < TARGET_EXTRA_NS


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="how many pairs of imports (15)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="how many processes of each kind time calls (3)"
    )
    parser.add_argument("--only", choices=("import", "calls"), help="measure only one of both")
    args = parser.parse_args()
    met = [
        args.only == "calls" or measure_import(args.repeats),
        args.only == "import" or measure_calls(args.rounds),
    ]
    print("all targets met" if all(met) else "a target was missed")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
