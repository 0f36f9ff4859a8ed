"""Numbers that do not fit are refused as on the CPU, also by plans that ran for others; the rest wrap around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import isthmus
from isthmus._upstream import release

Call = Callable[[Tensor, Any], Any]
CALLS: dict[str, Call] = {
    "fill_": lambda x, n: x.fill_(n),
    "full": lambda x, n: torch.full((2,), n, dtype=x.dtype, device=x.device),
    "full_like": torch.full_like,
    "new_full": lambda x, n: x.new_full((2,), n),
    "masked_fill": lambda x, n: x.masked_fill(x == 0, n),
    "index_fill": lambda x, n: x.index_fill(0, torch.zeros(1, dtype=torch.int64, device=x.device), n),
    "scatter": lambda x, n: x.scatter(0, torch.zeros(1, dtype=torch.int64, device=x.device), n),
    "clamp": lambda x, n: x.clamp(max=n),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "pad": lambda x, n: torch.nn.functional.pad(x, (1, 1), value=n),
    "setitem": lambda x, n: x.__setitem__(0, n),
    "where": lambda x, n: torch.where(x == 0, x, n),
    "add": lambda x, n: x + n,
    "add_": lambda x, n: x.add_(n),
    "mul": lambda x, n: x * n,
    "eq": lambda x, n: x == n,
    "pow": lambda x, n: x**n,
    "pow of a list": lambda x, n: torch._foreach_pow([x], n)[0],
    "floor_divide": lambda x, n: x // n,
    "remainder": lambda x, n: x % n,
    "fmod": torch.fmod,
    "divide": lambda x, n: x / n,
    "divide with a mode": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
}
NUMBERS: dict[torch.dtype, list[Any]] = {
    torch.int8: [2, 300, -300, -1, 0, 2.5, float("nan"), 2**40],
    torch.uint8: [2, -1, -300, 300, 0],
    torch.int64: [2, 2**63, -1, 0, float("inf")],
    torch.float16: [2, 1e6, -1e9, float("inf"), float("nan"), 2**40, 0],
    torch.float32: [2, 1e300, float("-inf"), 1j, 0],
}


def outcome(call: Call, x: Tensor, number: Any) -> Any:
    """Return what a call makes of a number, or how it refuses; and what it leaves in the tensor."""
    try:
        found = call(x, number)
        seen = found.tolist() if isinstance(found, Tensor) else found
    except Exception as error:
        seen = (type(error), str(error))
    return repr(seen), repr(x.tolist())


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_numbers_are_refused_as_on_the_cpu(name: str, dtype: torch.dtype, mode: str) -> None:
    call = CALLS[name]
    isthmus.config.fallback = "cpu"
    for number in NUMBERS[dtype]:  # the first one compiles
        if name == "pad" and number == 2**63:
            continue  # torch makes a double of it, and no int64 can be made of that
        if name == "clamp" and number != number and release(torch.__version__) < (2, 13):
            continue  # the CPU's kernel for half types leaves the values as they are
        want = outcome(call, torch.tensor([0, 5], dtype=dtype), number)
        with isthmus.lazy() if mode == "lazy" else torch.enable_grad():
            got = outcome(call, torch.tensor([0, 5], dtype=dtype).to("jax"), number)
        assert got == want, number


def test_a_number_under_jit_is_refused_while_it_is_recorded() -> None:
    x = torch.zeros(2, dtype=torch.int8, device="jax")
    with pytest.raises(RuntimeError, match="value cannot be converted to type int8_t without overflow"):
        isthmus.jit(lambda x: x.masked_fill(x == 0, 300))(x)
    assert x.tolist() == [0, 0]
