"""Ops of two operands for every pair of dtypes, and of a dtype and a number: values, dtypes and refusals of the CPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import isthmus

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]
NUMBERS = [2, -3, 2.5, True, 0, 1 + 2j, -1, 300, 64, -0.0]
OPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "rsub": torch.rsub,
    "mul": torch.mul,
    "div": torch.div,
    "floor_divide": torch.floor_divide,
    "truncating div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "pow": torch.pow,
    "float_power": torch.float_power,
    "maximum": lambda a, b: torch.maximum(a, torch.as_tensor(b, device=a.device)),
    "fmin": lambda a, b: torch.fmin(a, torch.as_tensor(b, device=a.device)),
    "lt": torch.lt,
    "ge": torch.ge,
    "eq": torch.eq,
    "bitwise_and": torch.bitwise_and,
    "left shift": torch.bitwise_left_shift,
    "atan2": lambda a, b: torch.atan2(a, torch.as_tensor(b, device=a.device)),
    "hypot": lambda a, b: torch.hypot(a, torch.as_tensor(b, device=a.device)),
    "nextafter": lambda a, b: torch.nextafter(a, torch.as_tensor(b, device=a.device)),
    "copysign": torch.copysign,
    "xlogy": torch.xlogy,
    "where": lambda a, b: torch.where(a.to(torch.bool), a, b),
    "clamp": lambda a, b: torch.clamp(a, max=b),
    "masked_fill": lambda a, b: a.masked_fill(a.to(torch.bool), b),
    "heaviside": lambda a, b: torch.heaviside(a, torch.as_tensor(b, device=a.device)),
    "logical_xor": lambda a, b: torch.logical_xor(a, torch.as_tensor(b, device=a.device)),
    "add_": lambda a, b: a.clone().add_(b),
    "sub_": lambda a, b: a.clone().sub_(b),
    "mul_": lambda a, b: a.clone().mul_(b),
    "pow_": lambda a, b: a.clone().pow_(b),
}


def operands() -> list[tuple[Tensor, Any]]:
    """Return every pair of dtypes, and every dtype with every number."""
    values, others = torch.tensor([3, 0, 1, 2, 5]), torch.tensor([2, 1, 3, 1, 2])
    tensors: Iterator[tuple[Tensor, Any]] = (
        (values.to(a), others.to(b)) for a, b in itertools.product(DTYPES, DTYPES)
    )
    return [*tensors, *((values.to(a), number) for a, number in itertools.product(DTYPES, NUMBERS))]


def attempt(op: Callable[[Tensor, Any], Tensor], a: Tensor, b: Any) -> Tensor | Exception:
    try:
        return op(a, b)
    except Exception as error:
        return error


def differs(want: Tensor | Exception, op: Any, a: Tensor, b: Any) -> str | None:
    """Return how the device's answer differs from the CPU's."""
    if isinstance(want, Exception) and "not implemented for 'Bool'" in str(want):
        return None  # nothing is lost where the device knows more
    if "ComplexHalf" in str(want) or (isinstance(want, Tensor) and want.dtype == torch.complex32):
        return None  # XLA has no complex numbers of two half floats
    found = attempt(op, a.to("jax"), b.to("jax") if isinstance(b, Tensor) else b)
    if isinstance(want, Exception) or isinstance(found, Exception):
        return None if type(want) is type(found) else f"{found!r}, the CPU {want!r}"
    try:
        # An overflowing product of complex numbers is infinite either way; its other part may be nan.
        overflow = want.is_complex() and not want.isfinite().all()
        torch.testing.assert_close(
            found.cpu().isfinite() if overflow else found.cpu(),
            want.isfinite() if overflow else want,
            equal_nan=True,
        )
    except AssertionError:
        return f"{found.cpu()}, the CPU {want}"
    return None


def check(name: str, part: slice) -> None:
    isthmus.config.fallback = "cpu"  # a few odd pairs go there
    wrong = [
        f"{a.dtype}, {b.dtype if isinstance(b, Tensor) else b}: {problem}"
        for a, b in operands()[part]
        if (problem := differs(attempt(OPS[name], a, b), OPS[name], a, b))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", OPS)
def test_some_pairs(name: str) -> None:
    check(name, slice(len(name) % 7, None, 7))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_all_pairs(name: str) -> None:
    check(name, slice(None))


def test_powers_of_integers_wrap_around_at_any_exponent() -> None:
    base = torch.tensor([-3, -1, 0, 1, 2, 3, 2**31 - 1])
    for exponent in (0, 1, 2, 63, 64, 65, 255, 256, 300, 2**31 + 1, 2**62 + 3):
        powers = torch.full_like(base, exponent)
        assert (base.to("jax") ** exponent).tolist() == (base**exponent).tolist()
        assert (base.to("jax") ** powers.to("jax")).tolist() == (base**powers).tolist()


@pytest.mark.parametrize("op", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_softmax_of_integers_is_refused(op: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x = torch.ones(3).to(dtype)
    with pytest.raises(NotImplementedError) as want:
        op(x, 0)
    with pytest.raises(NotImplementedError, match=re.escape(str(want.value))):
        op(x.to("jax"), 0)
    assert op(x.to("jax"), 0, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("given", [torch.tensor([1.0]).half(), torch.tensor([True]), torch.tensor([-1])])
def test_bincount_refuses_what_the_cpu_refuses(given: Tensor) -> None:
    with pytest.raises(RuntimeError) as want:
        torch.bincount(given)
    with pytest.raises(type(want.value), match=re.escape(str(want.value))):
        torch.bincount(given.to("jax"))
