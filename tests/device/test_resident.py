"""State that stays with its program: it is where it should be, and whoever reads or writes it notices nothing."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isthmus
from isthmus._device.core import resident_state
from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.donation import Resident
from isthmus._device.core.resident_state import Residence
from isthmus._lazy import programs
from isthmus._lazy.replay import Replay
from isthmus.errors import IsthmusError


@pytest.fixture(params=["bundled", pytest.param("whole", marks=pytest.mark.slow)])
def bundles(request: Any, monkeypatch: Any) -> str:
    """Bundle every array, or none."""
    monkeypatch.setattr(resident_state, "_SMALL", {"cpu": 2**14 if request.param == "bundled" else 0})
    monkeypatch.setattr(resident_state, "_FEW", 2)
    programs._families.clear()  # programs of the other kind
    return request.param


class Training:
    """A small model with AdamW: its step by isthmus.jit or torch.compile, and the same on the CPU."""

    def __init__(self, how: str) -> None:
        torch.manual_seed(0)
        # A bias before the norm has no gradient but noise, which Adam makes large.
        self.plain = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.model = copy.deepcopy(self.plain).to("jax")
        self.ordinary = torch.optim.AdamW(self.plain.parameters(), 1e-2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, capturable=how == "jit")
        model, optimizer = self.model, self.optimizer

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        self.step: Any = isthmus.jit(step) if how == "jit" else torch.compile(step, backend="isthmus")
        self.generator = torch.Generator().manual_seed(1)

    def both(self, times: int = 1, batch: int = 6) -> None:
        """Step here and on the CPU, and compare losses."""
        for _ in range(times):
            x = torch.randn(batch, 4, generator=self.generator)
            y = torch.randint(3, (batch,), generator=self.generator)
            found = self.step(x.to("jax"), y.to("jax"))
            loss = F.cross_entropy(self.plain(x), y)
            loss.backward()
            self.ordinary.step()
            self.ordinary.zero_grad()
            torch.testing.assert_close(found.cpu(), loss.detach(), rtol=1e-4, atol=1e-5)

    def compare(self) -> None:
        """Compare everything there is: parameters, statistics, moments, counts."""
        for mine, other in zip(
            self.model.state_dict().values(), self.plain.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(mine.cpu(), other, rtol=1e-4, atol=1e-4)
        for mine, other in zip(self.states(self.optimizer), self.states(self.ordinary), strict=True):
            torch.testing.assert_close(mine.cpu(), other, rtol=1e-4, atol=1e-4)

    @staticmethod
    def states(optimizer: Any) -> list[Tensor]:
        """Return the tensors of an optimizer."""
        return [value for state in optimizer.state.values() for value in state.values()]

    def away(self) -> set[bool]:
        """Return whether the moments are with a program, rather than in their buffers."""
        held = [buffer_of(state["exp_avg"]).held for state in self.optimizer.state.values()]
        return {type(each) is Resident for each in held}


@pytest.fixture(params=["jit", "compile"])
def training(request: Any, bundles: str) -> Training:
    """Return a training whose state has settled."""
    torch._dynamo.reset()
    found = Training(request.param)
    found.both(4)
    assert found.away() == {True}
    return found


def test_state_stays_and_is_right(training: Training) -> None:
    count = isthmus.metrics.counts()["compilations"]
    training.both(6)
    assert training.away() == {True}
    training.compare()
    assert training.away() == {False}
    training.both(2)
    assert training.away() == {True}
    training.compare()
    assert isthmus.metrics.counts()["compilations"] == count


def test_writes_from_outside_are_seen(training: Training) -> None:
    for optimizer in (training.optimizer, training.ordinary):
        with torch.no_grad():
            for group in optimizer.param_groups:
                group["params"][0].mul_(0.5)
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
    training.both(4)
    training.compare()


def test_state_dicts_there_and_back(training: Training) -> None:
    kept = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    other = copy.deepcopy((training.plain.state_dict(), training.ordinary.state_dict()))
    expected, file = copy.deepcopy(other[1]), io.BytesIO()
    torch.save(training.optimizer.state_dict(), file)
    training.both(3)
    training.model.load_state_dict(kept[0])
    training.optimizer.load_state_dict(kept[1])
    training.plain.load_state_dict(other[0])
    training.ordinary.load_state_dict(other[1])
    training.both(3)
    training.compare()
    file.seek(0)
    saved = torch.load(file, map_location="cpu", weights_only=True)
    for mine, theirs in zip(saved["state"].values(), expected["state"].values(), strict=True):
        torch.testing.assert_close(mine["exp_avg"], theirs["exp_avg"], rtol=1e-4, atol=1e-4)


def test_an_array_the_user_holds_stays(training: Training) -> None:
    weight = training.model[0].weight
    array = isthmus.to_jax(weight.detach())
    before = array.tolist()
    training.both(3)
    assert array.tolist() == before != weight.tolist()
    training.compare()


def test_batch_sizes_take_turns(bundles: str) -> None:
    training = Training("jit")
    training.both(3)
    for batch in (6, 5) * 5:
        training.both(batch=batch)
    kept = [training.step.captures, *training.step.ranged.values()]
    captures = [capture for cache in kept for found in cache.values() for capture in found]
    assert len(captures) >= 2
    assert all(not capture.execution.residence().short for capture in captures)
    training.compare()


def test_state_that_is_always_read_is_not_bundled(training: Training, bundles: str) -> None:
    count = isthmus.metrics.counts()["compilations"]
    for _ in range(8):
        training.both()
        training.compare()
    # A program is compiled once more: the step of jit, or those of torch.compile for statistics and for moments.
    more = isthmus.metrics.counts()["compilations"] - count
    assert more in ((1, 2) if bundles == "bundled" else (0,))
    training.both(3)
    assert training.away() == {True}
    training.compare()


def test_another_thread_reads_meanwhile(training: Training) -> None:
    errors: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                assert all(
                    torch.isfinite(value).all().item() for value in training.states(training.optimizer)
                )
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        training.both(20)
    finally:
        done.set()
        thread.join()
    assert not errors
    training.compare()


@pytest.mark.parametrize("how", ["jit", "compile"])
def test_what_nobody_has_is_freed(how: str, bundles: str) -> None:
    torch._dynamo.reset()
    training = Training(how)
    training.both(4)
    shapes = [tuple(p.shape) for p in training.model.parameters()]
    buffers = [buffer_of(state["exp_avg"]) for state in training.optimizer.state.values()]
    assert {type(buffer.held) for buffer in buffers} == {Resident}
    del buffers
    gc.collect()
    before = len(jax.live_arrays())
    if how == "compile":
        del training.model, training.optimizer
        training.step = None
    del training
    gc.collect()
    # At least the parameters and moments that are not in bundles, or the bundles.
    freed = before - len(jax.live_arrays())
    assert freed >= (3 * len(shapes) if bundles == "whole" else len(shapes) if how == "compile" else 1)


def test_two_models_in_one_compiled_function(bundles: str) -> None:
    torch._dynamo.reset()
    trainings = [Training("compile"), Training("compile")]

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = torch.compile(step, backend="isthmus")
    for training in trainings:
        training.step = _bound(compiled, training.model, training.optimizer)
    for _ in range(5):
        for training in trainings:
            training.both()
    for training in trainings:
        training.compare()


def _bound(function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    return lambda *rest: function(*first, *rest)


def test_a_failed_replay_leaves_the_state(bundles: str, monkeypatch: Any) -> None:
    training = Training("jit")
    training.both(4)
    (capture,) = [found for captures in training.step.captures.values() for found in captures][:1]
    assert isinstance(capture, Replay)
    assert capture.execution is not None

    def fails(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(capture.execution.program, "call", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            training.step(torch.ones(6, 4).to("jax"), torch.zeros(6, dtype=torch.long).to("jax"))
    training.both(3)
    training.compare()


def test_a_lost_bundle_says_so() -> None:
    buffers = [buffer_of(torch.full((), float(n), device="jax")) for n in range(3)]
    residence = Residence([], [buffers])

    def fails(*state: Any) -> Any:
        for array in state:
            array.delete()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        residence.run(fails, [], list)
    with pytest.raises(IsthmusError, match="its program failed"):
        _ = buffers[1].value


def test_a_tensor_saved_for_backward_is_known_to_have_changed(training: Training) -> None:
    weight = training.model[3].weight
    product = (weight * weight).sum()
    training.both()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    weight.grad = None


def test_memory_is_given_away_where_dynamo_runs_frames() -> None:
    torch.compile(lambda x: x + 1, backend="isthmus")(torch.ones(2, device="jax"))
    state = torch.arange(3000.0).to("jax") * 1
    step = isthmus.jit(lambda: state.add_(1))
    places = []
    for _ in range(5):
        step()
        places.append(isthmus.to_jax(state).unsafe_buffer_pointer())
    assert len(set(places[1:])) == 1
