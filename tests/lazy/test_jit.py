"""Ways to use ``isthmus.jit``."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isthmus
from isthmus.errors import JitError
from tests.lazy.helpers import arange, check, counted, linear, replays

pytestmark = pytest.mark.usefixtures("settled")


# ---- ways to use it


def test_decorators() -> None:
    @isthmus.jit
    def plain(x: Tensor) -> Tensor:
        """Add one."""
        return x + 1

    @isthmus.jit(donate=False, static_argnames=["n"])
    def given(x: Tensor, n: int = 1) -> Tensor:
        return x * n

    assert (plain.__name__, plain.__doc__) == ("plain", "Add one.")
    for _ in range(2):
        assert plain(arange(3)).tolist() == [1, 2, 3]
        assert given(arange(3), 2).tolist() == given(arange(3), n=2).tolist() == [0, 2, 4]
        assert given(arange(3), n=3).tolist() == [0, 3, 6]
    with pytest.raises(JitError, match="has no argument other"):
        isthmus.jit(lambda x: x, static_argnames=["other"])


def test_modules() -> None:
    model = nn.Sequential(linear(), nn.Dropout(1.0)).to("jax").requires_grad_(False)
    f = isthmus.jit(model)
    assert [f(arange(2, 1, 2)).tolist() for _ in range(3)] == [[[0, 0]]] * 3
    model.eval()
    assert [f(arange(2, 1, 2)).tolist() for _ in range(3)] == [[[1, 3]]] * 3
    with torch.no_grad():
        model[0].weight.add_(1)
    assert f(arange(2, 1, 2)).tolist() == [[2, 4]]


def test_modules_as_arguments() -> None:
    f, runs = counted(torch.no_grad()(lambda model, x: model(x)))
    one, other = linear(), linear()
    with torch.no_grad():
        other.weight.add_(1)
    for _ in range(3):
        assert f(one, arange(2, 1, 2)).tolist() == [[1, 3]]
        assert f(other, arange(2, 1, 2)).tolist() == [[2, 4]]
    assert len(runs) <= 4


def test_functional_call() -> None:
    model = linear()
    f, runs = counted(lambda given, x: torch.func.functional_call(model, given, (x,)))
    for n in range(4):
        assert f({"weight": arange(4, 2, 2) + n}, arange(2, 1, 2)).tolist() == [[1 + n, 3 + n]]
    assert len(runs) <= 2


def test_bound_methods_and_partials() -> None:
    class Counter:
        def __init__(self) -> None:
            self.total = arange(3)

        def add(self, x: Tensor, times: int = 1) -> Tensor:
            self.total += x * times
            return self.total * 1

    def scenario(jit: Any) -> list[Any]:
        one, other = Counter(), Counter()
        adds = [jit(one.add), jit(functools.partial(other.add, times=2))]
        return [add(arange(3)).tolist() for _ in range(4) for add in adds]

    check(scenario)


def test_transforms_inside() -> None:
    def body(x: Tensor) -> Any:
        return torch.func.grad(lambda y: y.square().sum())(x), torch.vmap(lambda row: row * 2)(x.view(1, 3))

    f, runs = counted(body)
    for n in range(3):
        slope, rows = f(arange(3) + n)
        assert (slope.tolist(), rows.tolist()) == (
            [2 * (i + n) for i in range(3)],
            [[2 * (i + n) for i in range(3)]],
        )
    assert len(runs) == 1


def test_jit_inside_jit() -> None:
    state = arange(3)
    inner = isthmus.jit(lambda x: state.add_(x) * 2)
    outer, runs = counted(lambda x: inner(x + 1) + inner(x))
    want = arange(3)
    for _ in range(4):
        first = want + 1 + arange(3)
        want = first + arange(3)
        assert outer(arange(3)).tolist() == (first * 2 + want * 2).tolist()
        assert state.tolist() == want.tolist()
    assert len(runs) <= 2
    assert inner(arange(3)).tolist() == ((want + arange(3)) * 2).tolist()


def test_jit_in_lazy_mode() -> None:
    def scenario(jit: Any) -> list[Any]:
        state, found = arange(3), []
        f = jit(lambda x: (state.add_(x), state * 2)[1])
        with isthmus.lazy():
            for n in range(5):
                state.mul_(2)
                found.append(f(arange(3) + n) + 1)
                state.sub_(1)
        return [*[t.tolist() for t in found], state.tolist()]

    check(scenario)


def test_lazy_mode_inside_jit() -> None:
    def body(x: Tensor) -> Tensor:
        with isthmus.lazy():
            y = x + 1
        return y * 2

    f, runs = counted(body)
    for n in range(3):
        assert f(arange(3) + n).tolist() == [2 * (i + n + 1) for i in range(3)]
    assert len(runs) == 1


def test_inference_mode() -> None:
    state = arange(3)
    f = isthmus.jit(lambda x: x * state)
    for _ in range(2):
        with torch.inference_mode():
            assert [f(arange(3)).tolist() for _ in range(2)] == [[0, 1, 4]] * 2
        assert [f(arange(3)).tolist() for _ in range(2)] == [[0, 1, 4]] * 2


def test_threads_replay_at_once() -> None:
    state = arange(3)
    f = isthmus.jit(lambda x: x * state + 1)
    f(arange(3))
    f(arange(3))
    wrong: list[Any] = []

    def work() -> None:
        for n in range(100):
            found = f(arange(3) + n).tolist()
            if found != [1, n + 2, 2 * n + 5]:
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_another_thread_works_while_a_function_is_recorded() -> None:
    wrong: list[Any] = []
    stop = threading.Event()

    def work() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            found = (arange(3) + n).tolist()
            if found != [n, n + 1, n + 2]:
                wrong.append(found)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for size in range(1, 20):
            f = isthmus.jit(lambda x: (x + 1) * 2)
            assert [f(arange(size)).tolist() for _ in range(2)] == [[2 * (i + 1) for i in range(size)]] * 2
    finally:
        stop.set()
        thread.join()
    assert wrong == []


def test_replays_are_counted() -> None:
    f, runs = counted(lambda x: x + 1)
    before = replays()
    for _ in range(5):
        f(arange(3))
    assert (len(runs), replays() - before) == (1, 4)
    assert "replays" in isthmus.metrics.report()


def test_values_made_of_numbers_alone_can_be_read() -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        ramp = torch.arange(4, device="jax")
        return x + ramp[1:].sum().item() if (ramp >= 0).all() else -x

    jitted = isthmus.jit(shifted)
    for scale in (1, 2):
        x = torch.full((3,), float(scale)).to("jax")
        assert jitted(x).tolist() == [scale + 6] * 3
    with pytest.raises(JitError, match="a value is read"):
        isthmus.jit(lambda x: x * (torch.arange(3, device="jax") * x).sum().item())(torch.ones(3).to("jax"))
    with pytest.raises(JitError, match="a value is read"):
        isthmus.jit(lambda x: x * torch.rand(3, device="jax").sum().item())(torch.ones(3).to("jax"))
