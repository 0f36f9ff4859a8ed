"""Threads: writes are not lost, readers see whole tensors, and modes and traces do not mix."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import isthmus
from isthmus._device.core import donation, mode
from isthmus._lazy import node_builder
from isthmus._runtime import counters
from tests.faults.training import Training, differences, same
from tests.interpreters import forked_early

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(
        not getattr(sys, "_is_gil_enabled", lambda: True)(),
        reason="this Python runs without its global lock, where docs/faults.md promises nothing",
    ),
]


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Call functions in threads of their own, begun together; return what they return, or raise what one raised."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(at: int) -> None:
        try:
            start.wait()
            results[at] = functions[at]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
    return results


@pytest.fixture(autouse=True)
def switching_often() -> Any:
    """Let Python switch between threads a hundred times as often as it does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def test_writes_to_views_of_one_storage_are_not_lost() -> None:
    base = torch.zeros(4, 3, device="jax")

    def write(row: int) -> None:
        for _ in range(150):
            base[row].add_(1)

    at_once(*[lambda row=row: write(row) for row in range(4)])
    assert base.tolist() == [[150.0] * 3] * 4


def test_writes_to_one_element_are_not_lost() -> None:
    total = torch.zeros((), device="jax")
    tensors = [torch.zeros(5, device="jax") for _ in range(3)]

    def write() -> None:
        for _ in range(60):
            total.add_(1)
            torch._foreach_add_(tensors, 1.0)

    at_once(write, write, write)
    assert total.item() == 180
    assert [t.tolist() for t in tensors] == [[180.0] * 5] * 3


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_readers_beside_a_training_thread(mode: str) -> None:
    training = Training(mode)
    training.run(2)
    done = threading.Event()

    def train() -> None:
        try:
            training.run(25)
        finally:
            done.set()

    def read() -> int:
        count = 0
        while not done.is_set():
            values = [p.detach().sum().item() for p in training.model.parameters()]
            assert all(v == v for v in values)
            count += 1
        return count

    _, reads, more = at_once(train, read, read)
    assert reads > 0
    assert more > 0
    undisturbed = Training(mode)
    undisturbed.run(27)
    assert same(training.state(), undisturbed.state()), differences(training.state(), undisturbed.state())


def test_a_mode_belongs_to_its_thread() -> None:
    inside, outside = threading.Event(), threading.Event()

    def record() -> str:
        with isthmus.lazy():
            inside.set()
            assert outside.wait(60)
            return isthmus.mode()

    def run() -> tuple[str, float]:
        assert inside.wait(60)
        x = torch.ones(3, device="jax") * 2
        held = type(x.untyped_storage()._buffer.held).__name__  # type: ignore[attr-defined]
        assert held != "Node"
        outside.set()
        return isthmus.mode(), x.sum().item()

    assert at_once(record, run) == ["lazy", ("eager", 6.0)]
    assert isthmus.mode() == "eager"


def test_the_environments_mode_is_that_of_every_thread() -> None:
    code = """
import threading, torch, isthmus
modes = [isthmus.mode()]
thread = threading.Thread(target=lambda: modes.append(isthmus.mode()))
thread.start(); thread.join()
assert modes == ["lazy", "lazy"], modes
w = torch.ones(3, device="jax", requires_grad=True)
(w * w).sum().backward()
assert w.grad.tolist() == [2.0, 2.0, 2.0]
"""
    env = {**os.environ, "ISTHMUS_MODE": "lazy"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env=env)


def test_backward_is_recorded_with_the_rest_and_the_switch_is_put_back() -> None:
    w = torch.ones(3, device="jax", requires_grad=True)
    before = torch.autograd.grad_mode.set_multithreading_enabled(True)
    with isthmus.lazy():
        (w * w).sum().backward()
        assert type(w.grad.untyped_storage()._buffer.held).__name__ == "Node"  # type: ignore[union-attr]
    assert before.prev is torch._C._is_multithreading_enabled()
    assert w.grad is not None
    assert w.grad.tolist() == [2.0, 2.0, 2.0]


