"""A 0-dim CPU tensor among tensors of the device, plain or a view into a longer storage: only its value counts."""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_flatten, tree_unflatten

import isthmus
from isthmus._device.core.dispatch import kernel_for
from tests.conformance.kinds import UNINITIALISED
from tests.conformance.values import compare_values, copied, leaves, to_jax, widened
from tests.ops.test_opinfo import SPARSE, name_of
from tests.support import in_mode

# The CPU takes a scalar for a vector of channels and reads on beyond its end.
BEYOND = {"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"}
MODES = ["eager", "lazy", "compiled", "jit"]
Form = Callable[[Tensor], Tensor]


def plain(value: Tensor) -> Tensor:
    """Return the scalar on a storage of its own."""
    return value.clone()


def view(value: Tensor) -> Tensor:
    """Return the scalar as the fourth element of a longer storage, whose others must not be read."""
    return torch.stack([value + 2 if value.dtype != torch.bool else ~value] * 3 + [value])[3]


def in_any_mode(function: Any, mode: str) -> Any:
    return isthmus.jit(function) if mode == "jit" else in_mode(function, mode)


def column() -> Tensor:
    return torch.arange(1.0, 7.0).reshape(2, 3)


CALLS: dict[str, Callable[..., Any]] = {
    "mul": lambda s, x: s * x,
    "mul after": lambda s, x: x * s,
    "add alpha": lambda s, x: torch.add(x, s, alpha=3),
    "add alpha first": lambda s, x: torch.add(s, x, alpha=3),
    "sub": lambda s, x: torch.sub(x, s, alpha=2),
    "rsub": lambda s, x: torch.rsub(x, s, alpha=2),
    "div": lambda s, x: torch.div(x, s, rounding_mode="floor"),
    "pow": lambda s, x: torch.pow(s, x),
    "where": lambda s, x: torch.where(x > 2, s, x),
    "where two": lambda s, x: torch.where(x > 2, s, s * 2 if s.device.type == "jax" else s),
    "lerp": lambda s, x: torch.lerp(x, x + 1, s),
    "addcmul": lambda s, x: torch.addcmul(x, s, x, value=2),
    "addcdiv": lambda s, x: torch.addcdiv(x, x, s, value=2),
    "clamp": lambda s, x: x.clamp(s, s),
    "masked_fill": lambda s, x: x.masked_fill(x > 2, s),
    "index_put": lambda s, x: x.index_put((torch.tensor([0], device=x.device),), s),
    "in place": lambda s, x: (x * 1).add_(s, alpha=3),
    "in place two": lambda s, x: (x * 1).addcmul_(s, s, value=3),
    "out": lambda s, x: torch.mul(s, x, out=torch.empty_like(x)),
    "views of both": lambda s, x: s * x[:, 1:] + s,
    "foreach": lambda s, x: torch._foreach_mul([x, x[1]], s),
    "foreach list": lambda s, x: torch._foreach_add([x[1], x], [s, s], alpha=2),
    "foreach three": lambda s, x: torch._foreach_addcmul([x, x[:, 1]], [s, s], [x, x[:, 2]], value=2),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_only_its_value_counts(name: str, mode: str) -> None:
    call = CALLS[name]
    want = leaves(call(torch.tensor(20.0), column()))
    run = in_any_mode(call, mode)
    for form in (view, plain, view):
        got = leaves(run(form(torch.tensor(20.0)), column().to("jax")))
        torch.testing.assert_close([t.cpu() for t in got], want)


@pytest.mark.parametrize("mode", MODES)
def test_its_value_is_read_at_every_call(mode: str) -> None:
    values = torch.tensor([10.0, 20.0, 30.0])
    inside = values[2]
    run = in_any_mode(lambda s, x: s * x + inside, mode)
    x = torch.ones(2, device="jax")
    assert run(values[1], x).tolist() == [50.0, 50.0]
    values.mul_(2)
    assert run(values[1], x).tolist() == [100.0, 100.0]
    assert run(values[0], x).tolist() == [80.0, 80.0]


def test_what_is_recorded_keeps_the_value_it_had() -> None:
    values = torch.tensor([10.0, 20.0])
    with isthmus.lazy():
        result = values[1] * torch.ones(2, device="jax")
        values.zero_()
        assert result.tolist() == [20.0, 20.0]


@pytest.mark.parametrize("mode", ["eager", "lazy", "compiled"])
def test_its_gradient_is_on_the_cpu(mode: str) -> None:
    values = torch.tensor([10.0, 20.0], requires_grad=True)
    run = in_mode(lambda s, x: (s * x).sum(), mode)
    run(values[1], torch.tensor([2.0, 3.0], device="jax")).backward()
    assert values.grad is not None
    assert values.grad.device.type == "cpu"
    assert values.grad.tolist() == [0.0, 5.0]


def test_where_it_lies_makes_no_plan() -> None:
    op = torch.ops.aten.mul.Tensor
    kernel: Any = kernel_for(op)
    plans = kernel.__self__.plans if hasattr(kernel, "__self__") else kernel.__globals__["_plans"]
    x = torch.ones(7, 11, device="jax")
    values = torch.arange(5.0)
    assert (values[0] * x).sum() == 0
    before = len(plans)
    for place in range(1, 5):
        assert (values[place] * x).unique().tolist() == [place]
    assert (torch.tensor(9.0) * x).unique().tolist() == [9]
    assert len(plans) == before


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_it_is_never_written_to(mode: str) -> None:
    values = torch.tensor([10.0, 20.0])
    x = torch.ones((), device="jax")
    assert in_mode(lambda: (x * 1).add_(x).item(), mode)() == 2  # the same call on tensors of ours has a plan
    for call in (lambda: values[1].add_(x), lambda: torch.add(x, x, out=values[1])):
        with pytest.raises(RuntimeError, match="same device"):
            in_mode(call, mode)()
    with pytest.raises(RuntimeError, match="same device"):
        in_mode(lambda: torch._foreach_add_([values[1]], [x]), mode)()
    assert values.tolist() == [10.0, 20.0]


def positions(op: OpInfo, count: int) -> Iterator[tuple[list[Any], Any, int]]:
    """Yield calls of an op as flat arguments and their structure, each with one place for a scalar."""
    dtype = torch.float32 if torch.float32 in op.supported_dtypes("cpu") else torch.int64
    for sample in itertools.islice(op.sample_inputs("cpu", dtype), count):
        flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [n for n, value in enumerate(flat) if isinstance(value, Tensor) and value.numel()]
        if len(tensors) > 1:
            yield from ((flat, spec, place) for place in tensors)


def attempt(op: OpInfo, flat: list[Any], spec: Any, mode: str = "eager") -> list[Any] | Exception:
    """Return what a call gives, on the CPU, or the error it raises."""

    def call() -> list[Any]:
        value, args, kwargs = tree_unflatten(flat, spec)
        return leaves(op(value, *args, **kwargs))

    torch.manual_seed(0)
    try:
        return [t.cpu() if isinstance(t, Tensor) else t for t in in_mode(call, mode)()]
    except Exception as error:
        return error


def same(one: list[Any], other: list[Any]) -> bool:
    try:
        compare_values(one, other, list)
    except AssertionError:
        return False
    return len(one) == len(other)


def swept() -> list[OpInfo]:
    """Return the entries of op_db whose values follow from their arguments."""
    left = {*SPARSE, *UNINITIALISED, *BEYOND}
    return [op for op in sorted(op_db, key=name_of) if op.name not in left]


def parameters() -> Iterator[Any]:
    """Yield every entry in two modes; one in 16 of each is not slow."""
    for place, op in enumerate(swept()):
        for turn, mode in enumerate(("eager", "lazy")):
            marks = [] if place % 16 == 3 + 8 * turn else [pytest.mark.slow]
            yield pytest.param(op, mode, id=f"{name_of(op)}-{mode}", marks=marks)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("op", "mode"), parameters())
