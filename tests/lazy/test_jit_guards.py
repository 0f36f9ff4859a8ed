"""``isthmus.jit`` records again when it must: other arguments, settings, modules, optimizers, gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import isthmus
from isthmus.errors import JitError
from tests.lazy.helpers import Steps, arange, check, counted, linear, plainly

pytestmark = pytest.mark.usefixtures("settled")


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


class Scaled(nn.Module):
    """Numbers in containers, as adapters have them: they change in place, and the attribute stays the same object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.names, self.scales, self.nested = ["one"], {"one": 2.0, "two": 3.0}, {"deep": [{"factor": 1.0}]}
        self.dropped: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * self.scales[self.names[-1]] * self.nested["deep"][0]["factor"]
        return x if "bias" in self.dropped else x + 1


CONTAINERS: list[Callable[[Scaled], Any]] = [
    lambda m: m.scales.update(one=5.0),
    lambda m: m.names.append("two"),
    lambda m: m.nested["deep"][0].update(factor=7.0),
    lambda m: m.dropped.add("bias"),
]


@pytest.mark.parametrize("change", CONTAINERS, ids=["a dict", "a list", "one inside others", "a set"])
def test_containers_of_a_module_that_change(change: Callable[[Scaled], Any]) -> None:
    model, x = Scaled().to("jax").requires_grad_(False), torch.ones(2, 3, device="jax")
    f = isthmus.jit(model)
    for _ in range(3):
        before = f(x)
    change(model)
    assert f(x).tolist() == model(x).tolist() != before.tolist()


def test_a_module_that_gets_another_layer() -> None:
    model = nn.Sequential(linear())
    f, _ = counted(torch.no_grad()(lambda x: model(x)))
    for _ in range(3):
        assert f(arange(2, 1, 2)).tolist() == [[1, 3]]
    model.append(linear())
    assert f(arange(2, 1, 2)).tolist() == f(arange(2, 1, 2)).tolist() == [[3, 11]]
    model[0] = nn.Identity()
    assert f(arange(2, 1, 2)).tolist() == [[1, 3]]


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


def scaled(x, mask):
    """Take another way where nothing is masked, as transformers does."""
    return x * 2 if mask.all() else torch.where(mask, x, 0.0)


def test_a_truth_of_arguments_is_guarded():
    recorded = []

    def function(x, mask):
        recorded.append(mask)
        return scaled(x, mask)

    fast = isthmus.jit(function)
    x = torch.arange(4.0)
    masks = [[1, 0, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]
    for row in masks:
        mask = torch.tensor(row, dtype=torch.bool)
        for _ in range(2):
            found = fast(x.to("jax"), mask.to("jax"))
            assert torch.equal(found.cpu(), scaled(x, mask))
    assert len(recorded) == 2  # once for each truth


def test_a_truth_of_an_argument_that_is_written_is_computed_of_what_it_was():
    def function(x):
        x += 1
        if (x > 1.5).all():
            return x * 10
        return x.clone()

    fast = isthmus.jit(function)
    x, y = torch.zeros(2, device="jax"), torch.zeros(2)
    for _ in range(4):
        assert torch.equal(fast(x).cpu(), function(y))
        assert torch.equal(x.cpu(), y)


@pytest.mark.parametrize(
    "read", [lambda x, w: x.sum().item(), lambda x, w: bool((w > 0).all()), lambda x, w: (x > 0).tolist()]
)
def test_only_truths_of_arguments_are_guarded(read):
    weight = torch.ones(3, device="jax")
    with pytest.raises(JitError, match="a value is read"):
        isthmus.jit(lambda x: (read(x, weight), x + 1)[1])(torch.ones(3, device="jax"))


def test_modules_that_a_function_makes_are_no_strangers():
    recorded = []

    def function(x, y):
        recorded.append(x)
        return nn.CrossEntropyLoss(label_smoothing=0.1)(nn.Sequential(nn.ReLU(), nn.Softplus())(x), y)

    fast = isthmus.jit(function)
    for seed in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        y = torch.arange(4)
        with torch.no_grad():
            found = fast(x.to("jax"), y.to("jax"))
        assert torch.allclose(found.cpu(), function(x, y))
        recorded.pop()
    assert len(recorded) == 1
    assert not hasattr(nn.Module.__init__, "__wrapped__")


def test_a_module_from_a_queue_is_a_stranger():
    queue = [[[nn.LeakyReLU(0.1)]], [[nn.LeakyReLU(0.3)]]] * 2
    x = -torch.ones(2, device="jax")
    fast = isthmus.jit(lambda x: next(zip(*queue.pop(0), strict=True))[0](x))
    assert [float(fast(x)[0]) for _ in range(4)] == [pytest.approx(-n) for n in (0.1, 0.3, 0.1, 0.3)]
