"""Faults in a training step: afterwards every tensor can be read, is whole, and training goes on as if undisturbed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import isthmus
from isthmus._device.core import donation
from isthmus._lazy import programs
from tests.conftest import drop_programs
from tests.faults.injector import Injector, internal, out_of_memory, watching_runs
from tests.faults.training import MODES, Training, differences, on_one_thread, same

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("fresh_dynamo", "falling_back"),
]
# Modes whose step is one call of ours, so that it happens as a whole or not at all. A step in lazy mode can be
# interrupted while it is recorded, as it can be in eager mode.
WHOLE = ("jit", "train_step")
_WARM = 2


@pytest.fixture
def falling_back(strict_fallback: None) -> None:
    isthmus.config.fallback = "cpu"


@pytest.fixture
def runs() -> Iterator[list[Injector]]:
    """What is asked before each run of a program; programs of other tests are forgotten, as they ask nobody."""
    drop_programs()
    with watching_runs() as injectors:
        yield injectors
    drop_programs()


class Undisturbed:
    """The states of a run that nothing disturbs, step by step."""

    def __init__(self, mode: str) -> None:
        self.training = Training(mode)
        self.states: list[Any] = []

    def after(self, steps: int) -> Any:
        while self.training.done < steps:
            self.training.step()
            self.states.append(self.training.state())
        return self.states[steps - 1]


def disturb(training: Training, undisturbed: Undisturbed, injector: Injector) -> bool:
    """Train one step with a fault, check what it left, and return whether the fault struck."""
    before = training.state()
    try:
        with on_one_thread(), injector():
            training.step()
    except BaseException as error:
        if not injector.raised:
            raise
        check_after_fault(training, undisturbed, before, injector, error)
    return injector.raised > 0


def check_after_fault(
    training: Training, undisturbed: Undisturbed, before: Any, injector: Injector, error: BaseException
) -> None:
    state = training.state()
    where = f"{injector.kind} {injector.at}: {error!r}"
    assert all(bool(value.isfinite().all()) for value in state.values()), where
    if training.mode in WHOLE:
        happened = not same(state, before)
        if happened:
            training.done += 1
            wanted = undisturbed.after(training.done)
            assert same(state, wanted), f"torn by {where}: {differences(state, wanted)}"
        return
    # The step is many programs: what the fault left is trained on, here and on the CPU.
    twin = Training("eager", "cpu")
    twin.take_over(training)
    training.run(3)
    twin.run(3)
    assert same(training.state(), twin.state()), f"{where}: {differences(training.state(), twin.state())}"
    training.take_over(undisturbed.training)


def places(count: int, wanted: int) -> list[int]:
    """Return so many places spread over the events of a step, the first and last included."""
    return sorted({round(n * (count - 1) / max(wanted - 1, 1)) for n in range(wanted)})


def campaign(mode: str, kind: str, error: Any, wanted: int, times: int = 1, runs: Any = None) -> int:
    """Disturb step after step, each at another place, and then train ten more; return how many faults struck."""
    undisturbed, training = Undisturbed(mode), Training(mode)
    undisturbed.after(_WARM)
    training.run(_WARM)
    counting = Injector(kind, error, None)
    if runs is not None:
        runs.append(counting)
    with on_one_thread(), counting():
        training.step()
    assert counting.count > 0, "nothing to disturb"
    struck = 0
    for at in places(counting.count, wanted):
        if mode not in WHOLE:
            undisturbed.after(training.done)
        injector = Injector(kind, error, at, times)
        if runs is not None:
            runs[:] = [injector]
        struck += disturb(training, undisturbed, injector)
    if runs is not None:
        runs.clear()
    # Another thread would wait for ever.
    assert "unlocked" in repr(donation.lock), donation.lock
    training.run(10)
    wanted_state = undisturbed.after(training.done)
    assert same(training.state(), wanted_state), differences(training.state(), wanted_state)
    return struck


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_at_some_lines(mode: str) -> None:
    # The first and the last line of a step and six between: each place costs a step and, in modes whose step is many
    # programs, three more here and on the CPU. The slow test below visits hundreds.
    assert campaign(mode, "line", KeyboardInterrupt, 8) >= 6


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_at_every_line(mode: str) -> None:
    assert campaign(mode, "line", KeyboardInterrupt, 600) >= 300


# One sort of failure is enough for `make test` where each takes long.
@pytest.mark.parametrize(
    ("mode", "error"),
    [
        pytest.param(
            mode, error, marks=[pytest.mark.slow] * (mode == "compile" and error is not out_of_memory)
        )
        for mode in MODES
        for error in (internal, out_of_memory, KeyboardInterrupt)
    ],
)
def test_a_run_that_fails(mode: str, error: Any, runs: list[Injector]) -> None:
    # Twice, since a run that finds no memory is tried again.
    assert campaign(mode, "run", error, 4, times=2, runs=runs) >= 1


def test_a_run_that_finds_no_memory_once_goes_on(runs: list[Injector]) -> None:
    for mode in MODES:
        undisturbed, training = Undisturbed(mode), Training(mode)
        training.run(_WARM)
        injector = Injector("run", out_of_memory, 0)
        runs[:] = [injector]
        with injector():
            training.step()
        assert injector.raised == 1
        assert same(training.state(), undisturbed.after(_WARM + 1)), mode


def test_no_memory_is_torchs_error_and_says_what_holds_it(runs: list[Injector]) -> None:
    held = torch.zeros(1234, 17, device="jax") + 1
    training = Training("jit")
    training.run(_WARM)
    before = training.state()
    injector = Injector("run", out_of_memory, 0, times=2)
    runs[:] = [injector]
    with injector(), pytest.raises(torch.OutOfMemoryError, match=r"float32\[1234, 17\]") as caught:
        training.step()
    assert "smaller batch" in str(caught.value)
    assert same(training.state(), before)
    injector.count = 0
    with injector(), pytest.raises(torch.OutOfMemoryError):
        _ = held * 3
    training.run(2)


@pytest.mark.parametrize("mode", ["lazy", "jit", "train_step"])
@pytest.mark.parametrize("error", [internal, out_of_memory, KeyboardInterrupt])
def test_a_first_step_that_cannot_be_compiled(mode: str, error: Any) -> None:
    """A model and its optimizer's state can be read and trained whatever became of the first step."""
    programs._families.clear()
    training = Training(mode)
    before = training.state()
    injector = Injector("compile", error, 0, times=10**6)
    with on_one_thread(), injector(), pytest.raises(BaseException) as caught:  # noqa: PT011
        training.step()
    assert injector.raised, caught.value
    state = training.state()
    if mode == "lazy" and error is KeyboardInterrupt:  # what was recorded is run by the next read
        training.done += 1
        assert same(state, Undisturbed(mode).after(1))
    else:
        assert not differences(before, state)
    assert all(bool(value.isfinite().all()) for value in state.values())
    training.run(3)
    assert same(training.state(), Undisturbed(mode).after(training.done))


