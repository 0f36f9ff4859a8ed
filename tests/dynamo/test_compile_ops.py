"""Ops that a graph names whole or with masks and sizes of values: they are in the program all the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus._device.core.fallback import FallbackWarning
from isthmus._dynamo import compile_log


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield
    torch._dynamo.reset()


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function gives, compiled on the device; no node may be outside the program."""
    moved = [arg.to("jax") if isinstance(arg, Tensor) else arg for arg in args]
    return torch.compile(function, backend="isthmus", fullgraph=True)(*moved)


def positive(n: int) -> Tensor:
    """Return a positive definite matrix."""
    x = torch.randn(n, n)
    return x @ x.T + n * torch.eye(n)


COMPOSED: list[tuple[Callable[..., Tensor], Callable[[], tuple[Any, ...]]]] = [
    (torch.cholesky_solve, lambda: (torch.randn(4, 2), torch.linalg.cholesky(positive(4)))),
    (torch.linalg.pinv, lambda: (torch.randn(5, 3),)),
    (torch.nn.functional.bilinear, lambda: (torch.randn(6, 3), torch.randn(6, 4), torch.randn(2, 3, 4))),
    (torch.fft.ihfftn, lambda: (torch.randn(4, 6),)),
    (lambda x: torch.empty_like(x).fill_(2.0) + x, lambda: (torch.randn(3, 4).T,)),
]


@pytest.mark.parametrize(("function", "inputs"), COMPOSED)
def test_an_op_torch_composes_of_others_is_in_the_program(
    function: Callable[..., Tensor], inputs: Callable[[], tuple[Any, ...]]
) -> None:
    args = inputs()
    torch.testing.assert_close(run(function, *args).cpu(), function(*args))


def test_what_a_composed_op_requires_is_required() -> None:
    with pytest.raises(torch.linalg.LinAlgError, match="non-finite"):
        run(torch.linalg.pinv, torch.full((3, 3), float("nan")))


def put(x: Tensor, before: int, mask: Tensor, values: Tensor, accumulate: bool) -> Tensor:
    """Write values where a mask holds, which covers the dims after the first few."""
    return torch.ops.aten.index_put(x, [None] * before + [mask], values, accumulate)


MASKS = [((4, 5), 0, 2), ((4, 5), 1, 1), ((3, 4, 5), 1, 1), ((3, 4, 5), 0, 2), ((3, 0), 0, 1), ((0, 3), 0, 1)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("shape", "before", "dims"), MASKS)
def test_a_write_through_a_mask_is_in_the_program(
    shape: tuple[int, ...], before: int, dims: int, accumulate: bool
) -> None:
    x, mask = torch.randn(shape), torch.rand(shape[before : before + dims]) > 0.4
    picked = (*shape[:before], int(mask.sum()), *shape[before + dims :])
    for values in (torch.randn(()), torch.randn(1), torch.randn(picked), torch.randn(1, *picked[1:])):
        want = put(x, before, mask, values, accumulate)
        torch._dynamo.reset()
        torch.testing.assert_close(run(put, x, before, mask, values, accumulate).cpu(), want)


def test_values_that_do_not_fit_a_mask_are_refused() -> None:
    mask = torch.tensor([True, True, True, False])
    for function in (put, run_put):
        with pytest.raises(RuntimeError, match=r"shape mismatch: value tensor of shape \[2\]"):
            function(torch.zeros(4), 0, mask, torch.ones(2), False)


def run_put(*args: Any) -> Tensor:
    """Write through a mask, compiled."""
    return run(put, *args)


@pytest.mark.parametrize("arguments", [(6,), (1,), (7, False), (8, True, 3.5), (0, False, 3.5)])
def test_a_kaiser_window_is_in_the_program(arguments: tuple[Any, ...]) -> None:
    x = torch.ones(())

    def windowed(x: Tensor) -> Tensor:
        return x * torch.kaiser_window(*arguments, device=x.device)

    torch.testing.assert_close(run(windowed, x).cpu(), windowed(x))
    torch.testing.assert_close(windowed(x.to("jax")).cpu(), windowed(x))


def repeated(x: Tensor, repeats: Tensor) -> Tensor:
    """Repeat rows so that there are four."""
    return torch.repeat_interleave(x, repeats, dim=0, output_size=4)


def test_repeats_whose_sum_is_told_are_in_the_program() -> None:
    x = torch.randn(3, 2)
    repeats = torch.tensor([1, 0, 3])
    assert torch.equal(run(repeated, x, repeats).cpu(), repeated(x, repeats))
    with pytest.raises(RuntimeError, match="allocated size does not match"):
        run(repeated, x, torch.tensor([1, 1, 1]))
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        run(repeated, x, torch.tensor([-1, 2, 3]))


def test_one_value_written_through_a_mask_as_models_do() -> None:
    def zeroed(x: Tensor) -> Tensor:
        y = x.clone()
        y[x > 0] = 0.0
        y[:, x[0] < 0] = 1.0
        return y

    x = torch.randn(4, 5)
    with compile_log.recording() as found:
        got = run(zeroed, x)
    assert torch.equal(got.cpu(), zeroed(x))
    assert len(found.compilations) == 1


def test_recordings_inside_each_other_are_kept_apart() -> None:
    with compile_log.recording() as outer:
        with compile_log.recording() as inner:
            run(torch.sin, torch.ones(2))
        run(torch.cos, torch.ones(3))
    assert (len(inner.graphs), len(outer.graphs)) == (1, 2)


def test_an_assertion_survives_a_cut() -> None:
    def asserting(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._assert_async(((y + 1) * 2 > 0).all(), "must be positive")
        return torch.nonzero(x)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(asserting, backend="isthmus", options={"fallback": "cpu"})
        x = torch.ones(3, device="jax")
        assert compiled(x, torch.ones(2, device="jax")).shape == (3, 1)
        with pytest.raises(RuntimeError, match="must be positive"):
            compiled(x, torch.tensor([-5.0, 1.0], device="jax"))
