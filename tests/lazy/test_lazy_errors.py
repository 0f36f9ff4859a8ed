"""Lazy mode where it gets difficult: mistakes and failures, ops without lowerings, threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import isthmus
from isthmus.errors import IsthmusError
from tests.device.test_fallback import library
from tests.lazy.helpers import (
    arange,
    lazily,  # noqa: F401  # around every test
    pending,
    setting,
)

# ---- errors


def words(function: Callable[[str], Any], device: str) -> tuple[type, str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(device)
    return caught.type, str(caught.value)


WRONG: list[Callable[[str], Any]] = [
    lambda d: torch.mm(torch.zeros(2, 3, device=d), torch.zeros(2, 3, device=d)),
    lambda d: torch.zeros(2, device=d) + torch.zeros(3, device=d),
    lambda d: torch.zeros(2, 3, device=d).sum(5),
    lambda d: torch.zeros(3, dtype=torch.int64, device=d).add_(1.5),
    lambda d: torch.zeros(2, 3, device=d).view(7),
    lambda d: torch.zeros(3, device=d)[5],
    lambda d: torch.cat([torch.zeros(2, 3, device=d), torch.zeros(2, device=d)]),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_raises_where_it_is_recorded(wrong: Callable[[str], Any]) -> None:
    x = arange(3) + 1
    assert words(wrong, "jax") == words(wrong, "cpu")
    y = x * 2
    assert x.tolist() == [1, 2, 3]
    assert y.tolist() == [2, 4, 6]


def test_a_mistake_midway_leaves_writes_before_it() -> None:
    x = arange(3)
    x.add_(1)
    with pytest.raises(RuntimeError):
        x.add_(torch.zeros(4, device="jax"))
    x.mul_(2)
    assert x.tolist() == [2, 4, 6]


def out_of_range(n: int) -> Tensor:
    return arange(3).index_select(0, torch.tensor([n]).to("jax"))


def test_an_index_out_of_range_raises_at_the_next_read() -> None:
    safe = arange(2) + 1
    wrong = out_of_range(9)
    line = f"{__file__}:{out_of_range.__code__.co_firstlineno + 1}"
    with pytest.raises(IndexError, match="out of range") as caught:
        wrong.tolist()
    assert line in str(caught.value)
    assert safe.tolist() == [1, 2]
    assert out_of_range(1).tolist() == [1]


def test_an_index_out_of_range_raises_after_sync_and_on_leaving() -> None:
    kept = [out_of_range(9)]
    isthmus.sync()
    with pytest.raises(IndexError, match="out of range"):
        arange(2).sum().item()
    isthmus.set_mode("eager")
    with pytest.raises(IndexError, match="out of range"), isthmus.lazy():
        kept.append(out_of_range(9))
    assert isthmus.mode() == "eager"
    assert arange(2).tolist() == [0, 1]


def fragile(name: str) -> tuple[Any, Any, list[bool]]:
    """Return an op that is recorded without complaint and fails to compile while the flag is set."""
    made = torch.library.Library(name, "DEF")
    made.define("f(Tensor x) -> Tensor")
    op = getattr(torch.ops, name).f.default
    made.impl("f", lambda x: torch.empty_like(x), "Meta")
    fails = [False]

    @isthmus.lowering(op)
    def lowered(x: Any) -> Any:
        """Add one."""
        if fails[0]:
            raise ValueError("out of luck")
        return x + 1

    return made, op, fails


def test_a_program_that_fails_leaves_what_was_computed() -> None:
    _keep, op, fails = fragile("lazyfail1")
    base, other = arange(3), arange(3)
    computed = base + 1
    view = base[1:]
    with setting("lines", "on"):
        other.add_(5)
        lost = op(base)
        line = f"{__file__}:{sys._getframe().f_lineno - 1}"
        base.add_(1)
        fails[0] = True
        with pytest.raises(IsthmusError, match=r"lazyfail1.f.default.*out of luck") as caught:
            lost.tolist()
        assert line in str(caught.value)
    fails[0] = False
    assert computed.tolist() == [1, 2, 3]
    assert base.tolist() == [0, 1, 2]  # as before the program that failed
    assert view.tolist() == [1, 2]
    assert other.tolist() == [0, 1, 2]
    with pytest.raises(IsthmusError, match=r"never computed.*out of luck"):
        lost.tolist()
    with pytest.raises(IsthmusError, match="never computed"):
        (lost + 1).tolist()
    assert op(base).tolist() == [1, 2, 3]


# ---- the CPU, and shapes that depend on values


def test_an_op_without_a_lowering_runs_on_the_cpu() -> None:
    isthmus.config.fallback = "cpu"
    _keep, op = library("lazyfall1", "f(Tensor x) -> Tensor", lambda x: x + 1)
    _keep2, write = library("lazyfall2", "f_(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1))
    isthmus.metrics.clear()
    for _ in range(2):
        x = arange(4) * 2
        y = op(x)
        z = y * 10
        assert pending(z)
        write(z[1:3])
        w = z - 1
        assert pending(w)
        assert w.tolist() == [9, 30, 50, 69]
    assert isthmus.metrics.fallbacks() == {"lazyfall1.f.default": 2, "lazyfall2.f_.default": 2}


def test_sizes_that_depend_on_values() -> None:
    x = arange(6, 2, 3) - 2
    assert torch.nonzero(x > 0).tolist() == [[1, 0], [1, 1], [1, 2]]
    assert torch.masked_select(x, x > 0).tolist() == [1, 2, 3]
    assert (x[x > 1] * 2).tolist() == [4, 6]
    x[x < 0] = 7
    assert x.tolist() == [[7, 7, 0], [1, 2, 3]]
    values, counts = torch.unique(x, return_counts=True)
    assert (values.tolist(), counts.tolist()) == ([0, 1, 2, 3, 7], [1, 1, 1, 1, 2])
    assert torch.repeat_interleave(torch.tensor([2, 0, 1]).to("jax") + 0).tolist() == [0, 0, 2]


# ---- threads


def test_threads_record_at_once() -> None:
    started = threading.Barrier(2)

    def work(seed: int) -> list[float]:
        started.wait()
        x = torch.full((3,), float(seed), device="jax").requires_grad_()
        found = []
        for n in range(40):
            y = x * n + seed
            view = (y * 1)[1:]
            view.add_(1)
            y.sum().backward()
            if n % (3 + seed) == 0:
                found.append(view.sum().item())
        return [*found, *x.grad.tolist()]

    def wanted(seed: int) -> list[float]:
        values = [2.0 * (seed * n + seed + 1) for n in range(40) if n % (3 + seed) == 0]
        return values + [float(sum(range(40)))] * 3

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, [1, 2])) == [wanted(1), wanted(2)]


def test_a_thread_reads_and_writes_what_another_recorded() -> None:
    x = arange(3) + 1
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(x.tolist).result() == [1, 2, 3]
        x += 0
        assert pending(x)
        pool.submit(x.add_, 1).result()
    assert not pending(x)  # that thread is in eager mode
    assert x.tolist() == [2, 3, 4]


def test_the_config_turns_index_checks_off() -> None:
    with setting("check_indices", "off"):
        wrong = out_of_range(9)
        assert wrong.shape == (1,)
        wrong.tolist()


def test_the_line_named_is_that_of_this_recording() -> None:
    def first() -> Tensor:
        return arange(5).index_select(0, torch.tensor([1, 2]).to("jax"))

    def second() -> Tensor:
        return arange(5).index_select(0, torch.tensor([1, 9]).to("jax"))

    assert first().tolist() == [1, 2]
    with pytest.raises(IndexError) as caught:
        second().tolist()
    assert f"{__file__}:{second.__code__.co_firstlineno + 1}" in str(caught.value)


def test_lines_can_be_turned_on_after_an_op_was_recorded() -> None:
    x = arange(3)
    for on in ("off", "on"):
        with setting("lines", on):
            y = torch.sin(x)
            y.add_(1)
            assert (f"{__file__}:" in str(isthmus.graph_of(y))) is (on == "on")
        isthmus.sync()