def test_what_one_thread_recorded_others_can_use() -> None:
    made, used = threading.Event(), threading.Event()
    shared: list[torch.Tensor] = []

    def record() -> float:
        with isthmus.lazy():
            x = torch.arange(4.0, device="jax") + 1
            shared.append(x)
            y = x * 10
            made.set()
            assert used.wait(120)
            y.add_(x)
            return y.sum().item()

    def use(lazy: bool) -> list[float]:
        assert made.wait(60)
        (x,) = shared
        try:
            if not lazy:
                return (x * 2).tolist() + x.tolist()
            with isthmus.lazy():
                own = torch.ones(4, device="jax") * 3
                return (own + x).tolist()
        finally:
            if lazy:
                used.set()

    total, eager, lazy = at_once(record, lambda: use(False), lambda: use(True))
    assert eager == [2.0, 4.0, 6.0, 8.0, 1.0, 2.0, 3.0, 4.0]
    assert lazy == [4.0, 5.0, 6.0, 7.0]
    assert total == 110.0


WRITES: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.add_(1),
    lambda x: x[1:].add_(1),
    lambda x: torch.add(x, 1, out=x),
    lambda x: torch._foreach_add_([x], 1),
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("write", WRITES, ids=["whole", "through a view", "out", "foreach"])
def test_a_write_between_the_read_and_the_write_of_a_recorded_op_is_not_lost(
    write: Callable[[torch.Tensor], Any], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, same = torch.ones(3, device="jax"), torch.ones(3)

    def double(x: torch.Tensor) -> None:
        x.mul_(2)

    theirs = torch.compile(double, backend="isthmus") if compiled else double
    theirs(torch.ones(3, device="jax"))
    threaded, ran = donation.threaded, []

    def after_the_read() -> int:
        # The recorded op asks this once it has read its inputs.
        if not ran:
            ran.append(True)
            at_once(lambda: theirs(x))
        return threaded() or 1

    with isthmus.lazy():
        write(torch.ones(3, device="jax"))
        monkeypatch.setattr(node_builder.donation, "threaded", after_the_read)
        write(x)
        assert ran
        monkeypatch.undo()
        write(same.mul_(2))
        assert x.tolist() == same.tolist()


def test_threads_in_lazy_mode_share_their_programs() -> None:
    alone = Training("lazy")
    alone.run(3)
    runs = [Training("lazy") for _ in range(4)]
    before = counters.counts["compilations"]
    at_once(*[lambda run=run: run.run(3) for run in runs])
    assert counters.counts["compilations"] == before
    assert all(same(run.state(), alone.state()) for run in runs)


def test_recording_a_function_leaves_other_threads_optimizers_alone() -> None:
    recording, stepped = threading.Event(), threading.Event()
    weight = torch.nn.Parameter(torch.ones(3, device="jax"))
    state = torch.zeros(3, device="jax")

    @isthmus.jit
    def function() -> None:
        recording.set()
        assert stepped.wait(60)
        state.add_(1)

    def train() -> None:
        assert recording.wait(60)
        try:
            optimizer = torch.optim.Adam([weight], lr=0.1)  # its step count is on the CPU
            weight.grad = torch.ones(3, device="jax")
            optimizer.step()
        finally:
            stepped.set()

    at_once(function, train)
    assert state.tolist() == [1.0, 1.0, 1.0]
    assert weight.max().item() < 1


def test_the_first_compilations_of_several_threads() -> None:
    code = """
import threading, torch
errors = []
def compile(n):
    try:
        compiled = torch.compile(lambda x: x * n + 1, backend="isthmus")
        assert compiled(torch.ones(2, device="jax")).tolist() == [n + 1.0] * 2
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=compile, args=(n,)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
"""
    ran = forked_early(code)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_eight_threads_with_models_of_their_own_in_all_modes() -> None:
    modes = ["eager", "lazy", "jit", "compile"] * 2
    alone = {mode: Training(mode) for mode in modes}
    for training in alone.values():
        training.run(12)
    for _ in range(3):
        runs = [Training(mode) for mode in modes]
        at_once(*[lambda run=run: run.run(12) for run in runs])
        for run in runs:
            assert same(run.state(), alone[run.mode].state()), run.mode


def test_a_tensor_is_read_although_its_thread_has_recorded_the_next_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.zeros(3, device="jax")
    recorded, go = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    run = mode.current.materialise

    def write() -> None:
        with isthmus.lazy():
            for n in range(2):
                x.add_(1)
                recorded[n].set()
                assert go[n].wait(60)

    def materialise(*args: Any) -> Any:
        held = run(*args)
        go[0].set()
        assert recorded[1].wait(60)
        return held

    def read() -> list[float]:
        assert recorded[0].wait(60)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(mode.current, "materialise", materialise)
                return x.tolist()
        finally:
            go[0].set()
            go[1].set()

    assert at_once(write, read)[1] == [1.0, 1.0, 1.0]
    assert x.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("lengths", [[3, 3], [3, 5, 7, 9]], ids=["exact", "range"])
def test_a_program_does_not_wait_for_a_thread_that_waits_for_it(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread records a write to what the other one's program reads, and reads what that program writes."""
    weight, state = torch.zeros(4, device="jax"), torch.zeros(2, device="jax")
    go, counted = threading.Event(), donation.threaded

    @torch.compile(backend="isthmus")
    def step(state: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.add_(x.sum() + weight.sum() * 0)
        return state * 1

    def run(n: int) -> None:
        step(state, weight, torch.ones(n, device="jax"))

    def run_last() -> None:
        mine = threading.get_ident()

        def threaded() -> int:
            # ``donation.lock`` is held, and what was read before it was taken is recorded anew.
            if threading.get_ident() == mine and not go.is_set():
                go.set()
                time.sleep(0.3)
            return counted()

        with monkeypatch.context() as patch:
            patch.setattr(donation, "threaded", threaded)
            run(lengths[-1])

    def record() -> None:
        with isthmus.lazy():
            assert go.wait(60)
            weight.add_(1)
            weight.add_(state.sum() * 0)

    for n in lengths[:-1]:
        run(n)
    at_once(run_last, record)
    assert state.tolist() == [sum(lengths)] * 2
    assert weight.tolist() == [1.0] * 4


def test_an_error_names_the_size_of_its_own_thread() -> None:
    """One program serves many sizes, and threads run it at once."""

    def fail(first: int) -> None:
        for n in range(first, first + 40):
            with isthmus.lazy():
                x = torch.arange(float(n)).to("jax")[torch.tensor([n]).to("jax")]
                with pytest.raises(IndexError, match=f"size {n} "):
                    x.tolist()

    for n in (5, 9):
        fail(n)
    at_once(*[lambda first=first: fail(first) for first in (10, 30, 50)])


def test_the_count_of_references_is_measured() -> None:
    """An array that a buffer and a list hold is owned, one that a third holds is not."""
    x = torch.arange(5.0, device="jax") + 1
    buffer = x.untyped_storage()._buffer  # type: ignore[attr-defined]
    inputs = [buffer.held]
    assert donation.is_owned(inputs, [0])
    third = inputs[0]
    assert not donation.is_owned(inputs, [0])
    del third
    held = donation.Rewriting(inputs, 0)
    buffer.held = held
    assert donation.is_owned(inputs, [0], hidden=True)
    assert donation.settled(buffer) is inputs[0]
    assert buffer.held is inputs[0]  # what an interrupt left behind is gone


def test_a_buffer_that_an_interrupt_left_hidden_can_be_read_and_written() -> None:
    x = torch.arange(3.0, device="jax") + 1
    buffer = x.untyped_storage()._buffer  # type: ignore[attr-defined]
    buffer.held = donation.Rewriting([buffer.held], 0)
    assert (x * 2).tolist() == [2, 4, 6]
    buffer.held = donation.Rewriting([buffer.held], 0)
    assert x.add_(1).tolist() == [2, 3, 4]


def test_a_value_check_that_fails_is_made_once_and_leaves_the_target() -> None:
    x, index = torch.zeros(3, device="jax"), torch.tensor([7]).to("jax")
    for threaded in (False, True):
        with pytest.raises(IndexError) as caught:
            at_once(lambda: x.index_fill_(0, index, 1.0)) if threaded else x.index_fill_(0, index, 1.0)
        assert caught.value.__context__ is None
        assert x.tolist() == [0, 0, 0]


@pytest.mark.parametrize("fails", [1, 15])
def test_an_interrupt_is_not_lost_while_results_are_bound(fails: int) -> None:
    """The step is done, and the interrupt goes on in place of the error that the caller has at hand."""
    tries: list[int] = []

    def step() -> None:
        tries.append(1)
        if len(tries) <= fails:
            raise KeyboardInterrupt if len(tries) == 1 else ValueError

    with pytest.raises(KeyboardInterrupt):
        donation.finish(step)
    assert len(tries) == fails + 1


def test_a_step_that_always_fails_raises_its_error() -> None:
    tries: list[int] = []

    def commit(outputs: Any) -> None:
        tries.append(outputs)
        raise ValueError("a mistake in a commit")

    with pytest.raises(ValueError, match="a mistake in a commit"):
        donation.run(lambda x: x + 1, [1], commit)
    assert tries == [2] * 17  # once by itself, and as often as it could have been interrupted
