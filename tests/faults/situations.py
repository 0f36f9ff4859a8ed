"""Programs about exceptions in backward that may end their process, and so run in one of their own.

``python -m tests.faults.situations NAMES`` runs some, one after the other, and prints nothing if all is well.
"""

from __future__ import annotations

import _thread
import functools
import operator
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import isthmus
from isthmus import _upstream
from isthmus._device.torch_glue import registration
from tests.faults.places import Several, describe, divide, leaf

BOTH = (True, False)


def training(
    device: str, hook: Callable[[torch.Tensor], Any]
) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """Return a function that makes a loss, and the tensor whose gradient passes the hook."""
    x = leaf(device)
    x.register_hook(hook)
    return lambda: (x * x).sin().exp().sum(), x


def caught(run: Callable[[], Any]) -> BaseException | None:
    try:
        run()
    except BaseException as error:
        return error
    return None


def expected() -> list[list[float]]:
    loss, x = training("cpu", lambda grad: None)
    loss().backward()
    assert x.grad is not None
    return x.grad.tolist()


def check_works(device: str = "jax") -> None:
    loss, x = training(device, lambda grad: None)
    loss().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad.cpu(), torch.tensor(expected()), rtol=1e-5)


def in_four_threads(work: Callable[[int], None]) -> None:
    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def threads() -> None:
    """Four threads run passes at once, and every other one fails: each thread gets its own exceptions."""
    check_works()
    right, wrong = torch.tensor(expected()), []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for turn in range(50):
            mine = Several(turn, f"thread {number}", flag=True) if (turn + number) % 2 else None
            kind = KeyboardInterrupt if turn % 10 == 9 else None

            def hook(grad: torch.Tensor, mine: Any = mine, kind: Any = kind) -> None:
                time.sleep(random.random() / 2000)
                if mine is not None:
                    raise mine if kind is None else kind() from mine

            loss, x = training("jax", hook)
            with torch.autograd.set_multithreading_enabled(turn % 4 != 0):
                error = caught(lambda loss=loss: loss().backward())
            if mine is None:
                good = error is None and x.grad is not None and torch.allclose(x.grad.cpu(), right, rtol=1e-5)
            else:
                good = x.grad is None and (error is mine if kind is None else error.__cause__ is mine)
            if not good:
                wrong.append((number, turn, mine, error))

    in_four_threads(work)
    assert not wrong, wrong[:5]
    check_works()


def signals_in_hooks() -> None:
    """Ctrl-C while a hook runs: the pass, or the hook, ends in KeyboardInterrupt; so it is with other handlers."""
    for own in BOTH:
        for device in ("cpu", "jax"):
            loss, _ = training(device, lambda grad: signal.raise_signal(signal.SIGINT))
            with torch.autograd.set_multithreading_enabled(own):
                error = caught(lambda loss=loss: loss().backward())
            assert type(error) is KeyboardInterrupt, (own, device, error)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            check_works(device)

    def handler(number: int, frame: FrameType | None) -> None:
        raise Several(number, "from a handler", flag=True)

    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, handler)
        for own in BOTH:
            loss, _ = training("jax", lambda grad, number=number: signal.raise_signal(number))
            with torch.autograd.set_multithreading_enabled(own):
                error = caught(lambda loss=loss: (loss().backward(), [None for _ in range(1000)]))
            assert isinstance(error, Several), error
            assert signal.getsignal(number) is handler

    def replace(grad: torch.Tensor) -> None:
        signal.signal(signal.SIGINT, handler)  # stays there

    loss, _ = training("jax", replace)
    with torch.autograd.set_multithreading_enabled(False):
        loss().backward()
    assert signal.getsignal(signal.SIGINT) is handler


