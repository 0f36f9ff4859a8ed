"""Dtypes are torch's: every one XLA has makes the round trip, promotes as torch promotes, 64 bits are real."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
import torch

from isthmus.errors import MissingLowering

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
PROMOTED = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, *UNSIGNED, *FLOATS, *COMPLEX, *FLOAT8], ids=str)
def test_round_trip(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).to(dtype)
    there = x.to("jax")
    assert there.dtype == dtype
    back = there.cpu()
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("pair", list(itertools.product(PROMOTED, PROMOTED)), ids=lambda p: f"{p[0]}-{p[1]}")
def test_promotion_of_tensors(pair: tuple[torch.dtype, torch.dtype]) -> None:
    a, b = torch.ones(2, dtype=pair[0]), torch.ones(2, dtype=pair[1])
    want = a + b
    got = a.to("jax") + b.to("jax")
    assert got.dtype == want.dtype
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("number", [True, 2, 2.5, 1j], ids=repr)
@pytest.mark.parametrize("dtype", PROMOTED, ids=str)
def test_promotion_of_numbers(dtype: torch.dtype, number: complex) -> None:
    x = torch.ones(3, dtype=dtype)
    if dtype is torch.float16 and isinstance(number, complex) and not isinstance(number, (int, float)):
        with pytest.raises(
            MissingLowering, match=r"no dtype torch\.complex32"
        ):  # XLA has no half complex numbers
            x.to("jax") * number
        return
    got, want = x.to("jax") * number, x * number
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.cpu(), want)
    zero_dim = torch.tensor(number)
    mixed, expected = x.to("jax") * zero_dim, x * zero_dim
    assert mixed.dtype == expected.dtype
    torch.testing.assert_close(mixed.cpu(), expected)


def test_default_dtype_is_part_of_the_key() -> None:
    x = torch.tensor([1, 2]).to("jax")
    assert (x / 2).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x / 2).dtype == torch.float32


def test_64_bits_are_real_and_the_users_switch_is_off() -> None:
    x = torch.tensor([2**40 + 1]).to("jax")
    assert (x + 1).item() == 2**40 + 2
    y = torch.tensor([1.0 + 2**-40], dtype=torch.float64).to("jax")
    assert (y - 1).item() == 2**-40
    assert jnp.arange(3).dtype == jnp.int32
    assert not jax.config.jax_enable_x64


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", [torch.bool, *INTEGERS, *FLOATS, *COMPLEX], ids=str)
def test_casts(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.tensor([-2.7, -0.0, 0.5, 1.0, 3.9], dtype=source)
    assert torch.equal(x.to("jax").to(target).cpu(), x.to(target))


def test_integer_casts_wrap() -> None:
    x = torch.tensor([-1, 255, 256, 2**31, -(2**40)])
    for target in INTEGERS:
        assert torch.equal(x.to("jax").to(target).cpu(), x.to(target))


def test_numbers_keep_their_sign_of_zero_and_their_nan() -> None:
    x = torch.tensor([1.0, -1.0]).to("jax")
    assert torch.signbit((x * 0.0).cpu()).tolist() == [False, True]
    assert torch.signbit((x * -0.0).cpu()).tolist() == [True, False]
    assert (x * float("nan")).isnan().all()


def test_a_dtype_xla_lacks_is_refused() -> None:
    with pytest.raises((TypeError, RuntimeError)):
        torch.zeros(2, dtype=torch.qint8, device="jax")
