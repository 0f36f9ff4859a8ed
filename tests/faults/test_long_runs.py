"""Long training runs: as many arrays, objects and bytes after 3,000 steps as after the first thousand."""

from __future__ import annotations

import json

import pytest

from tests.faults.training import MODES
from tests.interpreters import fresh

TRAIN = """
import gc, json, sys, warnings
warnings.simplefilter("ignore")
import jax, torch
from tests.faults.training import Training

def measured():
    gc.collect()
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * 4096
    return {"arrays": len(arrays), "bytes": sum(array.nbytes for array in arrays),
            "objects": len(gc.get_objects()), "resident": resident}

mode, *numbers = sys.argv[1:]
training, found = Training(mode), []
for done in map(int, numbers):
    training.run(done - training.done)
    found.append(measured())
print(json.dumps(found))
"""
# Resident memory moves by itself, most of all in the first thousand steps (malloc's arenas). A leaked array takes
# about 500 bytes with its Python and C++ objects: one per step would be a megabyte in 2,000 steps.
_NOISE = 1_000_000
# Python's own caches grow with how long a process runs: a few objects, not one per step.
_OBJECTS = 500


def check(mode: str, warm: int, middle: int, last: int) -> None:
    ran = fresh(TRAIN, mode, str(warm), str(middle), str(last), timeout=1500)
    assert ran.returncode == 0, ran.stderr[-3000:]
    _, before, after = json.loads(ran.stdout.splitlines()[-1])
    print(mode, before, after)
    assert after["arrays"] == before["arrays"]
    assert after["bytes"] == before["bytes"]
    assert after["objects"] <= before["objects"] + _OBJECTS
    assert after["resident"] <= before["resident"] + _NOISE, (before, after)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("mode", MODES)
def test_three_thousand_steps_take_the_memory_of_a_thousand(mode: str) -> None:
    check(mode, 100, 1000, 3000)


def test_a_short_run_leaks_no_arrays_and_no_objects() -> None:
    check("lazy", 20, 40, 600)
