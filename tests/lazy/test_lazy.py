"""Lazy mode does what eager does: values, modes, objects, aliases, gradients, random numbers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import isthmus
from isthmus.errors import ConfigError
from tests.interpreters import forked
from tests.lazy.helpers import (
    Count,
    arange,
    eagerly,
    lazily,  # noqa: F401  # around every test
    pending,
)

# ---- reading


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.tolist(),
        lambda t: t.cpu().tolist(),
        lambda t: t.numpy(force=True).tolist(),
        lambda t: np.asarray(t.cpu()).tolist(),
        lambda t: [v.item() for v in t],
        lambda t: [float(v) for v in t],
        lambda t: [v.tolist() for v in t.unbind()],
        lambda t: torch.utils.dlpack.from_dlpack(t.cpu()).tolist(),
        lambda t: t.to("cpu", torch.float64).tolist(),
        lambda t: t.untyped_storage().cpu().tolist() and t.tolist(),
    ],
)
def test_reads(read: Callable[[Tensor], Any]) -> None:
    found = arange(3) * 2 + 1
    assert pending(found)
    assert read(found) == [1, 3, 5]
    assert read(found) == [1, 3, 5]


def test_reads_that_decide() -> None:
    x = arange(3) + 1
    assert torch.equal(x, torch.tensor([1.0, 2.0, 3.0]).to("jax"))
    assert not torch.equal(x, x + 1)
    assert torch.allclose(x, x + 1e-9)
    assert bool((x > 0).all())
    assert not (x > 2).all()
    assert int(x.sum()) == 6
    assert 2.0 in x
    assert [10, 20, 30][(x > 2).sum()] == 20
    assert f"{x[1]:.2f}" == "2.00"


def test_printing() -> None:
    x = torch.tensor([[1.5, -2.0]]).to("jax") * 2
    assert str(x) == "tensor([[ 3., -4.]], device='jax:0')"
    assert pending(x + 1)


def test_a_read_runs_everything_once() -> None:
    x = arange(4)
    with Count("programs run") as run:
        a, b = x + 1, x * 2
        a.tolist()
        assert not pending(b)
        b.tolist()
    assert run.count == 1


# ---- modes


def changed_and_raised(x: Tensor) -> None:
    with isthmus.lazy():
        x.add_(1)
        raise KeyError


def test_modes_nest_and_end_with_an_exception() -> None:
    assert isthmus.mode() == "lazy"
    x = arange(3)
    with pytest.raises(KeyError):
        changed_and_raised(x)
    assert isthmus.mode() == "lazy"
    assert pending(x * 2)
    isthmus.set_mode("eager")
    assert not pending(x)
    assert not pending(x * 2)
    with isthmus.lazy():
        y = x * 3
        assert pending(y)
    assert isthmus.mode() == "eager"
    assert not pending(y)
    assert y.tolist() == [3, 6, 9]
    with pytest.raises(KeyError):
        changed_and_raised(x)
    assert isthmus.mode() == "eager"
    assert not pending(x)
    assert x.tolist() == [2, 3, 4]


def test_a_mode_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"'fast'.*'eager', 'lazy'"):
        isthmus.set_mode("fast")
    assert isthmus.mode() == "lazy"


def test_the_setting_is_the_mode() -> None:
    assert isthmus.config.mode == "lazy"
    x = arange(3)
    y = x + 1
    isthmus.config.mode = "eager"
    assert isthmus.mode() == isthmus.config.mode == "eager"
    assert not pending(y)
    assert not pending(x + 1)
    with isthmus.lazy():
        assert isthmus.config.mode == "lazy"
        isthmus.config.mode = "eager"
        assert not pending(x * 2)
    assert isthmus.config.mode == "eager"
    isthmus.config.mode = "lazy"
    assert isthmus.mode() == "lazy"
    assert pending(x * 2)
    with pytest.raises(ConfigError, match=r"'fast' is not a choice; choose from 'eager', 'lazy'"):
        isthmus.config.mode = "fast"
    assert isthmus.config.mode == "lazy"
    isthmus.set_mode("eager")
    assert isthmus.config.mode == "eager"


def test_the_setting_is_the_mode_of_compiled_and_jitted_functions_too(fresh_dynamo: None) -> None:
    isthmus.config.mode = "eager"
    seen = []

    @isthmus.jit
    def step(x: Tensor) -> Tensor:
        seen.append((isthmus.mode(), isthmus.config.mode))
        return x + 1

    assert step(arange(3)).tolist() == [1, 2, 3]
    assert seen == [("lazy", "lazy")]
    assert isthmus.config.mode == "eager"
    compiled = torch.compile(lambda x: x + 1, backend="isthmus")
    isthmus.config.mode = "lazy"
    assert compiled(arange(3) * 2).tolist() == [1, 3, 5]
    assert isthmus.mode() == "lazy"


def test_the_environment_chooses_the_mode() -> None:
    code = (
        "import torch, isthmus; x = torch.ones(2, device='jax') + 1; "
        "print(isthmus.mode(), isthmus.config.mode, type(x.untyped_storage()._buffer.held).__name__, x.tolist())"
    )
    run = forked(code, ISTHMUS_MODE="lazy")
    assert run.stdout == "lazy lazy Node [2.0, 2.0]\n", run.stderr


def test_tensors_cross_modes() -> None:
    x = arange(4)
    view = x[1:3]
    view.add_(10)
    with eagerly():
        assert x.tolist() == [0, 11, 12, 3]
        view.mul_(2)
    x.sub_(1)
    assert view.tolist() == [21, 23]


# ---- objects


def test_deepcopy_save_and_pickle_of_recorded_tensors() -> None:
    base = arange(6, 2, 3) + 1
    row = base[1]
    assert pickle.loads(pickle.dumps(base.t() * 2)).tolist() == [[2, 8], [4, 10], [6, 12]]
    for copied in (copy.deepcopy, through_a_file):
        new, new_row = copied([base, row])
        new_row.zero_()
        assert new.device.type == "jax"
        assert new.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert base.tolist() == [[1, 2, 3], [4, 5, 6]]


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def test_modules_are_copied_saved_and_loaded() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to("jax")
    x = arange(12, 4, 3)
    model(x).sum().backward()  # running statistics are recorded by now
    twin = copy.deepcopy(model)
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to("jax")
    other.load_state_dict(through_a_file(model.state_dict()))
    want = model.eval()(x).tolist()
    assert twin.eval()(x).tolist() == want
    assert other.eval()(x).tolist() == want
    with torch.no_grad():
        twin[0].weight.zero_()  # type: ignore[union-attr, operator]
    assert model(x).tolist() == want
    assert model[1].num_batches_tracked.item() == 1


def test_modules_move_and_cast() -> None:
    model = nn.Linear(2, 2).to("jax")
    want = [p.tolist() for p in model.parameters()]
    half = copy.deepcopy(model).double().cpu()
    assert [p.tolist() for p in half.parameters()] == want
    assert [p.tolist() for p in half.to("jax", torch.float32).parameters()] == want


# ---- aliases


def test_writes_through_views_out_and_set() -> None:
    base = arange(6, 2, 3)
    base.t()[1].mul_(10)
    base[0, 1:].copy_(torch.tensor([7.0, 8.0]))  # from the host
    torch.add(base[1], 1, out=base[1])
    assert base.tolist() == [[0, 7, 8], [4, 41, 6]]
    small = torch.empty(0, device="jax")
    kept = small.detach()
    assert torch.mul(base, 2, out=small) is small
    assert small.shape == (2, 3)
    assert small.tolist() == [[0, 14, 16], [8, 82, 12]]
    assert kept.shape == (0,)
    other = arange(3) + 1
    seen = other.set_(small[1])
    other.add_(1)
    assert seen is other
    assert small[1].tolist() == [9, 83, 13]


def test_data_and_resize() -> None:
    x = nn.Parameter(arange(4))
    x.data = x.data[1:] * 2
    x.data.add_(1)
    assert x.tolist() == [3, 5, 7]
    y = arange(4) + 1
    y.resize_(6)[4:].zero_()
    assert y.tolist() == [1, 2, 3, 4, 0, 0]


def test_equal_nodes_are_separate_tensors() -> None:
    x = arange(3)
    a, b = x + 1, x + 1
    a.mul_(2)
    assert (a.tolist(), b.tolist()) == ([2, 4, 6], [1, 2, 3])
    c, d = x + 1, x + 1
    isthmus.sync()
    c.mul_(2)
    assert (c.tolist(), d.tolist()) == ([2, 4, 6], [1, 2, 3])


def test_what_was_read_from_the_host_does_not_change_later() -> None:
    source = torch.arange(3.0)
    x = source.to("jax")
    y = x * torch.tensor(2.0)
    scale = torch.tensor(5.0)
    z = x * scale
    source.zero_()
    scale.zero_()
    assert (y.tolist(), z.tolist()) == ([0, 2, 4], [0, 5, 10])
    array = np.arange(3000.0, dtype=np.float32)
    w = torch.from_numpy(array).to("jax") + 1
    array[:] = -1
    assert w.sum().item() == 4501500


def test_what_was_given_to_the_host_does_not_change_later() -> None:
    x = arange(3000)
    x.add_(0)
    host, shown = x.cpu(), x.numpy(force=True)
    for _ in range(3):
        x.add_(1)
        isthmus.sync()
    assert x[0].item() == 3
    assert host[:2].tolist() == shown[:2].tolist() == [0, 1]


# ---- autograd


def test_a_saved_tensor_that_was_changed_is_refused() -> None:
    x = arange(3).requires_grad_()
    y = x.exp()
    total = y.sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    assert y[0].item() == 2


def test_writes_join_the_graph() -> None:
    def slope(device: str) -> list[float]:
        x = torch.arange(4.0).to(device).requires_grad_()
        y = x * 2
        y[1:3].mul_(y[2:].detach().clone())
        y[0] = x[3] ** 2
        (grad,) = torch.autograd.grad((y * torch.arange(1.0, 5.0).to(device)).sum(), x)
        return grad.tolist()

    assert slope("jax") == slope("cpu")


def test_hooks() -> None:
    def run(device: str) -> list[Any]:
        seen: list[Any] = []
        torch.manual_seed(0)
        layer = nn.Linear(3, 2).to(device)
        layer.register_forward_hook(lambda m, i, o: o * 2)
        layer.register_full_backward_hook(
            lambda m, gi, go: seen.append(go[0].sum().item())
        )  # a read in backward
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.mul_(-1).tolist()))
        layer.bias.register_hook(lambda g: g * 10)
        x = torch.arange(6.0).reshape(2, 3).to(device).requires_grad_()
        layer(x).square().sum().backward()
        return [*seen, layer.bias.grad.tolist(), layer.weight.grad.tolist(), x.grad.tolist()]

    for got, want in zip(run("jax"), run("cpu"), strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want))


def test_double_backward_and_transforms() -> None:
    def second(device: str) -> list[Any]:
        x = torch.arange(1.0, 4.0).to(device).requires_grad_()
        (first,) = torch.autograd.grad((x**3).prod(), x, create_graph=True)
        first.square().sum().backward()
        per_row = torch.func.vmap(torch.func.grad(lambda r: (r**3).sum()))(x.detach().reshape(3, 1))
        hessian = torch.func.hessian(lambda t: (t**3).sum())(x.detach())
        return [x.grad.cpu(), per_row.cpu(), hessian.cpu()]

    for got, want in zip(second("jax"), second("cpu"), strict=True):
        torch.testing.assert_close(got, want)


def test_a_function_of_ones_own() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * 3 * x * x

    x = arange(3).requires_grad_()
    Cube.apply(x).sum().backward()
    assert x.grad.tolist() == [0, 3, 12]


def test_gradients_accumulate_and_are_forgotten() -> None:
    x = arange(3).requires_grad_()
    for _ in range(3):
        (x * 2).sum().backward()
    assert x.grad.tolist() == [6, 6, 6]
    grad = x.grad
    grad.zero_()
    (x * x).sum().backward()
    assert grad.tolist() == [0, 2, 4]


# ---- random numbers


def draws() -> list[Tensor]:
    torch.manual_seed(5)
    x = torch.rand(4, device="jax")
    found = [x, torch.randn(3, device="jax"), F.dropout(torch.ones(20, device="jax"), 0.5)]
    found += [torch.randperm(6, device="jax"), torch.empty(3, device="jax").uniform_(2, 3)]
    state = torch.jax.get_rng_state()  # type: ignore[attr-defined]
    found += [torch.bernoulli(x), torch.multinomial(x, 2), torch.randint(9, (4,), device="jax")]
    torch.jax.set_rng_state(state)  # type: ignore[attr-defined]
    found += [torch.bernoulli(x), torch.rand_like(x)]
    with torch.random.fork_rng(device_type="jax"):
        found.append(torch.rand(2, device="jax"))
    return [*found, torch.rand(2, device="jax")]


def test_random_numbers_are_eagers() -> None:
    got = draws()
    assert all(pending(t) for t in (got[0], got[-1]))
    got = [t.cpu() for t in got]
    with eagerly():
        want = [t.cpu() for t in draws()]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(got[-1], got[-2])


def test_a_program_found_again_draws_anew() -> None:
    def draw() -> list[float]:
        return (torch.rand(5, device="jax") + 1).tolist()

    draw()
    with Count("compilations") as compiled:
        found = [draw() for _ in range(3)]
    assert compiled.count == 0
    assert len({tuple(numbers) for numbers in found}) == 3


def test_dropout_with_a_checkpoint() -> None:
    def gradient(use: bool) -> Tensor:
        torch.manual_seed(1)
        x = arange(64).requires_grad_()

        def block(t: Tensor) -> Tensor:
            return F.dropout(t * t, 0.5)

        y = checkpoint(block, x, use_reentrant=False) if use else block(x)
        torch.rand(3, device="jax")  # moves the generator before backward goes back
        y.sum().backward()
        return x.grad.cpu()

    plain = gradient(False)
    assert 10 < int((plain == 0).sum()) < 54
    assert torch.equal(gradient(True), plain)
    with eagerly():
        assert torch.equal(gradient(True), plain)
