"""``out=`` and ``resize_`` of views: the target grows or shrinks on the storage it has, and the rest of that is kept.

Every tensor of a storage is compared with the CPU's: the base, its siblings, and one of another dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import isthmus
from tests.support import in_mode

Views = tuple[Tensor, ...]
Call = Callable[[Tensor, Tensor], Any]

# What a base shows, and which view of it is the target, first.
LAYOUTS: dict[str, Callable[[Tensor], Views]] = {
    "from its start": lambda t: (t[:2],),
    "from the middle": lambda t: (t[3:5], t[:4], t[5:]),
    "to the end": lambda t: (t[-1:], t[:-1]),
    "every other": lambda t: (t[1::2], t[::2]),
    "none of it": lambda t: (t[6:6], t[4:8]),
    "of two dims": lambda t: (t.view(4, 3)[2], t.view(4, 3).t()),
    "transposed": lambda t: (t.view(3, 4).t()[1:3, 1:], t.view(3, 4)),
    "all of it": lambda t: (t.view(2, 6),),
    "one element": lambda t: (t[4], t[3:6]),
}
# Small enough for the storage, as long as it, and too long.
CALLS: dict[str, Call] = {
    "sub, short": lambda out, x: torch.sub(x[:4].view(2, 2), 3.5, out=out),
    "add, of another layout": lambda out, x: torch.add(x[:6].view(2, 3).t(), 1, out=out),
    "mul, as long": lambda out, x: torch.mul(x[:12], 2, out=out),
    "neg, longer": lambda out, x: torch.neg(x.view(5, 4), out=out),
    "cat": lambda out, x: torch.cat([x[:3], x[5:7]], out=out),
    "sum": lambda out, x: torch.sum(x[:8].view(2, 4), 0, out=out),
    "mm": lambda out, x: torch.mm(x[:6].view(3, 2), x[:4].view(2, 2), out=out),
    "index_select": lambda out, x: torch.index_select(
        x, 0, torch.tensor([1, 0, 3], device=x.device), out=out
    ),
    "masked_select": lambda out, x: torch.masked_select(x, x > 3, out=out),
    "arange": lambda out, x: torch.arange(7, out=out),
    "nothing": lambda out, x: torch.add(x[:0], 1, out=out),
    "resize_": lambda out, x: out.resize_(2, 3),
    "resize_, shorter": lambda out, x: out.resize_(1),
    "resize_as_": lambda out, x: out.resize_as_(x[:8].view(4, 2).t()),
}


def views_of(layout: str, call: str, device: str, mode: str = "eager") -> list[tuple[Any, ...]]:
    """Return what is left of a base, its views and its bytes once a call has resized one of them."""
    base = torch.arange(12.0).to(device)
    x = (torch.arange(20.0) - 8).to(device)
    target, *others = LAYOUTS[layout](base)
    shown = [base, *others, base.view(torch.int32), base.view(torch.int16)[3:9]]
    in_mode(lambda: CALLS[call](target, x), mode)()
    # What a storage is lengthened by has no value until it is written to.
    kept = [] if call.startswith("resize") else [target]
    return [
        (tuple(target.shape), target.stride(), target.storage_offset()),
        *[(t.dtype, tuple(t.shape), t.tolist()) for t in [*shown, *kept]],
    ]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_is_resized_on_its_storage(layout: str, call: str, mode: str) -> None:
    want, got = views_of(layout, call, "cpu"), views_of(layout, call, "jax", mode)
    if 0 in want[0][0]:  # strides that say nothing
        want[0], got[0] = want[0][:1], got[0][:1]
    assert got == want


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("call", ["sub, short", "neg, longer", "mul, as long", "resize_"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_function_that_resizes_is_replayed_or_refused(layout: str, call: str) -> None:
    def program(base: Tensor, x: Tensor) -> Tensor:
        base = base + 0
        target = LAYOUTS[layout](base)[0]
        CALLS[call](target, x)
        return base * 2 if call == "resize_" else base * 2 + target.sum()

    fast = isthmus.jit(program)
    for step in range(3):
        base, x = torch.arange(12.0) + step, torch.arange(20.0) - step
        want = program(base, x)
        assert fast(base.to("jax"), x.to("jax")).tolist() == want.tolist()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_argument_that_is_resized_is_resized_at_every_call(layout: str) -> None:
    def program(target: Tensor, x: Tensor) -> None:
        torch.sub(x[:4].view(2, 2), 3.5, out=target)

    fast = isthmus.jit(program)
    for step in range(3):
        found = []
        for device, run in (("cpu", program), ("jax", fast)):
            base, x = (torch.arange(12.0) + step).to(device), (torch.arange(20.0) - step).to(device)
            target = LAYOUTS[layout](base)[0]
            try:
                run(target, x)
            except isthmus.errors.JitError:
                return  # what cannot be replayed says so
            found.append((base.tolist(), tuple(target.shape), target.tolist()))
        assert found[0] == found[1]


def test_targets_that_share_a_storage_are_resized_one_after_another() -> None:
    found = []
    for device in ("cpu", "jax"):
        base = torch.arange(12.0).to(device)
        x = torch.arange(6.0).view(2, 3).to(device)
        low, high = base[:1], base[6:7]
        torch.aminmax(x, dim=0, out=(low, high))
        found.append((base.tolist(), low.tolist(), high.tolist()))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore")
def test_a_target_that_is_given_twice(strict_fallback: None) -> None:
    """It cannot have the sizes of both results."""
    isthmus.config.fallback = "cpu"
    out, x = torch.zeros(9, device="jax"), torch.ones(2, 3, device="jax")
    with pytest.raises(IndexError):
        torch.svd(x, out=(torch.zeros(0, device="jax"), out, out))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8, torch.complex64, torch.bool])
def test_a_target_of_another_dtype_than_its_storage(dtype: torch.dtype) -> None:
    found = []
    for device in ("cpu", "jax"):
        base = torch.arange(12.0).to(device)
        target = base.view(torch.uint8)[16:32].view(dtype)
        with pytest.warns(UserWarning, match="was resized"):
            torch.add(
                torch.ones(3, dtype=dtype).to(device), torch.ones(3, dtype=dtype).to(device), out=target
            )
        found.append((base.view(torch.uint8).tolist(), target.tolist()))
    assert found[0] == found[1]
