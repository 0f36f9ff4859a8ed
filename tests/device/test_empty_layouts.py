"""New tensors without elements have torch's strides, at the first call and at those that find a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import isthmus
from tests.support import in_mode

SHAPES = [(0,), (0, 0), (0, 3), (3, 0), (0, 1, 2, 0), (2, 0, 3, 0), (1, 0, 1), (2, 3, 0, 4, 5)]
FACTORIES: dict[str, Callable[..., Tensor]] = {
    "empty": torch.empty,
    "zeros": torch.zeros,
    "ones": torch.ones,
    "full": lambda size, **options: torch.full(size, 2.0, **options),
    "rand": torch.rand,
    "randn": torch.randn,
    "randint": lambda size, **options: torch.randint(0, 5, size, **options),
    "normal": lambda size, **options: torch.normal(0.0, 1.0, size, **options),
    "complex": lambda size, **options: torch.randn(size, dtype=torch.complex64, **options),
    "tensor": lambda size, **options: torch.tensor(torch.empty(size).tolist(), **options),
    "moved": lambda size, device: torch.empty(size).to(device),
    "new_full": lambda size, device: torch.empty(1, device=device).new_full(size, 2.0),
    "new_ones": lambda size, device: torch.empty(1, device=device).new_ones(size),
}
LIKE: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in ("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like")
}
LIKE |= {
    "full_like": lambda x: torch.full_like(x, 2.0),
    "randint_like": lambda x: torch.randint_like(x, 5),
    "bernoulli": torch.bernoulli,
    "poisson": torch.poisson,
    "clone": torch.clone,
    "double": Tensor.double,
    "exp": torch.exp,
}


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name: str, mode: str) -> None:
    make = FACTORIES[name]
    for size in SHAPES:
        want = make(size, device="cpu")
        for _ in range(3):
            got = in_mode(lambda size=size: make(size, device="jax"), mode)()
            assert (got.shape, got.stride()) == (want.shape, want.stride()), size


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("name", LIKE)
def test_results_like_another(name: str, mode: str) -> None:
    make = LIKE[name]
    for size in SHAPES:
        want = make(torch.zeros(size))
        given = torch.zeros(size, device="jax")
        for _ in range(3):
            got = in_mode(make, mode)(given)
            assert (got.shape, got.stride()) == (want.shape, want.stride()), size


def test_compiled_and_replayed() -> None:
    def make(x: Tensor) -> list[Any]:
        return [torch.randn(0, 1, 2, 0, device="jax"), torch.ones(2, 0, 3, 0, device="jax") + x]

    for run in (torch.compile(make, backend="isthmus"), isthmus.jit(make)):
        for _ in range(3):
            strides = [t.stride() for t in run(torch.ones((), device="jax"))]
            assert strides == [(2, 2, 1, 1), (3, 3, 1, 1)]
