"""What is counted: ops, programs and what made them run, seconds of compilation, bytes each way."""

from __future__ import annotations

import copy
import io
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import isthmus
from isthmus import metrics
from isthmus._runtime import counters


@pytest.fixture(autouse=True)
def from_zero(strict_fallback: None) -> Iterator[None]:
    isthmus.config.fallback = "cpu"
    metrics.clear()
    yield
    metrics.clear()


def test_a_loop_records_compiles_once_and_hits() -> None:
    weight = torch.ones(3, 3).to("jax")
    metrics.clear()
    with isthmus.lazy():
        for _ in range(10):
            loss = (weight * 2 + 1).relu().sum()
            loss.item()
    found = metrics.as_dict()
    assert found["ops recorded"] == 40
    assert found["programs"] == {"run": 10, "hits": 9, "misses": 1}
    assert found["compilations"]["count"] == 1
    assert found["transfers"]["to host"] == {"count": 10, "bytes": 40}


def test_what_nobody_reads_is_recorded_and_not_run() -> None:
    x = torch.ones(3).to("jax")
    metrics.clear()
    with isthmus.lazy():
        x + 1
    found = metrics.as_dict()
    assert found["ops recorded"] == 1
    assert found["programs"]["run"] == 0
    assert found["materialisations"] == []


def test_recording_an_op_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("counted")

    x = torch.ones(3).to("jax")
    with isthmus.lazy():
        x.mul(2).add_(1)  # the recipes are found here
        with monkeypatch.context() as patch:
            patch.setattr(counters, "count", refuse)
            patch.setattr(counters, "count_materialisation", refuse)
            x.mul(2).add_(1)


def test_seconds_are_those_of_each_stage() -> None:
    x = torch.ones(3, 5).to("jax")
    metrics.clear()
    started = time.perf_counter()
    torch.special.erfcx(x).cos().cosh().sin()
    wall = time.perf_counter() - started
    found = metrics.as_dict()["compilations"]
    assert found["count"] == 4
    assert set(found["seconds"]) == {"trace", "lower", "xla"}
    assert all(took > 0 for took in found["seconds"].values())
    assert sum(found["seconds"].values()) < wall


@pytest.mark.parametrize(
    ("source", "nbytes"),
    [
        (torch.ones(30, 40), 4800),
        (torch.ones(30, 40, dtype=torch.bfloat16).t(), 2400),
        (torch.ones(6, 8, dtype=torch.int64)[::2, 1:], 168),
        (torch.ones(()), 4),
        (torch.ones(0, 3), 0),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else str(list(value.shape)),
)
def test_bytes_each_way(source: torch.Tensor, nbytes: int) -> None:
    there = source.to("jax")
    assert metrics.as_dict()["transfers"]["to device"] == {"count": 1, "bytes": nbytes}
    there.cpu()
    assert metrics.as_dict()["transfers"]["to host"] == {"count": 1, "bytes": nbytes}


def limit(x: torch.Tensor) -> None:
    isthmus.config.graph_size = 5
    try:
        isthmus.sync()  # nothing is recorded yet, and the limit is read anew
        kept = [x + 1 for _ in range(6)]
    finally:
        isthmus.config.graph_size = 5000
    assert kept


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


compiled = torch.compile(add_one, backend="isthmus")
replayed = isthmus.jit(add_one)
CAUSES: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "item": (".item(), bool(), float() or int()", lambda x: (x * 3).sum().item()),
    "bool": (".item(), bool(), float() or int()", lambda x: bool((x * 3).sum() > 0)),
    "cpu": (".cpu() or .to()", lambda x: (x * 3).cpu()),
    "a transposed view": (".cpu() or .to()", lambda x: (x * 3).t().cpu()),
    "copy_": ("copy_() to another device", lambda x: torch.empty(2, 3).copy_(x * 3)),
    "sync": ("sync()", lambda x: (x.add_(1), isthmus.sync())),
    "print": ("print", lambda x: str(x * 3)),
    "equal": ("torch.equal()", lambda x: torch.equal(x * 3, x)),
    "nonzero": ("a size that depends on values", lambda x: (x * 3).nonzero()),
    "mask": ("a size that depends on values", lambda x: x[x > 0]),
    "fallback": ("a fallback op", lambda x: torch.ops.aten._add_relu.Tensor(x * 3, x)),
    "deepcopy": ("a copy of a storage", lambda x: copy.deepcopy(x * 3)),
    "save": ("the bytes of a storage", lambda x: torch.save(x * 3, io.BytesIO())),
    "dlpack": ("DLPack", lambda x: torch.from_dlpack(x * 3)),
    "compile": ("a compiled function", lambda x: compiled(x * 3)),
    "jit": ("an isthmus.jit function", lambda x: replayed(x * 3)),
    "set_mode": ("set_mode()", lambda x: (x.add_(1), isthmus.set_mode("eager"))),
    "limit": ("the limit on graph size", limit),
}


