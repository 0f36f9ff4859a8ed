"""What functions under ``isthmus.jit`` return, write, take from the CPU and draw at random."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isthmus
from tests.lazy.helpers import arange, check, counted

pytestmark = pytest.mark.usefixtures("settled")


# ---- results


class Pair(NamedTuple):
    first: Any
    second: Any


def test_structures() -> None:
    def scenario(jit: Any) -> list[Any]:
        f = jit(lambda x: {"a": [x + 1, (x * 2, None)], "b": Pair(3, "text"), "c": (), "d": Pair(x - 1, 2.5)})
        found = []
        for n in range(3):
            result = f(arange(2) + n)
            first, (second, none) = result["a"]
            assert type(result["d"]) is Pair
            found += [first.tolist(), second.tolist(), none, result["b"], result["c"]]
            found += [result["d"].first.tolist(), result["d"].second]
            result["a"].append(1)  # a structure is this call's own
        return found

    check(scenario)


def test_nothing_to_compute() -> None:
    f, runs = counted(lambda x: None)
    assert [f(arange(3)) for _ in range(3)] == [None] * 3
    assert len(runs) == 1


def test_results_that_alias_each_other() -> None:
    def scenario(jit: Any) -> list[Any]:
        def body(x: Tensor) -> Any:
            y = x * 2
            return y, y[1:], y.view(2, 2).t()

        f, found = jit(body), []
        for n in range(3):
            whole, part, turned = f(arange(4) + n)
            part.add_(10)
            turned.mul_(2)
            found.append([whole.tolist(), part.tolist(), turned.tolist(), turned.stride()])
        return found

    check(scenario)


def test_equal_results_do_not_alias() -> None:
    def scenario(jit: Any) -> list[Any]:
        f, found = jit(lambda x: (x + 1, x + 1, x * 1)), []
        for n in range(3):
            x = arange(3) + n
            one, other, third = f(x)
            one.add_(10)
            third.add_(5)
            found.append([t.tolist() for t in (x, one, other, third)])
        return found

    check(scenario)


def test_results_that_are_arguments() -> None:
    f, runs = counted(lambda x, y: (x, x[1:], y.t(), x))
    for n in range(3):
        x, y = arange(3) + n, arange(6, 2, 3)
        same, view, turned, again = f(x, y)
        same.add_(10)
        view.mul_(2)
        turned.zero_()
        want = [n + 10, 2 * (n + 11), 2 * (n + 12)]
        assert x.tolist() == same.tolist() == again.tolist() == want
        assert turned.stride() == (1, 3)
        assert not y.any()
    assert len(runs) == 1


def test_results_that_are_parameters() -> None:
    weight = nn.Parameter(arange(4, 2, 2))
    f = isthmus.jit(torch.no_grad()(lambda: (weight, weight[1])))
    for n in range(3):
        whole, row = f()
        with torch.no_grad():
            row.add_(1)
        assert whole.tolist() == weight.tolist() == [[0, 1], [3 + n, 4 + n]]


def test_results_that_are_gradients() -> None:
    weight = nn.Parameter(arange(3))

    @isthmus.jit
    def f() -> Any:
        weight.grad = None
        weight.square().sum().backward()
        return weight.grad

    for _ in range(4):
        f().add_(1)
        assert weight.grad.tolist() == [1, 3, 5]


def test_results_that_are_constants() -> None:
    f = isthmus.jit(lambda x: (torch.tensor([1.0, 2.0], device="jax"), torch.ones(2, device="jax")))
    for _ in range(3):
        for found in f(arange(3)):
            found.add_(1)
        assert [t.tolist() for t in f(arange(3))] == [[1, 2], [1, 1]]


def test_results_of_earlier_calls_stay() -> None:
    weight = arange(3000)
    f = isthmus.jit(lambda x: (x + weight, weight.add_(1), weight.clone(), weight * 1))
    kept = []
    for n in range(5):
        total, same, *copies = f(arange(3000) * n)
        kept.append((total, *copies))
        assert same[0].item() == weight[0].item() == n + 1
    for n, (total, *copies) in enumerate(kept):
        assert total[:3].tolist() == [n, 2 * n + 1, 3 * n + 2]
        assert [c[0].item() for c in copies] == [n + 1, n + 1]


# ---- what is written


def test_arguments_that_are_written() -> None:
    def scenario(jit: Any) -> list[Any]:
        def body(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            x.add_(1)
            y[1:].mul_(x[0])
            z.t()[0] = 7
            return x.sum()

        f, found = jit(body), []
        for n in range(4):
            x, y, z = arange(3) + n, arange(4)[1:], arange(6, 2, 3)
            view = x[1:]
            found.append([f(x, y, z).item(), x.tolist(), y.tolist(), z.tolist(), view.tolist()])
        return found

    check(scenario)


def test_state_that_is_written() -> None:
    def scenario(jit: Any) -> list[Any]:
        whole, other = arange(6), arange(4, 2, 2)
        view, turned = whole[2:4], other.t()

        def body(x: Tensor) -> Tensor:
            view.add_(x)
            turned[0].mul_(2)
            return whole.sum() + other.sum()

        f = jit(body)
        found = [f(arange(2)).item() for _ in range(4)]
        whole.mul_(2)  # between calls, by whoever
        view.copy_(torch.ones(2))
        other.t().add_(1)
        return [*found, f(arange(2)).item(), *[t.tolist() for t in (whole, view, other, turned)]]

    check(scenario)


def test_contents_are_exchanged() -> None:
    def scenario(jit: Any) -> list[Any]:
        a, b, found = arange(3), arange(3) + 5, []

        def body() -> None:
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)

        f = jit(body)
        for _ in range(4):
            f()
            found.append([a.tolist(), b.tolist()])
        return found

    check(scenario)


def test_arguments_that_alias() -> None:
    def scenario(jit: Any) -> list[Any]:
        def body(a: Tensor, b: Tensor) -> Tensor:
            a.add_(1)
            b.mul_(2)
            return a * 1

        f, found = jit(body), []
        for n in range(3):
            x, y, z = arange(4) + n, arange(3), arange(3)
            found += [f(x[:3], x[1:]).tolist(), f(y, y).tolist(), f(y, z).tolist(), f(z, y).tolist()]
            found += [x.tolist(), y.tolist(), z.tolist()]
        return found

    check(scenario)


def test_an_argument_that_is_state() -> None:
    def scenario(jit: Any) -> list[Any]:
        state, found = arange(3), []

        def body(x: Tensor) -> Tensor:
            state.add_(1)
            x.mul_(2)
            return state - x

        f = jit(body)
        for given in (arange(3), arange(3), state, state, arange(3), state):
            found += [f(given).tolist(), given.tolist(), state.tolist()]
        return found

    check(scenario)


def test_versions_are_counted() -> None:
    state, x = arange(3), arange(3).requires_grad_()
    f = isthmus.jit(lambda: state[1:].add_(1))
    g = isthmus.jit(lambda given: given.add_(1))
    for write in (f, lambda: g(state)):
        for _ in range(2):
            write()
        loss, before = (x * state).sum(), state._version
        write()
        assert state._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_is_only_read_keeps_its_version() -> None:
    state = arange(3)
    f = isthmus.jit(lambda x: x * state)
    x = arange(3)
    for _ in range(3):
        f(x)
    assert (state._version, x._version) == (arange(3)._version, arange(3)._version)


# ---- the CPU


def test_cpu_arguments_move_in() -> None:
    def scenario(jit: Any) -> list[Any]:
        f = jit(lambda x, scale: x.to("jax", torch.float64) * scale + scale)
        given = [
            torch.arange(6.0).reshape(2, 3),
            torch.arange(6.0).reshape(3, 2).t(),
            torch.arange(12.0)[::2],
        ]
        return [f(x + n, torch.tensor(float(n))).tolist() for x in given for n in range(3)]

    check(scenario)


def test_cpu_arguments_index() -> None:
    f, runs = counted(lambda x, at: x[at] * 2)
    for n in range(3):
        assert f(arange(4), torch.tensor([n, 0])).tolist() == [2 * n, 0]
    assert len(runs) == 1


def test_cpu_state_is_read_at_every_call() -> None:
    table, scale = torch.arange(3.0), torch.tensor(1.0)
    f, runs = counted(lambda x: x * scale + table.to("jax"))
    for n in range(4):
        table.fill_(n)
        scale.fill_(n * 10)
        assert f(arange(3)).tolist() == [n, 11 * n, 21 * n]
    assert len(runs) == 1


def test_cpu_tensors_are_free_after_the_call() -> None:
    state = torch.zeros(100_000).to("jax")
    f = isthmus.jit(lambda given: state.mul_(0).add_(given.to("jax")).sum() * 2)
    found = []
    for n in range(6):
        given = torch.full((100_000,), float(n))
        found.append(f(given))
        given.zero_()
    assert [t.item() for t in found] == [200_000 * n for n in range(6)]


def test_cpu_constants() -> None:
    f, runs = counted(lambda x: x[torch.tensor([2, 0])] + torch.arange(2).to("jax") + torch.ones(2).to("jax"))
    for n in range(3):
        assert f(arange(3) + n).tolist() == [n + 3, n + 2]
    assert len(runs) == 1


# ---- random numbers


def test_random_numbers_are_those_of_eager() -> None:
    def scenario(jit: Any) -> list[Any]:
        torch.manual_seed(3)

        def body(x: Tensor) -> Tensor:
            torch.rand(5, device="jax")  # not used, but drawn
            return F.dropout(x, 0.5) + torch.rand(3, device="jax") * torch.randint(9, (3,), device="jax")

        f = jit(body)
        found = [f(arange(3)).tolist() for _ in range(4)]
        torch.manual_seed(3)
        found += [f(arange(3)).tolist(), torch.rand(2, device="jax").tolist()]
        assert found[0] != found[1]
        assert found[0] == found[4]
        return found

    check(scenario)


def test_random_numbers_of_a_generator() -> None:
    def scenario(jit: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        f = jit(lambda x: x + torch.rand(3, device="jax", generator=generator))
        found = [f(arange(3)).tolist() for _ in range(4)]
        assert found[0] != found[1]
        generator.manual_seed(5)
        return [*found, f(arange(3)).tolist(), torch.rand(2, generator=generator).tolist()]

    check(scenario)


def test_a_generator_as_an_argument() -> None:
    def scenario(jit: Any) -> list[Any]:
        one, other = (torch.Generator().manual_seed(n) for n in range(2))
        f = jit(lambda x, generator: x.uniform_(generator=generator) * 1)
        return [f(arange(3), g).tolist() for g in (one, one, other, one, other, one)]

    check(scenario)