def interrupted_questions() -> None:
    """Ctrl-C just before torch asks for the device's type, as it does for each op of forward: first it is answered."""
    ask = functools.partial(torch._C._acc.DeviceGuard.type_, registration._state["guard"])
    check_works()
    for handler in (signal.default_int_handler, lambda number, frame: divide()):
        signal.signal(signal.SIGINT, handler)
        for _ in range(2):
            answers: list[Any] = []
            # No bytecode of Python's lies between these calls, so the handler cannot run before the second.
            calls = [_thread.interrupt_main, ask, ask]
            error = caught(lambda answers=answers, calls=calls: answers.extend(map(operator.call, calls)))
            kind = KeyboardInterrupt if handler is signal.default_int_handler else ZeroDivisionError
            assert type(error) is kind, error
            assert answers == [None, ask(), ask()], answers
            check_works()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted_answers() -> None:
    """Ctrl-C after torch has fetched what answers, where pybind11 lets Python handle signals: C++ gets its answer."""
    from isthmus._device.torch_glue import engine_errors

    guard = registration._state["guard"]
    check_works()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    fetch = functools.partial(getattr, guard, "type_")
    answer = fetch()
    device = answer()
    for _ in range(2):
        answers: list[Any] = []
        # ``str`` handles signals. No bytecode of Python's lies between these calls.
        calls = [fetch, _thread.interrupt_main, functools.partial(str, "type_"), answer]
        error = caught(lambda answers=answers, calls=calls: answers.extend(map(operator.call, calls)))
        assert type(error) is KeyboardInterrupt, error
        assert answers == [answer, None, "type_", device], answers
        check_works()
    # Python's own handler, as Jupyter puts it back for each cell, is ours again after a pass.
    signal.signal(signal.SIGINT, engine_errors.interrupts.default)
    check_works()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # An answer that nobody calls for does not put Ctrl-C off for ever.
    fetch()
    assert caught(lambda: signal.raise_signal(signal.SIGINT)) is None
    assert type(caught(lambda: signal.raise_signal(signal.SIGINT))) is KeyboardInterrupt
    check_works()


def storm(seconds: float = 1.0) -> None:
    """Signals at any moment of a pass, with and without exceptions of hooks: each ends in one or the other."""
    inside = done = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal inside
        if inside:
            inside = False
            raise KeyboardInterrupt

    def fire() -> None:
        while not done:
            time.sleep(random.random() / 500)
            os.kill(os.getpid(), signal.SIGINT)

    def hook(grad: torch.Tensor) -> None:
        if failing:
            raise Several(1, "hook", flag=True)

    signal.signal(signal.SIGINT, handler)
    counts: dict[Any, int] = {}
    failing = False
    check_works()  # compiles everything
    sender = threading.Thread(target=fire)
    sender.start()
    for own in BOTH:
        for failing in BOTH:
            with torch.autograd.set_multithreading_enabled(own):
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    made, _ = training("jax", hook)
                    loss = made()  # forward is not quite safe: docs/faults.md
                    try:
                        inside = True
                        loss.backward()
                        inside = False
                    except BaseException as error:
                        inside = False
                        key = (own, failing, type(error).__name__)
                        counts[key] = counts.get(key, 0) + 1
    done = True
    sender.join()
    names = {name for _, _, name in counts}
    assert names == {"Several", "KeyboardInterrupt"}, counts
    assert all(counts.get((own, failing, "KeyboardInterrupt"), 0) for own in BOTH for failing in BOTH), counts
    check_works()


def tracing() -> None:
    """A debugger that steps through a hook when it raises is called at the entry of every function after that."""
    for own in BOTH:
        for watch in (sys.settrace, sys.setprofile):

            def hook(grad: torch.Tensor, watch: Any = watch) -> None:
                def tracer(frame: FrameType, event: str, arg: Any) -> Any:
                    len(event)  # a call in C fails while an error is pending
                    return tracer

                watch(tracer)
                divide()

            loss, _ = training("jax", hook)
            with torch.autograd.set_multithreading_enabled(own):
                error = caught(lambda loss=loss: loss().backward())
            sys.settrace(None)
            sys.setprofile(None)
            assert type(error) is ZeroDivisionError, error
    check_works()


def handling() -> None:
    """Where backward is called while another exception is handled, that one is the context, as on the CPU."""
    found = []
    for device in ("cpu", "jax"):
        loss, _ = training(device, lambda grad: divide())
        try:
            raise KeyError("being handled")
        except KeyError:
            error = caught(lambda loss=loss: loss().backward())
        found.append(describe(error))
    assert found[0] == found[1], found
    assert found[0][4][0] == "KeyError"