@pytest.mark.parametrize("name", CAUSES)
def test_cause_and_line(name: str) -> None:
    cause, call = CAUSES[name]
    x = torch.ones(2, 3).to("jax")
    with isthmus.lazy():
        isthmus.sync()
        metrics.clear()
        call(x)
        first = metrics.as_dict()["materialisations"][0]
    assert first["cause"] == cause
    file, line = first["line"].rsplit(":", 1)
    assert file == __file__
    # A compiled function is the user's code too, though Dynamo has rewritten it.
    start = (add_one if name == "compile" else call).__code__.co_firstlineno
    assert int(line) - start in {"limit": [4], "compile": [0, 1]}.get(name, [0])


def test_the_end_of_a_block_is_a_cause() -> None:
    x = torch.ones(2, 3).to("jax")
    with isthmus.lazy():
        x.add_(1)
    (found,) = metrics.as_dict()["materialisations"]
    assert found["cause"] == "the end of a lazy block"
    assert found["line"].startswith(f"{__file__}:")


def test_causes_are_counted_by_line() -> None:
    x = torch.ones(3).to("jax")
    with isthmus.lazy():
        for n in range(6):
            x.add(1).sum().item()
            if n % 2:
                x.add(2).cpu()
    found = metrics.as_dict()["materialisations"]
    assert [one["count"] for one in found] == [6, 3]
    lines = [int(one["line"].rsplit(":", 1)[1]) for one in found]
    assert lines[1] - lines[0] == 2


def test_data_is_plain_and_clear_starts_anew() -> None:
    empty = metrics.as_dict()
    with isthmus.lazy():
        torch.ones(3).to("jax").add(1).cpu()
    torch.ops.aten._add_relu.Tensor(torch.ones(2, device="jax"), torch.ones(2, device="jax"))
    found = metrics.as_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["fallbacks"] == {"aten._add_relu.Tensor": {"count": 1, "reason": "nothing lowers it"}}
    assert found != empty
    metrics.clear()
    assert metrics.as_dict() == empty
    assert metrics.counts() == {}


def test_counters_of_other_names_are_kept() -> None:
    counters.count("not saved to disk: OSError", 2)
    assert metrics.as_dict()["other"] == {"not saved to disk: OSError": 2}
    assert "not saved to disk: OSError  2" in metrics.report()


def test_report_reads_well() -> None:
    counters.count("ops recorded", 1234)
    counters.count_compilation({"trace": 0.25, "lower": 0.5, "xla": 1.5})
    counters.count_compilation({"trace": 0.25, "lower": 0.5, "xla": 1.5})
    counters.count_materialisation("sync()", "train.py:12", False)
    counters.count_materialisation("sync()", "train.py:12", True)
    counters.count_materialisation("print", "", True)
    assert metrics.report().splitlines() == [
        "ops recorded          1,234",
        "programs run          3",
        "program cache hits    2",
        "program cache misses  1",
        "compilations          2",
        "seconds in trace      0.500",
        "seconds in lower      1.000",
        "seconds in xla        3.000",
        "programs ran because of:",
        "  sync()  2  (train.py:12)",
        "  print  1  (no line of yours)",
        "ran on the CPU: nothing",
    ]
