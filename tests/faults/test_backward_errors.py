"""An exception in Python during backward arrives where it does on the CPU, as the same object, and ends no process.

What may end a process runs in others: one for all places and exceptions (places.py), one per situation (situations.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults import situations
from tests.faults.places import EXCEPTIONS, PLACES
from tests.interpreters import forked_early


def python(*arguments: str) -> str:
    """Run a module of this folder and return what it printed."""
    code = "import runpy, sys; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__')"
    ran = forked_early(code, *arguments, timeout=280)
    # A negative number is the signal that ended it: -6 is SIGABRT.
    assert ran.returncode == 0, f"exit status {ran.returncode}\n{ran.stdout[-500:]}\n{ran.stderr[-3000:]}"
    return str(ran.stdout)


@pytest.fixture(scope="module")
def records() -> dict[tuple[str, str, bool], list[dict[str, Any]]]:
    """Return what happened on the CPU and on "jax", by place, exception and threading of autograd."""
    lines = [json.loads(line) for line in python("tests.faults.places").splitlines()]
    return {(place, what, own): pair for place, what, own, *pair in lines}


@pytest.mark.parametrize("own", [True, False], ids=["a thread of autograd's", "the caller's thread"])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_is_what_it_is_on_the_cpu(records: Any, place: str, own: bool) -> None:
    for what in EXCEPTIONS:
        cpu, jax = records[place, what, own]
        assert cpu["raised"] is not None, what
        assert any(cpu["same object"]), what
        assert all(cpu["freed"]), what
        assert jax == cpu, what


def test_every_place_was_visited(records: Any) -> None:
    assert len(records) == len(PLACES) * len(EXCEPTIONS) * 2
    assert len(PLACES) >= 18
    assert len(EXCEPTIONS) >= 12


# Those of one process run one after the other; the last two must come before the first tensor.
PROCESSES = [
    [
        "threads",
        "tracing",
        "handling",
        "signals_in_hooks",
        "interrupted_questions",
        "interrupted_answers",
        "storm",
    ]
]
PROCESSES += [["modes"], ["switched_off"], ["without_carrying"]]


@pytest.mark.parametrize("names", PROCESSES, ids=" ".join)
def test_the_process_goes_on(names: list[str]) -> None:
    assert all(callable(getattr(situations, name)) for name in names)
    python("tests.faults.situations", *names)


@pytest.mark.slow
def test_a_long_storm_of_signals() -> None:
    python("tests.faults.situations", *["storm"] * 10)