def test_ops_that_fail_to_compile_once() -> None:
    """They run on the CPU meanwhile, and on the device the next time."""
    drop_programs()
    training, undisturbed = Training("eager"), Undisturbed("eager")
    injector = Injector("compile", internal, 3, times=4)
    with on_one_thread(), injector():
        training.step()
    assert injector.raised == 4
    training.run(1)
    isthmus.config.fallback = "error"
    training.run(1)
    assert same(training.state(), undisturbed.after(3)), differences(training.state(), undisturbed.after(3))


def test_an_op_that_fails_to_compile_is_tried_again_less_and_less_often() -> None:
    x = torch.arange(23.0, device="jax")
    injector = Injector("compile", internal, 0, times=10**6)
    with injector():
        for _ in range(40):
            assert (x * 3)[1].item() == 3
    tries = injector.raised
    assert 4 <= tries <= 40
    for _ in range(40):
        _ = x * 3
    isthmus.config.fallback = "error"
    assert (x * 3).sum().item() == 23 * 22 / 2 * 3


def test_a_compiled_function_that_cannot_be_compiled_says_why_and_can_be_called_again() -> None:
    training = Training("compile")
    injector = Injector("compile", internal, 0, times=10**6)
    with on_one_thread(), injector(), pytest.raises(Exception, match="INTERNAL: the compiler died"):
        training.step()
    twin = Training("eager", "cpu")
    twin.take_over(training)
    training.run(2)
    twin.run(2)
    assert same(training.state(), twin.state()), differences(training.state(), twin.state())


@pytest.mark.parametrize("mode", MODES)
def test_a_transfer_that_fails(mode: str) -> None:
    training, undisturbed = Training(mode), Undisturbed(mode)
    training.run(_WARM)
    for at in range(2):
        injector = Injector("transfer", internal, at)
        with pytest.raises(Exception, match="INTERNAL"), injector():
            training.step()
        assert injector.raised == 1
    training.run(2)
    assert same(training.state(), undisturbed.after(_WARM + 2))
