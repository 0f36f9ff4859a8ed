"""Conversions between dtypes give the CPU's numbers for every value that rounds, saturates or does not fit."""

from __future__ import annotations

import math
import platform
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import in_mode

FLOAT8 = [d for d in vars(torch).values() if isinstance(d, torch.dtype) and "float8" in str(d)]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
MODES = ["eager", "lazy", "compiled"]
# What a float out of range becomes is the processor's affair: lowerings follow x86.
x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="torch's CPU converts otherwise"
)


def patterns(dtype: torch.dtype) -> Tensor:
    """Return every number of a type of two bytes."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)


def numbers(dtype: torch.dtype) -> Tensor:
    """Return all of a half type; of a wide one those of both half types, and their neighbours."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return patterns(dtype)
    halves = torch.cat([patterns(torch.bfloat16).to(dtype), patterns(torch.float16).to(dtype)])
    up, down = (torch.tensor(way, dtype=dtype) for way in (math.inf, -math.inf))
    return torch.cat([halves, torch.nextafter(halves, up), torch.nextafter(halves, down)])


def large(dtype: torch.dtype) -> Tensor:
    """Return floats on both sides of the limits of every integer type."""
    limits = [2.0**n for n in (7, 8, 15, 16, 31, 32, 53, 62, 63, 64, 70, 100)]
    near = [limit + by for limit in limits for by in (-257, -1, -0.5, 0, 0.5, 1, 257)]
    near += [limit * by for limit in limits for by in (1 - 2**-20, 1 + 2**-20, 1.5)]
    plain = [0.0, 0.4, 0.99, 1.0, 1.5, 3e9, 5e9, 1e19, 1e30, math.inf]
    found = [*near, *plain]
    return torch.tensor([*found, *[-x for x in found], math.nan], dtype=torch.float64).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    """Return what tells two numbers apart: all nans are one."""
    if tensor.dtype.is_floating_point:
        wide = tensor.to(torch.float64)
        return torch.where(wide.isnan(), 1, wide.view(torch.int64))
    return tensor.view(torch.int64) if tensor.dtype.itemsize == 8 else tensor.to(torch.int64)


def check(source: Tensor, targets: list[torch.dtype], mode: str) -> None:
    """Convert ``source`` to each target, and compare with the CPU."""

    def converted(x: Tensor) -> list[Any]:
        return [x.to(target) for target in targets]

    for got, want in zip(in_mode(converted, mode)(source.to("jax")), converted(source), strict=True):
        assert got.dtype == want.dtype
        wrong = bits(got.cpu()) != bits(want)
        assert not wrong.any(), (want.dtype, source[wrong][:5], got.cpu()[wrong][:5], want[wrong][:5])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_float8_rounds_and_saturates(source: torch.dtype, mode: str) -> None:
    check(numbers(source), FLOAT8, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", FLOAT8, ids=str)
def test_float8_becomes_every_other_type(source: torch.dtype, mode: str) -> None:
    check(numbers(source), [*FLOATS, *[d for d in FLOAT8 if d != source], torch.bool], mode)


@pytest.mark.parametrize("source", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers_become_float8(source: torch.dtype) -> None:
    given = torch.tensor([0, 1, 2, 3, 17, 100, 127]).to(source)
    if source in (torch.int32, torch.int64):
        given = torch.cat([given, -given, torch.tensor([449, 1000, 2**20 + 1, -(2**30)]).to(source)])
    check(given, FLOAT8, "eager")


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_numbers_float8_cannot_hold_are_refused(dtype: torch.dtype, mode: str) -> None:
    def made(number: float, device: str) -> Any:
        try:
            return bits(
                in_mode(lambda: torch.full((2,), number, dtype=dtype, device=device), mode)().cpu()
            ).tolist()
        except RuntimeError as error:
            return str(error)

    for number in (
        0.0,
        1.0,
        -1.0,
        448.0,
        449.0,
        1000.0,
        6e4,
        1e6,
        1e39,
        1e-40,
        math.inf,
        -math.inf,
        math.nan,
    ):
        assert made(number, "jax") == made(number, "cpu"), number


@x86
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", [*FLOATS, *FLOAT8], ids=str)
def test_floats_that_integers_cannot_hold(source: torch.dtype, mode: str) -> None:
    given = large(source) if source in FLOATS else numbers(source)
    # The CPU's vectors and its single numbers differ for uint32 out of its range, so there is no answer to agree with.
    targets = [*INTEGERS, *[d for d in UNSIGNED if d != torch.uint32], torch.bool]
    check(given, targets, mode)
    fits = given[(given.float() > -1) & (given.float() < 2.0**31)]
    check(fits, [torch.uint32], mode)


@x86
def test_an_integer_target_takes_what_the_cpu_makes_of_a_float() -> None:
    given = large(torch.float32)
    for dtype in (torch.int32, torch.int64, torch.uint8):
        want, got = torch.zeros(len(given), dtype=dtype), torch.zeros(len(given), dtype=dtype, device="jax")
        want.copy_(given)
        got.copy_(given.to("jax"))
        assert torch.equal(got.cpu(), want)
        got.zero_()[::2] = given.to("jax")[::2]
        want.zero_()[::2] = given[::2]
        assert torch.equal(got.cpu(), want)