def test_in_every_place_of_every_op(op: OpInfo, mode: str, limit: int | None) -> None:
    torch.manual_seed(zlib.crc32(name_of(op).encode()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for flat, spec, place in positions(op, 2 if limit else 6):
            scalar = flat[place].detach().reshape(-1)[0].clone()
            given = [scalar if n == place else value for n, value in enumerate(flat)]
            want = attempt(op, copied(given), spec)
            if isinstance(want, Exception):
                continue  # no place for a scalar
            _compare(op, given, spec, place, mode, want)


def _compare(op: OpInfo, given: list[Any], spec: Any, place: int, mode: str, want: list[Any]) -> None:
    """Compare a call with its scalar on the CPU, in both forms, with what the CPU gives."""
    refused = []
    for form in (view, plain):
        moved = [form(value) if n == place else to_jax(value) for n, value in enumerate(given)]
        got = attempt(op, moved, spec, mode)
        if isinstance(got, Exception):
            # torch lets a scalar of another device join only where it broadcasts.
            assert "device" in str(got).lower(), (place, form, got)
            refused.append(form)
        elif not same(got, want) and not _is_random(op, given, spec, want):
            assert len(got) == len(want), (place, form)
            compare_values(got, want, lambda: attempt(op, widened(given), spec))
    assert len(refused) in (0, 2), (place, refused)


def _is_random(op: OpInfo, given: list[Any], spec: Any, want: list[Any]) -> bool:
    """Return whether the CPU's values follow the seed, also where a sample seeds the generator itself."""
    plain_seed = torch.manual_seed
    for other in range(1, 5):
        with mock.patch.object(torch, "manual_seed", lambda seed, other=other: plain_seed(seed + other)):
            again = attempt(op, copied(given), spec)
        if isinstance(again, Exception) or not same(again, want):
            return True
    return False
