"""A storage that is resized under its tensors: what it no longer holds is neither read nor written.

On the CPU torch reads past the memory, or ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import isthmus


@pytest.fixture(params=["eager", "lazy"], autouse=True)
def in_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    isthmus.set_mode(request.param)
    yield
    isthmus.set_mode("eager")


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: (x + 1).cpu(),
    "in place": lambda x: x.add_(1),
    "fill": lambda x: x.fill_(1),
    "copy to": lambda x: x.copy_(torch.ones(16)),
    "copy from": lambda x: torch.ones(16, device="jax").copy_(x),
    "cpu": lambda x: x.cpu(),
    "item": lambda x: x.sum().item(),
    "clone": lambda x: x.clone(),
    "transpose": lambda x: x.view(4, 4).t().contiguous(),
    "index": lambda x: x[torch.zeros(2, dtype=torch.long, device="jax")],
    "out": lambda x: torch.add(torch.ones(16, device="jax"), 1, out=x),
    "print": repr,
    "numpy": lambda x: x.cpu().numpy(),
    "list": lambda x: torch._foreach_add([x, x], 1),
}


@pytest.mark.parametrize("use", USES)
def test_what_is_gone_is_not_read(use: str) -> None:
    x = torch.arange(16.0, device="jax")
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    assert x.shape == (16,)
    with pytest.raises(RuntimeError, match="storage"):
        USES[use](x)


def test_a_shorter_storage_serves_the_views_it_still_holds() -> None:
    # A tensor with the layout of those below, on a storage of the length they will have.
    assert (torch.arange(8.0, device="jax")[4:] * 2).tolist() == [8, 10, 12, 14]
    x = torch.arange(16.0, device="jax")
    kept, gone = x[4:8], x[12:]
    x.untyped_storage().resize_(32)
    assert (kept * 2).tolist() == [8, 10, 12, 14]
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="needs a storage of 64 bytes, but its storage was resized to 32"
        ):
            (gone * 2).tolist()
        kept.add_(1)  # a write leaves the storage as short as it was
    assert kept.tolist() == [6, 7, 8, 9]


def test_room_given_back_is_written_anew() -> None:
    # As FSDP frees and gathers parameters.
    weight = torch.nn.Parameter(torch.arange(16.0, device="jax"))
    storage = weight.untyped_storage()
    for step in range(2):
        storage.resize_(0)
        storage.resize_(64)
        with torch.no_grad():
            weight.copy_(torch.full((16,), float(step), device="jax"))
        (weight * 2).sum().backward()
        assert weight.tolist() == [step] * 16
    assert weight.grad is not None
    assert weight.grad.tolist() == [4] * 16


def test_compiled_functions_refuse_it_too(in_mode: None) -> None:
    if isthmus.mode() == "lazy":
        return
    x = torch.arange(16.0, device="jax")
    x.untyped_storage().resize_(0)
    for function in (lambda t: t + 1, lambda t: t.add_(1)):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="needs a storage of 64 bytes"):
            torch.compile(function, backend="isthmus")(x)