def modes() -> None:
    """Lazy mode, torch.compile and isthmus.jit: the exception arrives, and the next step is right."""
    right = torch.tensor(expected())
    armed = True
    mine = Several(1, "mine", flag=True)

    def hook(grad: torch.Tensor) -> None:
        if armed:
            raise mine

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x * x).sin().exp().sum()
        loss.backward()
        return loss

    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x * x).sin().exp().sum()

    compiled = torch.compile(forward, backend="isthmus")
    with_break = torch.compile(step, backend="isthmus")

    def in_lazy(x: torch.Tensor) -> None:
        with isthmus.lazy():
            step(x)

    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "lazy": in_lazy,
        "compiled": lambda x: compiled(x).backward(),
        "compiled with backward": with_break,
        # A new one each: what it has recorded runs without the hook's Python.
        "jit": lambda x: isthmus.jit(step)(x),
    }
    for name, run in ways.items():
        for own in BOTH:
            armed = True
            x = leaf("jax")
            x.register_hook(hook)
            with torch.autograd.set_multithreading_enabled(own):
                error = caught(lambda run=run, x=x: run(x))
                assert error is mine, (name, own, error)
                armed = False
                x.grad = None
                run(x)
            assert x.grad is not None
            assert torch.allclose(x.grad.cpu(), right, rtol=1e-5), (name, own)

    # In the backward of a compiled graph itself.
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise mine

    for own in BOTH:
        with torch.autograd.set_multithreading_enabled(own):
            x = leaf("jax")
            error = caught(lambda x=x: Failing.apply(compiled(x)).backward())
            assert error is mine, error
    check_works()


def switched_off() -> None:
    """A torch whose engine cannot be replaced: the process goes on, the exception is printed, and the doctor knows."""
    from isthmus._device.torch_glue import patches

    replace = patches.replace

    def changed(owner: str, name: str, make: Any) -> None:
        if name == "_execution_engine":
            raise AttributeError("type object 'Variable' has no attribute '_execution_engine'")
        replace(owner, name, make)

    patches.replace = changed
    printed = []
    sys.unraisablehook = lambda unraisable: printed.append(unraisable.exc_value)
    loss, _ = training("jax", lambda grad: divide())
    error = caught(lambda: loss().backward())
    assert type(error) is SystemError, error
    assert [type(each) for each in printed] == [ZeroDivisionError]
    assert "_device.torch_glue.engine_errors._take_over" in _upstream.switched_off
    check_works()


def without_carrying() -> None:
    """A torch that cannot take back what it carries along (2.11): exceptions arrive all the same."""
    from isthmus._device.torch_glue import private

    def changed(key: str, value: Any) -> None:
        raise AttributeError("module 'torch._C' has no attribute '_remove_obj_from_tls'")

    private.carry = changed
    check_works()
    assert "_device.torch_glue.engine_errors.owners" in _upstream.switched_off
    for own in BOTH * 3:
        mine = Several(3, "a hook's", flag=own)
        loss, _ = training("jax", lambda grad, mine=mine: describe_and_raise(mine))
        with torch.autograd.set_multithreading_enabled(own):
            assert caught(lambda loss=loss: loss().backward()) is mine
        check_works()
    # A pass inside a pass: the inner one's error is caught by the hook, and the outer one goes on or fails by its own.
    for last in (None, Several(4, "the outer pass's", flag=True)):
        inner, _ = training("jax", lambda grad: divide())
        seen: list[Any] = []

        def hook(grad: torch.Tensor, last: Any = last, inner: Any = inner, seen: list[Any] = seen) -> None:
            with torch.enable_grad():
                seen.append(type(caught(lambda: inner().backward())))
            if last is not None:
                raise last

        loss, x = training("jax", hook)
        assert caught(lambda loss=loss: loss().backward()) is last
        assert seen == [ZeroDivisionError], seen
        assert (x.grad is None) == (last is not None)
    one_at_a_time = threading.Lock()
    wrong: list[Any] = []

    def work(number: int) -> None:
        for turn in range(20):
            mine = Several(turn, f"thread {number}", flag=True)
            fails = one_at_a_time if turn % 2 else None

            def hook(grad: torch.Tensor, mine: Any = mine, fails: Any = fails) -> None:
                if fails is not None:
                    raise mine

            loss, _ = training("jax", hook)
            if fails is None:
                error, want = caught(lambda loss=loss: loss().backward()), None
            else:
                with fails:
                    error, want = caught(lambda loss=loss: loss().backward()), mine
            if error is not want:
                wrong.append((number, turn, error))

    in_four_threads(work)
    assert not wrong, wrong[:5]
    check_works()


def describe_and_raise(error: BaseException) -> None:
    """Raise an error from one more frame."""
    raise error


if __name__ == "__main__":
    # A shell's background jobs, and so what they start, begin with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in sys.argv[1:]:
        globals()[name]()
