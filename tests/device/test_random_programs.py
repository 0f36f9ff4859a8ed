"""Random programs on the CPU and on the device in every mode: values, layouts, aliases, gradients and errors agree.

A failure prints a script with as few lines as still show it. ``python -m tests.fuzz MODE FIRST LAST`` runs others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import isthmus
from isthmus._device.checks import value_checks
from isthmus._device.core import donation
from tests.fuzz import sizes
from tests.fuzz.programs import make
from tests.fuzz.running import check, difference, shrink

# A function as a whole has no lines that raise, and reads nothing.
WHOLE: dict[str, Any] = {"autograd": False, "reads": False, "refusals": 0}
OPTIONS: dict[str, dict[str, Any]] = {"jit": WHOLE, "compiled": WHOLE}
# How many programs a mode gets in all, and how many of them in one test. "reference" records as lazy mode does and runs
# what it recorded by ATen, without a compiler, so it can run most of them.
COUNTS = {
    "eager": (2600, 100),
    "reference": (5900, 590),
    "lazy": (1000, 100),
    "jit": (250, 50),
    "compiled": (250, 50),
}
SLICES = [
    pytest.param(mode, range(first, first + size), id=f"{mode}-{first}")
    for mode, (count, size) in COUNTS.items()
    for first in range(0, count, size)
]


@pytest.fixture(autouse=True)
def falling_back(strict_fallback: None) -> Iterator[None]:
    """Let ops fall to the CPU: what they come to is compared here, where they run is not."""
    isthmus.config.fallback = "cpu"
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    value_checks.forget()
    assert isthmus.mode() == "eager"


@pytest.mark.parametrize(
    ("mode", "count"), [("eager", 10), ("reference", 50), ("lazy", 10), ("jit", 6), ("compiled", 3)]
)
def test_some_programs(mode: str, count: int) -> None:
    check(range(count), mode, **OPTIONS.get(mode, {}))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "seeds"), SLICES)
def test_many_programs(mode: str, seeds: range) -> None:
    check(seeds, mode, **OPTIONS.get(mode, {}))


# Programs whose sizes change from turn to turn: of small arrays, and of some that padding is not free for.
SIZES = {"eager": 300, "lazy": 400, "jit": 120, "compiled": 80}
TURNS = [
    pytest.param(mode, range(first, first + 40), large, id=f"{mode}-{first}{'-large' if large else ''}")
    for mode, count in SIZES.items()
    for large in (False, True)
    for first in range(0, count, 40)
]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("mode", "count"), [("eager", 2), ("lazy", 4), ("jit", 2), ("compiled", 1)])
def test_some_programs_whose_sizes_change(mode: str, count: int, large: bool) -> None:
    sizes.check(range(count), mode, large)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "seeds", "large"), TURNS)
def test_many_programs_whose_sizes_change(mode: str, seeds: range, large: bool) -> None:
    sizes.check(seeds, mode, large)


def test_programs_whose_sizes_change_find_memory_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a read has cut, and a trace alone holds the padding of, was once donated."""
    monkeypatch.setattr(donation, "is_unshared", lambda slack: True)
    isthmus.clear_caches()
    found = sizes.difference(sizes.make(3048, "lazy"), "lazy")
    assert "deleted" in str(found)


# Programs that differed once, made small.
FOUND: dict[str, tuple[str, list[str]]] = {
    "a view of a view of another dtype": (
        "compiled",
        [
            "t1 = data(4, (4,), torch.complex64, dev)",
            "t2 = torch.full((2, 3), 3, dtype=torch.int32, device=dev)",
            "t3 = t2.view(torch.int16)",
            "t4 = t3.diagonal(1, 0, 1)",
        ],
    ),
    "real parts of a result": (
        "compiled",
        ["t1 = data(8, (1, 3), torch.complex64, dev)", "t2 = torch.addcmul(t1, t1, t1)", "t3 = t2.real"],
    ),
    "both parts of a result that is not returned": (
        "compiled",
        ["t1 = data(8, (2, 3), torch.complex64, dev)", "t2 = (t1 * t1).real[1:]", "t3 = (t1 * t1).imag.T"],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_program_that_differed_once(name: str) -> None:
    mode, lines = FOUND[name]
    assert difference(lines, mode) is None


def test_there_are_ten_thousand_of_them() -> None:
    assert sum(count for count, _ in COUNTS.values()) == 10_000
    assert sum(len(each.values[1]) for each in SLICES) == 10_000  # type: ignore[arg-type]


def test_programs_do_what_they_are_for() -> None:
    """Nothing a generator writes may die out: views, writes through them, scalars of the CPU, gradients, refusals."""
    lines = [line for seed in range(300) for line in make(seed)]
    for part in (
        ".transpose(", ".as_strided(", ".unbind(", ".chunk(", ".expand(", ".data", ".detach()", ".add_(", "out=",
        "torch.no_grad()", ".backward(", "torch.autograd.grad(", "[torch.tensor(", ".masked_fill_(", "torch.cat(",
        "torch.stack(", "torch.where(", ".sum(", ".to(torch.", ".item()", "index_put_(", "c1", "torch.complex64",
    ):  # fmt: skip
        assert any(part in line for line in lines), part
    assert make(7) == make(7)


@pytest.mark.parametrize("mode", ["eager", "lazy", "reference"])
def test_a_difference_is_found_and_made_small(mode: str) -> None:
    lines = [
        "t1 = data(1, (4,), torch.float32, dev)",
        "t2 = t1 + 1",
        "t3 = t1[1:]",
        "t3.add_(1 if dev == 'cpu' else 2)",  # what a wrong kernel would do
        "t4 = t2 * 2",
    ]
    smaller, why = shrink(lines, lambda fewer: difference(fewer, mode))
    assert smaller == [lines[0], lines[2], lines[3]]
    assert why.startswith("t1 is")
    for wrong, part in {
        "t3 = t1.clone() if dev == 'jax' else t1[:]": "share memory",
        "t1.requires_grad_(dev == 'cpu')": "requires_grad",
        "t3 = t3.to(torch.float64) if dev == 'jax' else t3": "dtype",
        "t1.view(7 if dev == 'jax' else 4)": "the device raises RuntimeError",
        "t1.view(7 if dev == 'cpu' else 4)": "the CPU raises RuntimeError",
        "r5 = 1 if dev == 'cpu' else 1.0": "r5",
    }.items():
        assert part in str(difference([lines[0], lines[2], wrong], mode)), wrong
