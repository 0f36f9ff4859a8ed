"""torch.compile(backend="isthmus"): memory is given on and given back, versions count, warm calls move nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import Tensor, nn

import isthmus
from isthmus._dynamo.program import Program
from tests.dynamo.test_compile_aliasing import add_and_return, add_only, update

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def array(t: Tensor) -> Any:
    """Return the array a tensor of the device holds now."""
    return t.untyped_storage()._buffer.value  # type: ignore[attr-defined]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="isthmus", options=options or None)


def test_an_alias_sees_a_write_and_a_copy_does_not() -> None:
    x = torch.ones(300, 7, device="jax")
    function = compiled(add_only)
    alias, view = x.detach(), x[3:, 1]
    for n in range(1, 5):
        copy = x.clone()
        function(x)
        assert (copy == n).all()
        assert (x == n + 1).all()
        assert (alias == n + 1).all()
        assert (view == n + 1).all()


def test_an_array_taken_before_is_left_alone() -> None:
    x = torch.ones(300, 7, device="jax")
    function = compiled(add_only)
    function(x)
    held = array(x)
    function(x)
    assert not held.is_deleted()
    assert float(held[0, 0]) == 2
    assert x[0, 0].item() == 3


def test_a_dlpack_consumer_keeps_what_it_was_given() -> None:
    x = torch.ones(300, 7, device="jax")
    function = compiled(add_only)
    function(x)
    taken = jax.dlpack.from_dlpack(x)
    for _ in range(3):
        function(x)
    assert float(taken[0, 0]) == 2


@pytest.mark.parametrize(
    ("function", "others"),
    [
        pytest.param(add_only, 0, id="not returned"),
        pytest.param(lambda x: (x[1:].mul_(2), None)[1], 0, id="through a view"),
        pytest.param(lambda x, y: (x.mul_(y.sum()), y[0] + 1)[1], 1, id="with another result"),
        pytest.param(lambda x, y: (x.mul_(y.sum()), y + 1)[1], 1, id="with another result of its shape"),
        pytest.param(update, 1, id="as an optimizer does"),
        pytest.param(add_and_return, 0, id="returned"),
    ],
)
def test_memory_of_a_written_argument_is_reused(function: Any, others: int) -> None:
    args = [torch.ones(300, 7, device="jax") for _ in range(1 + others)]
    call = compiled(function)
    call(*args)
    call(*args)
    pointer = array(args[0]).unsafe_buffer_pointer()
    call(*args)
    assert array(args[0]).unsafe_buffer_pointer() == pointer
    off = compiled(lambda *a: function(*a), donate="off")
    off(*args)
    pointer = array(args[0]).unsafe_buffer_pointer()
    off(*args)
    assert array(args[0]).unsafe_buffer_pointer() != pointer


def test_the_same_memory_twice_is_not_given_away() -> None:
    base = torch.ones(300, 7, device="jax")
    function = compiled(lambda x, y: x.add_(1) + y)
    for n in range(1, 4):
        assert (function(base[:100], base[100:200]) == 1 + n + 1).all()
        assert (base[200:] == 1).all()


@pytest.mark.parametrize("donate", ["auto", "off"])
def test_the_old_array_is_released(donate: str) -> None:
    x = torch.ones(321, 7, device="jax")
    function = compiled(add_only, donate=donate)
    function(x)
    function(x)
    old = weakref.ref(array(x))
    gc.collect()
    alive = _of_this_test()
    for _ in range(5):
        function(x)
    gc.collect()
    assert old() is None
    assert _of_this_test() == alive


def _of_this_test() -> int:
    """Count the arrays of a shape that no other test has: what others left may go meanwhile."""
    return sum(a.shape == (321, 7) for a in jax.live_arrays())


def test_results_and_saved_tensors_are_released() -> None:
    w = torch.ones(33, 33, device="jax", requires_grad=True)
    x = torch.ones(5, 33, device="jax")
    function = compiled(lambda w, x: (x @ w).sin().exp().sum())

    def step() -> None:
        w.grad = None
        function(w, x).backward()

    step()
    step()
    gc.collect()
    alive = len(jax.live_arrays())
    for _ in range(5):
        step()
    gc.collect()
    assert len(jax.live_arrays()) == alive


def test_arguments_of_no_further_use_are_released_with_the_caller() -> None:
    function = compiled(lambda x: x * 2)
    x = torch.ones(77, device="jax")
    function(x)
    function(x)
    old = weakref.ref(array(x))
    del x
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_a_write_to_what_backward_needs_is_noticed(device: str) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    y = torch.full((3,), 2.0, device=device)
    function = compiled(lambda y: y.mul_(3))
    loss = (x * y).sum()
    function(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_a_write_to_what_a_compiled_backward_needs_is_noticed(device: str) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    y = torch.full((3,), 2.0, device=device)
    loss = compiled(lambda x, y: (x * y).sum())(x, y)
    y.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_versions_count_writes_and_nothing_else(device: str) -> None:
    x, y = torch.ones(3, device=device), torch.ones(3, device=device)
    function = compiled(lambda x, y: x.add_(y))
    function(x, y)
    before = x._version, y._version
    function(x, y)
    assert x._version > before[0]
    assert y._version == before[1]


@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_a_leaf_that_requires_grad_is_not_written(device: str) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        compiled(lambda x: x.add_(1))(x)
    assert (x == 1).all()


def step_of_training(model: nn.Module, optimizer: Any, x: Tensor) -> Callable[[], Any]:
    function = compiled(lambda x: model(x).square().mean())

    def step() -> Any:
        optimizer.zero_grad()
        loss = function(x)
        loss.backward()
        optimizer.step()
        return loss

    return step


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.1), nn.Linear(5, 2))


def training() -> Callable[[], Any]:
    model = network().to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return step_of_training(model, optimizer, torch.ones(6, 4, device="jax"))


def calling(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[], Callable[[], Any]]:
    """Return how a warm call of a compiled function is set up."""

    def start() -> Callable[[], Any]:
        args = [torch.ones(shape, device="jax") for shape in shapes]
        call = compiled(function)
        return lambda: call(*args)

    return start


def sliding() -> Callable[[], Any]:
    cache, call = torch.ones(60, 4, device="jax"), compiled(lambda x: x.mul_(2).sum())
    at = iter(range(60))

    def step() -> Any:
        start = next(at)
        return call(cache[start : start + 1])

    return step


WARM = {
    "computing": calling(lambda x, y: (x @ y).relu(), (3, 4), (4, 5)),
    "writing": calling(lambda x: x.add_(1), (3, 4)),
    "writing a view": calling(lambda x: x[1:].add_(1), (3, 4)),
    "returning a view": calling(lambda x: ((x * 2)[1:], x[1:]), (3, 4)),
    "dropout": calling(lambda x: nn.functional.dropout(x, 0.5), (3, 4)),
    "training": training,
}


@pytest.mark.parametrize("name", WARM)
def test_warm_calls_transfer_and_compile_nothing(name: str) -> None:
    call = WARM[name]()
    for _ in range(3):
        call()
    before = isthmus.metrics.counts()
    for _ in range(50):
        call()
    after = isthmus.metrics.counts()
    for counter in ("compilations", "transfers to host", "transfers to device"):
        assert after.get(counter, 0) == before.get(counter, 0), counter


def test_a_sliding_view_compiles_once() -> None:
    step = sliding()
    for _ in range(3):
        step()
    before = isthmus.metrics.counts()["compilations"]
    for _ in range(50):
        step()
    assert isthmus.metrics.counts()["compilations"] == before


FORGOTTEN: dict[str, Callable[[Tensor], Any]] = {
    "a result": lambda x: x.sin() + 1,
    "a condition": lambda x: x[torch.tensor([0, 1], device=x.device)],
    "a write": lambda x: x.add_(1),
    "random numbers": torch.rand_like,
}


@pytest.mark.parametrize("function", FORGOTTEN.values(), ids=FORGOTTEN)
def test_what_dynamo_forgets_is_freed(function: Callable[[Tensor], Any]) -> None:
    def programs() -> int:
        torch._dynamo.reset()
        gc.collect()
        return sum(type(found) is Program for found in gc.get_objects())

    before = programs()
    x = torch.ones(3, device="jax")
    for _ in range(3):
        compiled(lambda x: function(x))(x)
    assert programs() == before
