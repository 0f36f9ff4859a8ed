"""Where Python code runs during backward, and exceptions to raise there; ``python -m tests.faults.places`` runs all.

Each place is a function of a device and a function ``visit`` that it calls during backward. It returns a function that
runs a pass, and the tensors whose gradients are looked at. ``record`` runs one with an exception and twice without, and
describes what happened in a way that must be the same on the CPU and on "jax".
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Visit = Callable[..., Any]
Place = Callable[[str, Visit], tuple[Callable[[], Any], list[torch.Tensor]]]


class Several(LookupError):
    """An exception that cannot be made again from its ``args``."""

    def __init__(self, number: int, word: str, *, flag: bool) -> None:
        super().__init__(f"{word} {number}")
        self.flag = flag


def divide() -> None:
    1 / 0  # noqa: B018


def with_cause() -> None:
    raise RuntimeError("it was caused") from KeyError("cause")


def with_context() -> None:
    try:
        divide()
    except ZeroDivisionError:
        raise OverflowError("in a handler") from None


def warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.warn("made an error", UserWarning, stacklevel=1)


def throw(make: Callable[[], BaseException]) -> Callable[[], None]:
    def thrower() -> None:
        raise make()

    return thrower


EXCEPTIONS: dict[str, Callable[[], None]] = {
    "ZeroDivisionError": divide,
    "several arguments": throw(lambda: Several(3, "odd", flag=True)),
    "KeyboardInterrupt": throw(KeyboardInterrupt),
    "SystemExit": throw(lambda: SystemExit(3)),
    "StopIteration": throw(lambda: StopIteration(5)),
    "GeneratorExit": throw(GeneratorExit),
    "MemoryError": throw(MemoryError),
    "out of memory": throw(lambda: torch.OutOfMemoryError("no room")),
    "SystemError": throw(lambda: SystemError("my own")),
    "a cause": with_cause,
    "a context": with_context,
    "a warning": warn,
}


def leaf(device: str) -> torch.Tensor:
    return (torch.arange(6.0).reshape(2, 3) / 4 + 1).to(device).requires_grad_()


def tensor_hook(device: str, visit: Visit) -> Any:
    x, y = leaf(device), leaf(device)
    x.register_hook(visit)
    return lambda: ((x * y).sin() * y).sum().backward(), [x, y]


def inner_tensor_hook(device: str, visit: Visit) -> Any:
    x, y = leaf(device), leaf(device)

    def run() -> None:
        middle = x * 2
        middle.register_hook(visit)
        (middle.sin() + y * y).sum().backward()

    return run, [x, y]


def post_accumulate_hook(device: str, visit: Visit) -> Any:
    x, y = leaf(device), leaf(device)
    x.register_post_accumulate_grad_hook(visit)
    return lambda: (x * y).sin().sum().backward(), [x, y]


def multi_grad_hook(device: str, visit: Visit) -> Any:
    x, y = leaf(device), leaf(device)
    torch.autograd.graph.register_multi_grad_hook((x, y), visit)
    return lambda: (x * y).sin().sum().backward(), [x, y]


def linear(device: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel()).reshape(p.shape) / 7 - 0.5)
    return model.to(device)


def module_hook(device: str, visit: Visit) -> Any:
    model, x = linear(device), leaf(device)
    model[0].register_full_backward_hook(visit)
    return lambda: model(x).sum().backward(), [x, *model.parameters()]


def module_pre_hook(device: str, visit: Visit) -> Any:
    model, x = linear(device), leaf(device)
    model[0].register_full_backward_pre_hook(visit)
    return lambda: model(x).sum().backward(), [x, *model.parameters()]


def node_hook(device: str, visit: Visit) -> Any:
    x = leaf(device)

    def run() -> None:
        middle = x * x
        middle.grad_fn.register_hook(visit)
        middle.sin().sum().backward()

    return run, [x]


def node_pre_hook(device: str, visit: Visit) -> Any:
    x = leaf(device)

    def run() -> None:
        middle = x * x
        middle.grad_fn.register_prehook(visit)
        middle.sin().sum().backward()

    return run, [x]


def unpack_hook(device: str, visit: Visit) -> Any:
    x = leaf(device)

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        visit()
        return saved

    def run() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            out = (x * x).sin().sum()
        out.backward()

    return run, [x]


def custom_function(device: str, visit: Visit) -> Any:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            visit()
            return grads[0] * 2

    x = leaf(device)
    return lambda: Double.apply(x * x).sum().backward(), [x]


def recomputed(device: str, visit: Visit, reentrant: bool) -> Any:
    x = leaf(device)

    def run() -> None:
        calls = []

        def block(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) > 1:
                visit()
            return (x * x).sin()

        checkpoint(block, x, use_reentrant=reentrant).sum().backward()

    return run, [x]


def checkpoint_reentrant(device: str, visit: Visit) -> Any:
    return recomputed(device, visit, True)


def checkpoint_not_reentrant(device: str, visit: Visit) -> Any:
    return recomputed(device, visit, False)


def final_callback(device: str, visit: Visit) -> Any:
    x = leaf(device)
    engine = torch.autograd.Variable._execution_engine
    x.register_hook(lambda grad: engine.queue_callback(visit))
    return lambda: (x * x).sin().sum().backward(), [x]


def pass_in_a_pass(device: str, visit: Visit) -> Any:
    x, y = leaf(device), leaf(device)
    y.register_hook(visit)

    def hook(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            (y * y).sin().sum().backward()

    x.register_hook(hook)
    return lambda: (x * x).sin().sum().backward(), [x, y]


def caught_in_a_pass(device: str, visit: Visit) -> Any:
    """An exception of an inner pass that a hook of the outer one handles, before it raises one of its own."""
    x, y = leaf(device), leaf(device)
    y.register_hook(lambda grad: divide())

    def hook(grad: torch.Tensor) -> None:
        with torch.enable_grad(), contextlib.suppress(ZeroDivisionError):
            (y * y).sin().sum().backward()
        visit()

    x.register_hook(hook)
    return lambda: (x * x).sin().sum().backward(), [x, y]


def autograd_grad(device: str, visit: Visit) -> Any:
    x = leaf(device)

    def run() -> Any:
        middle = x * x
        middle.register_hook(visit)
        return torch.autograd.grad(middle.sin().sum(), x)

    return run, [x]


def double_backward(device: str, visit: Visit) -> Any:
    x = leaf(device)

    def run() -> Any:
        (first,) = torch.autograd.grad((x * x).sin().sum(), x, create_graph=True)
        first.register_hook(visit)
        return torch.autograd.grad(first.sum(), x)

    return run, [x]


def func_vjp(device: str, visit: Visit) -> Any:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            visit()
            return grads[0] * 2

    x = leaf(device)

    def run() -> Any:
        torch.func.grad(lambda x: Double.apply(x.detach() * x).sum())(x.detach())
        out, vjp = torch.func.vjp(lambda x: Double.apply(x * x), x.detach())
        return vjp(torch.ones_like(out))

    return run, [x]


PLACES: dict[str, Place] = {
    place.__name__: place
    for place in (
        tensor_hook, inner_tensor_hook, post_accumulate_hook, multi_grad_hook, module_hook, module_pre_hook, node_hook,
        node_pre_hook, unpack_hook, custom_function, checkpoint_reentrant, checkpoint_not_reentrant, final_callback,
        pass_in_a_pass, caught_in_a_pass, autograd_grad, double_backward, func_vjp,
    )
}  # fmt: skip


def values(tensors: list[torch.Tensor]) -> list[Any]:
    """Return the gradients, rounded to what both devices agree to."""
    return [
        None if t.grad is None else [round(v, 4) for v in t.grad.detach().cpu().flatten().tolist()]
        for t in tensors
    ]


class Freed:
    """An object that a hook holds in its frame while it raises."""


def record(place: Place, raise_it: Callable[[], None], device: str) -> dict[str, Any]:
    """Return what an exception in a place comes to, and what the next passes give."""
    raised: list[BaseException] = []
    freed: list[weakref.ref[Freed]] = []
    armed = True

    def visit(*args: Any) -> None:
        if armed:
            held = Freed()
            freed.append(weakref.ref(held))
            try:
                raise_it()
            except BaseException as error:
                raised.append(error)
                raise

    run, tensors = place(device, visit)
    said: dict[str, Any] = {}
    try:
        run()
        said["raised"] = None
    except BaseException as error:
        said["raised"] = describe(error)
        said["same object"] = [error is each for each in raised]
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        said["traceback"] = ["visit" in names, names[-1], "backward" in names or "grad" in names]
    said["visits"] = len(raised)
    said["left"] = values(tensors)
    raised.clear()
    until = time.monotonic() + 10  # a thread of autograd's may still be about to let go of it
    while any(held() is not None for held in freed) and time.monotonic() < until:
        time.sleep(0.001)
    said["freed"] = [held() is None for held in freed]
    armed = False
    for t in tensors:
        t.grad = None
    for _ in range(2):
        found = run()
        if found is not None:
            said["result"] = [[round(v, 4) for v in t.detach().cpu().flatten().tolist()] for t in found]
    said["after"] = values(tensors)
    return said


def describe(error: BaseException | None) -> Any:
    if error is None:
        return None
    related = (error.__cause__, error.__context__)
    return [type(error).__name__, repr(error.args), sorted(vars(error).items()), *map(describe, related)]


def main() -> None:
    """Print a record of every place and exception, on both devices and with both threadings of autograd, as JSON."""
    gc.disable()  # what an exception holds must be freed with it
    for name, place in PLACES.items():
        for what, raise_it in EXCEPTIONS.items():
            for own in (True, False):
                with torch.autograd.set_multithreading_enabled(own):
                    pair = [record(place, raise_it, device) for device in ("cpu", "jax")]
                print(json.dumps([name, what, own, *pair]), flush=True)


if __name__ == "__main__":
    main()
