"""Whatever a function does, under isthmus.jit it does the same or is refused: scenarios run plainly and under jit.

``EITHER`` may also raise JitError; those in ``SAME`` must agree.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import isthmus
from isthmus.errors import JitError
from tests.interpreters import forked_early

SAME: dict[str, Callable[[Any], Any]] = {}
EITHER: dict[str, Callable[[Any], Any]] = {}


def same(function: Any) -> Any:
    SAME[function.__name__] = function
    return function


def either(function: Any) -> Any:
    EITHER[function.__name__] = function
    return function


def arange(n: int, *shape: int) -> Tensor:
    return torch.arange(float(n)).reshape(shape or (n,)).to("jax")


# ---- 1. values of arguments and captured tensors that are read: frozen instead of refused


def reading(read: Callable[[Tensor], Any], *given: Any) -> Callable[[Any], Any]:
    def scenario(jit: Any) -> Any:
        f = jit(read)
        return [f(torch.tensor(g).to("jax")) for g in given]

    return lambda jit: [t.tolist() if isinstance(t, Tensor) else t for t in scenario(jit)]


EITHER |= {
    "item of an argument": reading(lambda x: torch.ones(1, device="jax") * x.item(), 1.0, 2.0, 3.0),
    "if argument": reading(
        lambda x: torch.ones(1, device="jax") if x else torch.zeros(1, device="jax"), True, False
    ),
    "tolist of an argument": reading(lambda x: x.tolist(), [1.0, 2.0], [3.0, 4.0]),
    "str of an argument": reading(lambda x: str(x), [1.0, 2.0], [3.0, 4.0]),
    "cpu of an argument": reading(lambda x: x.cpu(), [1.0, 2.0], [3.0, 4.0]),
    "through the CPU": reading(lambda x: (x.cpu() * 2).to("jax"), [1.0, 2.0], [3.0, 4.0]),
    "nonzero of an argument": reading(lambda x: x.nonzero(), [1.0, 0.0], [0.0, 4.0]),
    "mask that is an argument": reading(lambda m: arange(2)[m], [True, False], [False, True]),
    "masked_select": reading(lambda m: torch.masked_select(arange(2), m), [True, False], [False, True]),
    "unique of an argument": reading(lambda x: torch.unique(x), [1.0, 2.0], [3.0, 4.0]),
    "repeat_interleave": reading(lambda x: torch.repeat_interleave(x), [1, 2], [2, 1]),
}


@either
def item_of_a_captured_tensor(jit: Any) -> Any:
    scale = torch.tensor(1.0).to("jax")
    f, found = jit(lambda x: x * scale.item()), []
    for n in range(4):
        scale.fill_(n)
        found.append(f(arange(3)).tolist())
    return found


@either
def copy_to_a_captured_cpu_tensor(jit: Any) -> Any:
    out, found = torch.zeros(3), []
    f = jit(lambda x: out.copy_(x))
    for n in range(3):
        f(arange(3) + n)
        found.append(out.tolist())
    return found


@either
def tolist_of_a_cpu_argument(jit: Any) -> Any:
    f = jit(lambda x, sizes: x * sum(sizes.tolist()))
    return [f(arange(3), torch.arange(3.0) + n).tolist() for n in range(3)]


# ---- 2. tensors from the CPU that come out as they came in


@same
def moved_and_returned(jit: Any) -> Any:
    f = jit(lambda x: (x.to("jax"), x.to("jax")[1:]))
    return [[t.tolist() for t in f(torch.arange(3.0) + n)] for n in range(3)]


@same
def copied_into_state(jit: Any) -> Any:
    state = arange(3)
    f = jit(lambda x: (state.copy_(x), state + 1)[1])
    return [[f(torch.arange(3.0) + n).tolist(), state.tolist()] for n in range(3)]


@same
def cpu_argument_returned(jit: Any) -> Any:
    f = jit(lambda x, c: (x + 1, c))
    return [f(arange(3), torch.zeros(2) + n)[1].tolist() for n in range(3)]


@same
def cpu_result_written_to(jit: Any) -> Any:
    f, found = jit(lambda x: (x + 1, torch.zeros(2))), []
    for _ in range(3):
        found.append(f(arange(3))[1].add_(1).tolist())
    return found


# ---- 3. captured tensors that are replaced


@same
def closure_rebound(jit: Any) -> Any:
    w = arange(3)
    f = jit(lambda x: x * w)
    found = [f(arange(3)).tolist() for _ in range(3)]
    w = arange(3) + 10
    return [*found, f(arange(3)).tolist()]


GLOBAL: Any = None


@same
def global_rebound(jit: Any) -> Any:
    global GLOBAL
    GLOBAL = arange(3)
    f = jit(lambda x: x * GLOBAL)
    found = [f(arange(3)).tolist() for _ in range(3)]
    GLOBAL = arange(3) + 10
    return [*found, f(arange(3)).tolist()]


def helper(x: Tensor) -> Tensor:
    return (x * GLOBAL).square().sum()


@same
def global_of_a_helper_rebound(jit: Any) -> Any:
    global GLOBAL
    GLOBAL = arange(3)
    f = jit(lambda x: helper(x))
    found = [f(arange(3)).tolist() for _ in range(3)]
    GLOBAL = arange(3) + 10
    return [*found, f(arange(3)).tolist()]


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.tensor


@same
def attribute_rebound(jit: Any) -> Any:
    box = Box(arange(3))
    fs = [jit(lambda x: x * box.tensor), jit(box.__call__), jit(box)]
    found = [f(arange(3)).tolist() for f in fs for _ in range(3)]
    box.tensor = arange(3) + 10
    return [*found, *[f(arange(3)).tolist() for f in fs]]


@same
def attribute_of_an_argument_rebound(jit: Any) -> Any:
    box = Box(arange(3))
    f = jit(lambda b: b.tensor * 2)
    found = [f(box).tolist() for _ in range(3)]
    box.tensor = arange(3) + 10
    return [*found, f(box).tolist()]


@same
def item_of_a_dict_rebound(jit: Any) -> Any:
    box = {"w": arange(3)}
    f = jit(lambda x: x * box["w"])
    found = [f(arange(3)).tolist() for _ in range(3)]
    box["w"] = arange(3) + 10
    return [*found, f(arange(3)).tolist()]


@same
def plain_attribute_of_a_module_rebound(jit: Any) -> Any:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = arange(3)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask

    model = Masked()
    f = jit(model)
    found = [f(arange(3)).tolist() for _ in range(3)]
    model.mask = arange(3) + 10
    return [*found, f(arange(3)).tolist()]


@same
def state_carried_by_rebinding_and_returned(jit: Any) -> Any:
    box = Box(arange(3))

    def body(x: Tensor) -> Tensor:
        box.tensor = box.tensor + x
        return box.tensor

    f = jit(body)
    return [[f(arange(3)).tolist(), box.tensor.tolist()] for _ in range(5)]


@same
def stored_and_returned(jit: Any) -> Any:
    kept: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        kept.append(x + 1)
        return kept[-1]

    f = jit(body)
    for n in range(4):
        f(arange(3) + n)
    return [t.tolist() for t in kept]


# ---- 4. parameters: requires_grad, layout; the gradients of what is not a root


def freezing(first: bool) -> Callable[[Any], Any]:
    def scenario(jit: Any) -> Any:
        weight, bias = nn.Parameter(arange(3) + 1), nn.Parameter(arange(3))
        weight.requires_grad_(first)
        optimizer = torch.optim.SGD([weight, bias], lr=0.25)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            (weight * x + bias).sum().backward()
            optimizer.step()

        f, found = jit(step), []
        for n in range(8):
            if n == 4:
                weight.requires_grad_(not first)
            f(arange(3))
            found.append([weight.tolist(), bias.tolist(), weight.grad is None])
        return found

    return scenario


SAME |= {"a parameter frozen": freezing(True), "a parameter thawed": freezing(False)}


@same
def parameter_transposed_in_its_storage(jit: Any) -> Any:
    model = nn.Linear(2, 2, bias=False).to("jax")
    with torch.no_grad():
        model.weight.copy_(arange(4, 2, 2))
        f = jit(lambda x: model(x))
        found = [f(arange(2, 1, 2)).tolist() for _ in range(3)]
        model.weight.data = model.weight.data.t()
        return [*found, f(arange(2, 1, 2)).tolist()]


@same
def captured_tensor_transposed_or_resized(jit: Any) -> Any:
    w, v = arange(4, 2, 2), arange(6)
    f = jit(lambda x: x @ w + v.sum())
    found = [f(arange(2, 1, 2)).tolist() for _ in range(3)]
    w.t_()
    found.append(f(arange(2, 1, 2)).tolist())
    v.resize_(3)
    return [*found, f(arange(2, 1, 2)).tolist()]


@same
def gradient_of_a_helpers_global(jit: Any) -> Any:
    global GLOBAL
    GLOBAL = (arange(3) + 1).requires_grad_()

    def body(x: Tensor) -> None:
        helper(x).backward()

    f, found = jit(body), []
    for n in range(8):
        if n == 5:
            GLOBAL.grad = None
        f(arange(3))
        found.append(GLOBAL.grad.tolist() if GLOBAL.grad is not None else None)
    return found


# ---- 5. arguments: gradients, aliases of state, bits, layouts changed inside


@same
def gradient_accumulates_in_an_argument(jit: Any) -> Any:
    f, found = jit(lambda x: x.square().sum().backward()), []
    for n in range(3):
        x = (arange(3) + n).requires_grad_()
        for _ in range(3):
            f(x)
            found.append(x.grad.tolist())
    return found


@same
def gradient_through_an_argument_that_is_no_leaf(jit: Any) -> Any:
    f = jit(lambda y: y.square().sum().backward())
    a, b = arange(3).requires_grad_(), (arange(3) + 1).requires_grad_()
    a.grad, b.grad = torch.zeros_like(a), torch.zeros_like(b)
    for leaf in (a, a, a, b, b, b):
        f(leaf * 2)
    return [a.grad.tolist(), b.grad.tolist()]


@same
def argument_is_another_captured_tensor(jit: Any) -> Any:
    p, q = arange(3), arange(3) + 1
    f = jit(lambda x: x * 2 + p * 10 + q * 100)
    return [f(x).tolist() for x in (p, p, q, q, arange(3))]


@same
def argument_is_a_default_argument(jit: Any) -> Any:
    state, other = arange(3), arange(3)

    def body(x: Tensor, state: Tensor = state) -> None:
        state.add_(1)
        x.mul_(2)

    f = jit(body)
    for x in (state, state, other, other, state):
        f(x)
    return [state.tolist(), other.tolist()]


@same
def conjugated_and_negated_arguments(jit: Any) -> Any:
    f, x = jit(lambda x: x * 2), torch.tensor([1 + 2j]).to("jax")
    y = arange(3)
    return [f(t).tolist() for t in (x, x, x.conj(), x.conj(), y, y, torch._neg_view(y))]


@same
def conjugated_results(jit: Any) -> Any:
    f, x = jit(lambda x: (x.conj(), (x * 2).conj())), torch.tensor([1 + 2j]).to("jax")
    return [[t.tolist() for t in f(x)] for _ in range(3)]


@same
def argument_returned_as_another_dtype(jit: Any) -> Any:
    f = jit(lambda x: x.view(torch.int32))
    found = [f(arange(3) + n) for n in range(3)]
    return [[str(t.dtype), t.tolist()] for t in found]


@same
def arguments_of_two_dtypes_on_a_storage(jit: Any) -> Any:
    f = jit(lambda a, b: (a[1:], b[1:]))
    found = []
    for n in range(3):
        x = arange(4) + n
        found += [[str(t.dtype), t.tolist()] for t in f(x, x.view(torch.int32))]
    return found


@either
def argument_resized(jit: Any) -> Any:
    f, found = jit(lambda x, out: torch.add(x, 1, out=out)), []
    for n in range(3):
        out = torch.empty(0, device="jax")
        f(arange(3) + n, out)
        found.append([tuple(out.shape), out.tolist()])
    return found


@either
def argument_transposed(jit: Any) -> Any:
    f, found = jit(lambda x: x.t_() + 0), []
    for n in range(3):
        x = arange(6, 2, 3) + n
        f(x)
        found.append([tuple(x.shape), x.tolist()])
    return found


@either
def argument_given_other_data(jit: Any) -> Any:
    def body(x: Tensor) -> Tensor:
        x.data = x.data * 2
        return x + 1

    f, found = jit(body), []
    for n in range(3):
        x = arange(3) + n
        found.append([f(x).tolist(), x.tolist()])
    return found


# ---- 6. random numbers


@same
def draw_that_is_not_used_at_the_end(jit: Any) -> Any:
    torch.manual_seed(3)

    def body(x: Tensor) -> Tensor:
        y = x + torch.rand(3, device="jax")
        torch.rand(3, device="jax")
        return y

    f = jit(body)
    return [f(arange(3)).tolist() for _ in range(4)]


@either
def checkpoint_with_dropout(jit: Any) -> Any:
    torch.manual_seed(1)
    weight = nn.Parameter(arange(8) + 1)

    def body(x: Tensor) -> Tensor:
        weight.grad = None
        y = checkpoint(lambda a: F.dropout(a * weight, 0.5), x, use_reentrant=False)
        y.sum().backward()
        return y

    f = jit(body)
    return [[f(torch.ones(8).to("jax")).tolist(), weight.grad.tolist()] for _ in range(4)]


@either
def seed_set_inside(jit: Any) -> Any:
    def body(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return x + torch.rand(3, device="jax")

    f = jit(body)
    return [f(arange(3)).tolist() for _ in range(3)]


# ---- 7. settings of modules


@same
def dropout_changed(jit: Any) -> Any:
    model = nn.Dropout(0.0)
    f = jit(lambda x: model(x))
    found = [f(arange(3)).tolist() for _ in range(3)]
    model.p = 1.0
    return [*found, f(arange(3)).tolist()]


@same
def hook_added(jit: Any) -> Any:
    model = nn.Identity()
    f = jit(lambda x: model(x) * 1)
    found = [f(arange(3)).tolist() for _ in range(3)]
    model.register_forward_hook(lambda module, given, out: out * 100)
    return [*found, f(arange(3)).tolist()]


@same
def default_device(jit: Any) -> Any:
    f = jit(lambda x: torch.zeros(2))
    found = [f(arange(2)).device.type, f(arange(2)).device.type]
    with torch.device("jax"):
        return [*found, f(arange(2)).device.type]


@same
def gradients_dropped_at_the_end(jit: Any) -> Any:
    weight = nn.Parameter(arange(3) + 1)
    optimizer = torch.optim.SGD([weight], lr=0.25)

    def step(x: Tensor) -> Tensor:
        loss = (weight * x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    f = jit(step)
    return [[f(arange(3)).tolist(), weight.tolist(), weight.grad is None] for _ in range(5)]


@pytest.mark.parametrize("scenario", SAME.values(), ids=SAME)
def test_agrees(scenario: Any) -> None:
    assert scenario(isthmus.jit) == scenario(lambda f: f)


@pytest.mark.parametrize("scenario", EITHER.values(), ids=EITHER)
def test_agrees_or_is_refused(scenario: Any) -> None:
    with contextlib.suppress(JitError):
        assert scenario(isthmus.jit) == scenario(lambda f: f)


# ---- 8. others


def test_autocast_works_where_jit_comes_first() -> None:
    code = """
