"""``isthmus.jit``: replays do what the function would have done, and what cannot be replayed is recorded or refused."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isthmus
from isthmus._device import checks
from isthmus.errors import JitError
from tests.test_fallback import library


@pytest.fixture(autouse=True)
def clean(strict_fallback: None) -> Iterator[None]:
    yield
    checks.forget()
    assert isthmus.mode() == "eager"


def arange(n: int, *shape: int) -> Tensor:
    """Return 0, 1, 2, ... as a float tensor on the device: sums and products of these are exact."""
    return torch.arange(float(n)).reshape(shape or (n,)).to("jax")


def held(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._buffer.held  # type: ignore[attr-defined]


def jit_warning() -> type[Warning]:
    from isthmus._lazy.jit import JitWarning

    return JitWarning


def replays() -> int:
    return isthmus.metrics.counts().get("replays", 0)


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


Scenario = Callable[[Any], list[Any]]


def check(scenario: Scenario) -> None:
    """Run a scenario with and without jit, and ask for the same observations and for replays."""
    wanted = scenario(plainly)
    before = replays()
    assert scenario(isthmus.jit) == wanted
    assert replays() > before


def counted(body: Callable[..., Any]) -> tuple[Any, list[int]]:
    """Return a function under jit, and a list that grows whenever its Python runs."""
    runs: list[int] = []

    @isthmus.jit
    def function(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return body(*args, **kwargs)

    return function, runs


# ---- what is recorded again: arguments

ARGUMENTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "shape": (lambda: arange(3), lambda: arange(4)),
    "rank": (lambda: arange(6), lambda: arange(6, 2, 3)),
    "dtype": (lambda: arange(3), lambda: arange(3).double()),
    "stride": (lambda: arange(6, 2, 3), lambda: arange(6, 3, 2).t()),
    "step": (lambda: arange(3), lambda: arange(6)[::2]),
    "expanded": (lambda: arange(6, 2, 3), lambda: arange(3).expand(2, 3)),
    "offset": (lambda: arange(4)[:3], lambda: arange(4)[1:]),
    "storage": (lambda: arange(3), lambda: arange(4)[:3]),
    "requires_grad": (lambda: arange(3), lambda: arange(3).requires_grad_()),
    "number": (lambda: 2, lambda: 3),
    "int or float": (lambda: 1, lambda: 1.0),
    "int or bool": (lambda: 1, lambda: True),
    "float or bool": (lambda: 1.0, lambda: True),
    "zero": (lambda: 0.0, lambda: -0.0),
    "nan": (lambda: float("nan"), lambda: 0.0),
    "complex": (lambda: 1.0, lambda: 1 + 0j),
    "tuple": (lambda: [arange(3), arange(3)], lambda: (arange(3), arange(3))),
    "length": (lambda: [arange(3), arange(3)], lambda: [arange(3)]),
    "keys": (lambda: {"a": arange(3)}, lambda: {"b": arange(3)}),
    "string": (lambda: "a", lambda: "b"),
    "none": (lambda: None, lambda: arange(3)),
    "device": (lambda: torch.tensor(2.0), lambda: torch.tensor(2.0).to("jax")),
    "numpy number": (lambda: np.float32(1), lambda: np.float64(1)),
}


def described(x: Tensor, given: Any) -> list[Any]:
    """Return a result for every kind of argument there is in the table."""
    kind = given if isinstance(given, (str, type(None))) else type(given).__name__
    if isinstance(given, dict):
        return [kind, list(given), *[value * 2 for value in given.values()]]
    if isinstance(given, (list, tuple)):
        return [kind, *[value * 2 for value in given]]
    if isinstance(given, (str, type(None))):
        return [kind, x * 2]
    if isinstance(given, (int, float, complex, np.generic)):
        return [kind, x * (complex(given) if isinstance(given, complex) else type(given)(given)), str(given)]
    return [kind, given.requires_grad, (x.sum() * given).detach()]


def seen(found: Any) -> str:
    """Return everything about a result as text, in which nan is nan and -0.0 is not 0.0."""
    if isinstance(found, Tensor):
        return f"{found.dtype} {found.stride()} {found.tolist()}"
    return str([seen(item) for item in found]) if isinstance(found, list) else repr(found)


@pytest.mark.parametrize(("one", "other"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_are_told_apart(one: Any, other: Any) -> None:
    f, runs = counted(described)
    for make in (one, one, other, other, one, other, one):
        assert seen(f(arange(3), make())) == seen(described(arange(3), make()))
    assert len(runs) == 2  # both are kept


def test_keyword_arguments() -> None:
    f, runs = counted(lambda a, b=None, **rest: a - (b if b is not None else 1) + sum(rest.values()))
    for _ in range(2):
        assert f(arange(3), b=arange(3) * 2).tolist() == [0, -1, -2]
        assert f(b=arange(3) * 2, a=arange(3)).tolist() == [0, -1, -2]
        assert f(arange(3)).tolist() == [-1, 0, 1]
        assert f(arange(3), c=arange(3), d=5).tolist() == [4, 6, 8]
    assert len(runs) == 4


@pytest.mark.parametrize("given", [{1, 2}, np.ones(2), bytearray(b"x")], ids=lambda g: type(g).__name__)
def test_arguments_that_cannot_be_told_apart(given: Any) -> None:
    f, runs = counted(lambda x, other: x + 1)
    with pytest.raises(JitError, match=f"type {type(given).__name__} is neither a tensor nor hashable"):
        f(arange(3), given)
    assert runs == []


def test_many_signatures_are_kept_and_the_oldest_dropped() -> None:
    f, runs = counted(lambda x, n: x + n)
    for n in [*range(64), *range(64), 64, 0, 64]:
        assert f(arange(2), n).tolist() == [n, n + 1]
    assert len(runs) == 66


# ---- what is recorded again: torch's settings


def test_grad_mode() -> None:
    w = arange(3).requires_grad_()
    f, runs = counted(lambda x: ((x * w).requires_grad, x * 2))
    for _ in range(2):
        assert f(arange(3))[0] is True
        with torch.no_grad():
            assert f(arange(3))[0] is False
        with torch.inference_mode():
            assert f(arange(3))[0] is False
    assert len(runs) == 3


def test_autocast() -> None:
    f, runs = counted(lambda x: x @ x)
    for _ in range(2):
        assert f(arange(4, 2, 2)).dtype == torch.float32
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("jax", dtype):
                assert f(arange(4, 2, 2)).dtype == dtype
    assert len(runs) == 3


def test_autocast_around_calls_follows_the_weights() -> None:
    def scenario(jit: Any) -> list[Any]:
        model = nn.Linear(2, 2).to("jax")
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        f, found = jit(torch.no_grad()(lambda x: model(x))), []
        for _ in range(3):
            with torch.autocast("jax", torch.bfloat16):
                found += [f(arange(2, 1, 2)).tolist(), f(arange(2, 1, 2)).tolist()]
            with torch.no_grad():
                model.weight.add_(1)
        return found

    assert scenario(isthmus.jit) == scenario(plainly)  # torch keeps what it has cast until the block ends


def test_default_dtype_and_precision() -> None:
    f, runs = counted(lambda x: torch.ones(2, device="jax") + x)
    try:
        for dtype in (torch.float32, torch.float64) * 2:
            torch.set_default_dtype(dtype)
            assert f(torch.ones(2, dtype=torch.int64).to("jax")).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(runs) == 2
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        f(torch.ones(2, dtype=torch.int64).to("jax"))
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(runs) == 3


# ---- what is recorded again: modules, optimizers, gradients


def linear(bias: bool = False) -> nn.Linear:
    model = nn.Linear(2, 2, bias).to("jax")
    with torch.no_grad():
        model.weight.copy_(arange(4, 2, 2))
    return model


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "in place": lambda m: m.weight.data.mul_(3),
    "replaced": lambda m: setattr(m, "weight", nn.Parameter(arange(4, 2, 2) + 1)),
    "deleted and replaced": lambda m: (
        delattr(m, "weight"),
        m.register_parameter("weight", nn.Parameter(arange(4, 2, 2) - 1)),
    ),
    "load_state_dict": lambda m: m.load_state_dict({"weight": torch.ones(2, 2)}),
    "load_state_dict of the device": lambda m: m.load_state_dict({"weight": arange(4, 2, 2) * 2}),
    "load_state_dict, assigned": lambda m: m.load_state_dict({"weight": arange(4, 2, 2) * 2}, assign=True),
    "data": lambda m: setattr(m.weight, "data", arange(4, 2, 2) * 5),
    "dtype": lambda m: m.to(torch.float64),
    "bias": lambda m: m.register_parameter("bias", nn.Parameter(arange(2) * 10)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_parameters_that_change(change: Callable[[nn.Linear], Any]) -> None:
    def scenario(jit: Any) -> list[Any]:
        model = linear()
        f, found = jit(lambda x: model(x).detach()), []
        for _ in range(2):
            found += [f(arange(2, 1, 2).to(model.weight.dtype)).tolist() for _ in range(3)]
            change(model)
        return [*found, f(arange(2, 1, 2).to(model.weight.dtype)).tolist()]

    check(scenario)


def test_the_training_flag() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.Dropout(1.0))).to("jax")
    f, runs = counted(torch.no_grad()(lambda x: model(x)))
    x = arange(6, 3, 2)
    assert f(x).tolist() == f(x).tolist() == f(x).tolist() == [[0, 0]] * 3
    recorded = len(runs)
    tracked = model[0].num_batches_tracked.item()
    assert tracked == 3
    model.eval()
    want = model(x).tolist()
    assert f(x).tolist() == f(x).tolist() == want != [[0, 0]] * 3
    assert len(runs) == recorded + 1
    assert model[0].num_batches_tracked.item() == 3
    model[1][0].train()
    assert f(x).tolist() == f(x).tolist() == [[0, 0]] * 3
    assert len(runs) == recorded + 2


def test_a_module_that_gets_another_layer() -> None:
    model = nn.Sequential(linear())
    f, _ = counted(torch.no_grad()(lambda x: model(x)))
    for _ in range(3):
        assert f(arange(2, 1, 2)).tolist() == [[1, 3]]
    model.append(linear())
    assert f(arange(2, 1, 2)).tolist() == f(arange(2, 1, 2)).tolist() == [[3, 11]]
    model[0] = nn.Identity()
    assert f(arange(2, 1, 2)).tolist() == [[1, 3]]


class Steps:
    """A training step of one weight whose numbers are exact: rates are powers of two."""

    def __init__(self, zero: bool = True, **options: Any) -> None:
        self.weight = nn.Parameter(arange(3) + 1)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.25, **options)
        self.zero, self.runs = zero, 0

    def step(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.zero:
            self.optimizer.zero_grad()
        loss = (self.weight * x).sum()
        loss.backward()
        self.optimizer.step()
        return loss

    def seen(self) -> list[Any]:
        gradient = self.weight.grad
        return [self.weight.tolist(), None if gradient is None else gradient.tolist()]


STEPS: dict[str, Callable[[Steps], Any]] = {
    "nothing": lambda s: None,
    "rate": lambda s: s.optimizer.param_groups[0].update(lr=0.5),
    "decay": lambda s: s.optimizer.param_groups[0].update(weight_decay=0.5),
    "no gradient": lambda s: setattr(s.weight, "grad", None),
    "zero gradient": lambda s: s.optimizer.zero_grad(set_to_none=False),
    "another gradient": lambda s: setattr(s.weight, "grad", arange(3) * 8),
    "a gradient written to": lambda s: s.weight.grad.add_(1),
    "a copy of the gradient": lambda s: setattr(s.weight, "grad", s.weight.grad.clone()),
    "state": lambda s: s.optimizer.state.clear(),
    "state loaded": lambda s: s.optimizer.load_state_dict(copy.deepcopy(s.optimizer.state_dict())),
    "weight written to": lambda s: s.weight.data.mul_(2),
    "another group": lambda s: s.optimizer.add_param_group(
        {"params": [nn.Parameter(arange(2))], "lr": 0.125}
    ),
}


@pytest.mark.parametrize("zero", [True, False], ids=["zeroed", "accumulated"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("change", STEPS.values(), ids=STEPS)
def test_steps_between_which_something_changes(
    change: Callable[[Steps], Any], momentum: float, zero: bool
) -> None:
    def scenario(jit: Any) -> list[Any]:
        steps = Steps(zero, momentum=momentum)
        f, found = jit(steps.step), []
        for n in range(9):
            loss = f(arange(3) + n)
            found.append([loss.tolist(), *steps.seen()])
            if n in (3, 6):
                change(steps)
        return found

    check(scenario)


def test_steps_are_recorded_when_they_must_be_and_not_else() -> None:
    steps = Steps(momentum=0.5)
    f = isthmus.jit(steps.step)
    for _ in range(6):
        f(arange(3))
    assert steps.runs <= 3
    runs = steps.runs
    for rate in (0.5, 0.125):
        steps.optimizer.param_groups[0]["lr"] = rate
        runs += 1
        with Compilations() as compiled:
            for _ in range(3):
                f(arange(3))
        assert steps.runs == runs
        assert compiled.count == 0


class Compilations:
    """How many programs were compiled inside a block."""

    def __enter__(self) -> Compilations:
        self.before = isthmus.metrics.counts().get("compilations", 0)
        return self

    def __exit__(self, *_: object) -> None:
        self.count = isthmus.metrics.counts().get("compilations", 0) - self.before


def test_adam_loads_its_state() -> None:
    def scenario(jit: Any) -> list[Any]:
        weight = nn.Parameter(arange(3) + 1)
        optimizer = torch.optim.Adam([weight], lr=0.25, capturable=True)

        def step() -> None:
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()

        f, found = jit(step), []
        kept = copy.deepcopy(optimizer.state_dict())
        for n in range(12):
            f()
            (state,) = optimizer.state.values()
            found.append([state["step"].item(), *[round(v, 4) for v in weight.tolist()]])
            if n == 3:
                kept = copy.deepcopy(optimizer.state_dict())
            elif n == 7:
                optimizer.load_state_dict(kept)
        return found

    check(scenario)


def test_gradients_are_new_tensors() -> None:
    weight = nn.Parameter(arange(3))

    @isthmus.jit
    def step() -> None:
        weight.grad = None
        weight.square().sum().backward()

    kept = []
    for n in range(5):
        step()
        kept.append(weight.grad)
        assert weight.grad.tolist() == [2 * (i + n) for i in range(3)]
        with torch.no_grad():
            weight.add_(1)
    assert [g.tolist() for g in kept] == [[2 * (i + n) for i in range(3)] for n in range(5)]


def test_gradients_that_a_step_drops() -> None:
    steps = Steps()

    @isthmus.jit
    def step(x: Tensor) -> Tensor:
        found = steps.step(x)
        steps.optimizer.zero_grad()
        return found

    for _ in range(5):
        steps.weight.grad = arange(3)
        step(arange(3))
        assert steps.weight.grad is None
    assert steps.runs <= 3


def test_gradients_of_arguments() -> None:
    f, runs = counted(lambda x: x.square().sum().backward())
    for n in range(4):
        x = (arange(3) + n).requires_grad_()
        f(x)
        assert x.grad.tolist() == [2 * (i + n) for i in range(3)]
    assert len(runs) == 1


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


# ---- errors

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda y: y.sum().item(),
    "float": lambda y: float(y[0]),
    "bool": lambda y: 1 if (y > 0).all() else 0,
    "cpu": lambda y: y.cpu(),
    "tolist": lambda y: y.tolist(),
    "str": lambda y: str(y),
    "print": lambda y: print(y),
    "equal": lambda y: torch.equal(y, y + 1),
    "nonzero": lambda y: y.nonzero(),
    "mask": lambda y: y[y > 1],
    "unique": lambda y: torch.unique(y),
    "copy to the CPU": lambda y: torch.zeros(3).copy_(y),
    "numpy": lambda y: y.numpy(force=True),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_a_value_is_refused(read: Callable[[Tensor], Any]) -> None:
    state, x, doomed = arange(3), arange(3), [True]

    @isthmus.jit
    def f(given: Tensor) -> Tensor:
        state.add_(given)
        y = given * 2
        if doomed[0]:
            read(y)
        return y + state

    for n in range(1, 3):
        with pytest.raises(JitError, match=r"value is read.*test_jit\.py:\d+.*read it outside"):
            f(x)
        assert isthmus.mode() == "eager"
        assert (x.tolist(), (x + 1).tolist()) == ([0, 1, 2], [1, 2, 3])
        assert state.tolist() == [0, 1 + n, 2 + 2 * n]  # what came before the error is done, as in eager
    doomed[0] = False
    for n in range(4, 8):
        assert f(x).tolist() == [0, n + 2, 2 * n + 4]


def add_on_the_cpu(counter: Tensor, x: Tensor) -> Tensor:
    counter.add_(1)
    return x * 2


HOSTED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "changed": (add_on_the_cpu, r'add_.*changes a tensor on the CPU.*capturable=True.*move.*"jax"'),
    "computed with": (
        lambda c, x: x + (c * 2).to("jax"),
        r'mul.*computes with a tensor on the CPU.*"jax" first',
    ),
    "read": (lambda c, x: x * c[0].item(), r'computes with a tensor on the CPU.*"jax" first'),
    "numpy": (lambda c, x: x * float(c.numpy()[0]), r"a tensor on the CPU is read"),
    "drawn": (lambda c, x: x + torch.rand(3).to("jax"), r'rand.*random numbers on the CPU.*device="jax"'),
    "permuted": (lambda c, x: x[torch.randperm(3)], r'randperm.*random numbers on the CPU.*device="jax"'),
    "filled": (
        lambda c, x: x + torch.empty(3).uniform_().to("jax"),
        r'uniform_.*random numbers on the CPU.*device="jax"',
    ),
    "dropped": (
        lambda c, x: x + F.dropout(torch.ones(3)).to("jax"),
        r'random numbers on the CPU.*device="jax"',
    ),
}


@pytest.mark.parametrize(("body", "message"), HOSTED.values(), ids=HOSTED)
def test_working_on_the_cpu_is_refused(body: Callable[[Tensor, Tensor], Any], message: str) -> None:
    x, on_cpu = arange(3), torch.ones(3)
    f = isthmus.jit(lambda given: body(on_cpu, given))
    for _ in range(2):
        with pytest.raises(JitError, match=message):
            f(x)
        with pytest.raises(JitError, match=message):
            isthmus.jit(body)(on_cpu, x)
        assert on_cpu.tolist() == [1, 1, 1]
        assert (x + 1).tolist() == [1, 2, 3]
    g = isthmus.jit(lambda given: given + 1)
    assert g(x).tolist() == g(x).tolist() == [1, 2, 3]


def test_an_op_that_falls_to_the_cpu_is_refused() -> None:
    isthmus.config.fallback = "cpu"
    _keep, op = library("jitfall", "f(Tensor x) -> Tensor", lambda x: x + 1)
    state = arange(3)
    f = isthmus.jit(lambda x: op(state.add_(x)))
    for n in range(1, 3):
        with pytest.raises(JitError, match=r"jitfall\.f\.default would run on the CPU.*move it out"):
            f(arange(3))
        assert state.tolist() == [0, 1 + n, 2 + 2 * n]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax"])
def test_optimizers_that_count_on_the_cpu_are_refused(name: str) -> None:
    weight = nn.Parameter(arange(3))
    optimizer = getattr(torch.optim, name)([weight])

    def step() -> None:
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()

    f = isthmus.jit(step)
    for _ in range(2):
        with pytest.raises(JitError, match=rf"{name} counts its steps.*capturable=True"):
            f()
        assert weight.tolist() == [0, 1, 2]
    optimizer.param_groups[0]["capturable"] = True
    for _ in range(4):
        f()
    (state,) = optimizer.state.values()
    assert state["step"].item() == 4


def test_exceptions_of_the_function() -> None:
    state, fails = arange(3), [False]

    @isthmus.jit
    def f(x: Tensor) -> Tensor:
        state.add_(x)
        if fails[0]:
            raise ValueError("mine")
        return state * 2

    assert f(arange(3)).tolist() == [0, 4, 8]
    fails[0] = True
    for shape in (4, 5):
        with pytest.raises(ValueError, match="mine"):
            f(arange(shape)[:3])
    assert state.tolist() == [0, 4, 8]
    fails[0] = False
    assert f(arange(3)).tolist() == [0, 10, 20]
    assert f(arange(4)[:3]).tolist() == [0, 12, 24]
    with pytest.raises(RuntimeError, match="must match the size"):
        f(arange(4))
    assert state.tolist() == [0, 6, 12]


@pytest.mark.parametrize("when", ["now", "later"])
def test_an_index_out_of_range(when: str) -> None:
    isthmus.config.check_indices = when
    table = arange(4, 2, 2)
    f = isthmus.jit(lambda at: F.embedding(at, table) * 1)
    good, bad = (torch.tensor([0, n]).to("jax") for n in (1, 5))
    for _ in range(3):
        assert f(good).tolist() == [[0, 1], [2, 3]]
    if when == "now":
        with pytest.raises(IndexError, match="out of range"):
            f(bad)
    else:
        found = f(bad)
        with pytest.raises(IndexError, match="out of range"):
            found.tolist()
    assert f(good).tolist() == [[0, 1], [2, 3]]


# ---- memory


def test_memory_is_given_to_the_next_value() -> None:
    state = arange(3000) * 1
    f = isthmus.jit(lambda: state.add_(1))
    for _ in range(3):
        f()
    where = held(state).unsafe_buffer_pointer()
    kept = held(state)
    assert kept[0] == 3
    f()
    assert (float(kept[0]), kept.is_deleted()) == (3, False)  # somebody holds it
    del kept
    f()
    where = held(state).unsafe_buffer_pointer()
    for _ in range(3):
        f()
        assert held(state).unsafe_buffer_pointer() == where
    assert state[0].item() == 8


def test_donate_is_refused() -> None:
    state = arange(3000) * 1
    f = isthmus.jit(lambda: state.add_(1), donate=False)
    for n in range(4):
        kept, where = held(state), held(state).unsafe_buffer_pointer()
        f()
        assert not kept.is_deleted()
        assert held(state).unsafe_buffer_pointer() != where
        assert (float(kept[0]), state[0].item()) == (n, n + 1)


def test_what_was_taken_from_a_tensor_before_stays() -> None:
    state, cpu = arange(3000) * 1, torch.zeros(3000)
    state.copy_(cpu)
    view = state[10:20]
    f = isthmus.jit(lambda x: state.add_(x))
    kept = []
    for n in range(4):
        kept.append((n, state.detach().clone(), state + 0, state.cpu(), np.asarray(held(state))))
        f(torch.ones(3000).to("jax"))
    for n, *copies in kept:
        assert [float(c[0]) for c in copies] == [n] * 4
    assert view.tolist() == [4] * 10
    assert not cpu.any()


def test_replays_leak_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.ReLU()).to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    table = arange(6, 3, 2)

    @isthmus.jit
    def step(x: Tensor, at: Tensor, host: Tensor) -> Any:
        optimizer.zero_grad()
        loss = (model(x) * F.embedding(at, table)).sum() + host.to("jax").sum()
        loss.backward()
        optimizer.step()
        return loss, x[:1]

    def run(times: int) -> None:
        for _ in range(times):
            step(arange(4, 2, 2), torch.tensor([0, 2]).to("jax"), torch.ones(3))
        checks.raise_pending()

    run(5)
    before, count = alive(), replays()
    run(300)
    assert alive() == before
    assert replays() == count + 300


def alive() -> int:
    """Return how many arrays there are."""
    from isthmus._runtime import hosts

    torch.jax.synchronize()  # type: ignore[attr-defined]
    hosts._numbers.clear()  # a cache with a limit of its own
    gc.collect()
    return len(jax.live_arrays())


def test_nothing_of_a_call_is_kept() -> None:
    f = isthmus.jit(lambda x, y: (x * 2, x[1:], y))
    x, y = arange(3), arange(3)
    found = f(x, y)
    buffers = [weakref.ref(t.untyped_storage()._buffer) for t in (x, y, found[0])]  # type: ignore[attr-defined]
    del x, y, found
    f(arange(3), arange(3))
    gc.collect()
    assert [b() for b in buffers] == [None] * 3


def test_a_function_that_is_dropped_keeps_nothing() -> None:
    state = [arange(3)]
    f = isthmus.jit(lambda x: x * state[0])
    f(arange(3))
    f(arange(3))
    buffer = weakref.ref(state[0].untyped_storage()._buffer)  # type: ignore[attr-defined]
    state.clear()
    del f
    gc.collect()
    assert buffer() is None


# ---- tensors that go elsewhere


def test_tensors_stored_elsewhere() -> None:
    kept: list[Tensor] = []

    @isthmus.jit
    def f(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return x + 1

    def run() -> None:
        for n in range(6):
            assert f(arange(2) + n).tolist() == [n + 1, n + 2]

    with pytest.warns(jit_warning(), match=r"records .*f at every call: it keeps a tensor that it makes"):
        run()
    assert [t.tolist() for t in kept] == [[2 * n, 2 * n + 2] for n in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(arange(2))  # said once


def test_settings_changed_inside() -> None:
    steps = Steps()
    schedule = torch.optim.lr_scheduler.StepLR(steps.optimizer, 1, 0.5)

    @isthmus.jit
    def step(x: Tensor) -> Tensor:
        found = steps.step(x)
        schedule.step()
        return found

    def run() -> None:
        for _ in range(6):
            step(torch.ones(3).to("jax"))

    with pytest.warns(jit_warning(), match="it changes the settings of SGD"):
        run()
    assert steps.optimizer.param_groups[0]["lr"] == 0.25 / 64
    assert steps.weight.tolist() == [1 + i - 0.25 * (2 - 2**-5) for i in range(3)]


def test_no_warning_where_a_function_settles() -> None:
    steps = Steps(momentum=0.5)
    f = isthmus.jit(steps.step)
    with warnings.catch_warnings():
        warnings.simplefilter("error", jit_warning())
        for n in range(12):
            steps.optimizer.param_groups[0]["lr"] = 1 / (n + 1)
            f(arange(3))


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
        isthmus.jit(lambda x: x if (torch.arange(3, device="jax") * x).sum() > 0 else -x)(
            torch.ones(3).to("jax")
        )
    with pytest.raises(JitError, match="a value is read"):
        isthmus.jit(lambda x: x * torch.rand(3, device="jax").sum().item())(torch.ones(3).to("jax"))