import torch, isthmus
f = isthmus.jit(lambda x: x @ x)
x = torch.ones(2, 2).to("jax")
with torch.autocast("jax", torch.bfloat16):
    assert (x @ x).dtype == torch.bfloat16
"""
    ran = forked_early(code)
    assert ran.returncode == 0, ran.stderr


def test_a_result_that_requires_grad_is_not_silently_detached() -> None:
    weight = nn.Parameter(arange(3))
    f = isthmus.jit(lambda x: (x * weight).sum())
    with pytest.raises(JitError, match="requires grad"):
        f(arange(3))
    with torch.no_grad():
        assert [f(arange(3)).item() for _ in range(3)] == [5, 5, 5]


def test_versions_of_deep_state() -> None:
    state, x = arange(3), arange(3).requires_grad_()
    box = [[[[state]]]]
    f = isthmus.jit(lambda: box[0][0][0][0].add_(1))
    f()
    f()
    loss = (x * state).sum()
    f()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_decorated_methods() -> None:
    class Counter:
        def __init__(self) -> None:
            self.total = arange(3)

        @isthmus.jit
        def add(self, x: Tensor) -> Tensor:
            return self.total.add_(x) * 1

    counter = Counter()
    assert [counter.add(arange(3)).tolist() for _ in range(2)] == [[0, 2, 4], [0, 3, 6]]


def test_one_static_argument_as_a_string() -> None:
    f = isthmus.jit(lambda x, mode: x + 1, static_argnames="mode")
    assert f(arange(2), "a").tolist() == [1, 2]


def test_static_arguments_are_compared_whole() -> None:
    runs: list[Any] = []

    def body(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        runs.append(sizes)
        return x * sum(sizes)

    f = isthmus.jit(body, static_argnames=["sizes"])
    assert [f(arange(2), sizes).tolist() for sizes in ((1, 2), (1, 2), (2, 2), (1, 2))] == [
        [0, 3],
        [0, 3],
        [0, 4],
        [0, 3],
    ]
    assert runs == [(1, 2), (2, 2)]
    with pytest.raises(JitError, match="hashable"):
        f(arange(2), [1, {2}])
    with pytest.raises(JitError, match="tensors"):
        f(arange(2), (arange(1),))


def test_objects_as_arguments_are_let_go() -> None:
    f = isthmus.jit(lambda box: box.tensor * 2)
    for _ in range(3):
        f(Box(arange(3)))
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(80):
        f(Box(arange(3)))
    gc.collect()
    assert len(jax.live_arrays()) <= before + 64  # no more than the recordings that are kept


def test_train_and_eval_in_turn() -> None:
    model, runs = nn.Dropout(0.5), []

    @isthmus.jit
    def f(x: Tensor) -> Tensor:
        runs.append(1)
        return model(x)

    for _ in range(6):
        for flag in (True, False):
            model.train(flag)
            f(arange(3))
    assert len(runs) <= 4


@pytest.mark.parametrize("good", [0, 3], ids=["recording", "replay"])
@pytest.mark.parametrize("when", ["now", "later"])
def test_state_survives_an_index_out_of_range(when: str, good: int) -> None:
    table, state = arange(4, 2, 2), arange(3) * 1
    before, isthmus.config.check_indices = isthmus.config.check_indices, when

    def body(at: Tensor) -> Tensor:
        state.add_(1)
        return F.embedding(at, table) * 1

    f = isthmus.jit(body)
    try:
        for _ in range(good):
            f(torch.tensor([0, 1]).to("jax"))
        with pytest.raises(IndexError):
            f(torch.tensor([0, 5]).to("jax")).tolist()
        assert state.tolist() == [good + 1 + i for i in range(3)]
        assert f(torch.tensor([0, 1]).to("jax")).tolist() == [[0, 1], [2, 3]]
    finally:
        isthmus.config.check_indices = before


def test_other_threads_go_on_while_a_function_is_recorded() -> None:
    import threading

    other, found, errors = arange(3), [], []
    started, go_on = threading.Event(), threading.Event()

    def read() -> None:
        started.wait(20)
        try:
            found.append(other.tolist())  # reads need not wait for the recording
            go_on.set()
            found.append((other + 1).tolist())  # ops wait until it is over
        except Exception as error:
            errors.append(error)

    def body(x: Tensor) -> Tensor:
        y = x + 1
        started.set()
        assert go_on.wait(20)
        return y * 2

    thread = threading.Thread(target=read)
    thread.start()
    assert isthmus.jit(body)(arange(3)).tolist() == [2, 4, 6]
    thread.join(20)
    assert (found, errors) == ([[0, 1, 2], [1, 2, 3]], [])


@pytest.mark.parametrize("kind", ["tensor", "accumulated", "optimizer", "module"])
def test_hooks_added_and_exchanged_later(kind: str) -> None:
    def add(net: torch.nn.Module, optimizer: torch.optim.Optimizer, factor: float) -> Any:
        if kind == "tensor":
            return net.weight.register_hook(lambda g: g * factor)
        if kind == "accumulated":
            return net.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(factor), None)[1])
        if kind == "optimizer":
            return optimizer.register_step_pre_hook(lambda *_: (net.weight.grad.mul_(factor), None)[1])
        return net.register_forward_hook(lambda m, args, out: out * factor)

    found = []
    for wrap in (lambda f: f, isthmus.jit):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2).to("jax")
        optimizer, x = torch.optim.SGD(net.parameters(), 0.1), torch.ones(4, 3).to("jax")

        def step(x: torch.Tensor, net: Any = net, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        losses = [run(x).item() for _ in range(3)]
        handle = add(net, optimizer, 2.0)
        losses += [run(x).item() for _ in range(2)]
        handle.remove()
        add(net, optimizer, -1.0)
        losses += [run(x).item() for _ in range(2)]
        found.append(losses)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
