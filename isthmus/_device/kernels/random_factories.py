"""Random calls whose numbers are run-time inputs: torch's conditions on them are checked before each call.

A plan serves every ``std`` and every ``p``, so the numbers cannot be checked when the key is new. The tests here only
decide whether to ask the CPU (``checks/ask_cpu.py``), whose error is raised; they may ask too often, never too rarely::

    x.normal_(0.0, 2.0)      _normal(x, 0.0, 2.0) is True: the kernel runs
    x.normal_(0.0, -1.0)     False: the CPU is asked, and raises "normal expects std >= 0.0, but found std -1"

``_VALID`` has the test of each op that has a lowering, ``_LIKE`` those of forms that fill a new tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isthmus._device.checks import ask_cpu
from isthmus._device.core.dispatch import kernel_for
from isthmus._graph.names import Missing, aten, overload_named
from isthmus._graph.private import OpOverload
from isthmus._graph.schema import schema_of


def checked(op: OpOverload, valid: Callable[..., bool]) -> Callable[..., Any]:
    """Return the kernel of ``op`` behind a test of its arguments; what fails it, the CPU refuses."""

    def call(*args: Any, **kwargs: Any) -> Any:
        # The CPU is asked only about doubtful numbers, and it may accept them.
        if not valid(*args, **kwargs):
            ask_cpu.raise_cpu_error(op, schema_of(op).ordered(args, kwargs))
        return kernel_for(op)(*args, **kwargs)

    return call


def _continuous(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _uniform(self: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> bool:
    if not _continuous(self.dtype):
        return False
    # The width must be finite too, or the sum of its ends overflows.
    largest = torch.finfo(self.dtype).max
    return -largest <= low <= high <= largest and high - low <= largest


def _normal(self: Any, mean: float = 0.0, std: float = 1.0, **_: Any) -> bool:
    return std >= 0 and (not isinstance(self, Tensor) or _continuous(self.dtype))


def _normal_around(mean: Tensor, std: float = 1.0, **_: Any) -> bool:
    return std >= 0 and _continuous(mean.dtype)


def _normal_new(mean: float, std: float, size: Any, *, dtype: Any = None, **_: Any) -> bool:
    return std >= 0 and (dtype is None or _continuous(dtype))


def _exponential(self: Tensor, lambd: float = 1.0, **_: Any) -> bool:
    return lambd > 0 and self.is_floating_point()


def _positive_width(self: Tensor, center: float = 0.0, width: float = 1.0, **_: Any) -> bool:
    return width > 0 and self.is_floating_point()


def _geometric(self: Tensor, p: float, **_: Any) -> bool:
    return 0 < p < 1


def _bernoulli(self: Tensor, p: float = 0.5, **_: Any) -> bool:
    return 0 <= p <= 1


def _floating(self: Tensor, *_: Any, **__: Any) -> bool:
    return self.is_floating_point()


def _bernoulli_by(self: Tensor, p: Tensor, **_: Any) -> bool:
    return p.is_floating_point()


def _fits(dtype: torch.dtype, low: int, high: int | None) -> bool:
    """Return whether ``dtype`` holds every integer end of [low, high)."""
    if dtype == torch.bool:
        least, largest = 0, 1
    elif dtype.is_floating_point:
        least, largest = int(torch.finfo(dtype).min), int(torch.finfo(dtype).max)
    elif dtype.is_complex:
        return False
    else:
        least, largest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if high is None:
        return least <= low < largest
    return low < high and least <= low and high - 1 <= largest


def _random_from(self: Tensor, low: int, high: int | None, **_: Any) -> bool:
    return _fits(self.dtype, low, high)


def _random_to(self: Tensor, high: int, **_: Any) -> bool:
    return _fits(self.dtype, 0, high)


def _randint(high: int, size: Any, *, dtype: Any = None, **_: Any) -> bool:
    return _fits(dtype or torch.int64, 0, high)


def _randint_low(low: int, high: int, size: Any, *, dtype: Any = None, **_: Any) -> bool:
    return _fits(dtype or torch.int64, low, high)


def _randint_like(self: Tensor, high: int, *, dtype: Any = None, **_: Any) -> bool:
    return _fits(dtype or self.dtype, 0, high)


def _randint_like_low(self: Tensor, low: int, high: int, *, dtype: Any = None, **_: Any) -> bool:
    return _fits(dtype or self.dtype, low, high)


def _rand(size: Any, *, dtype: Any = None, **_: Any) -> bool:
    return dtype is None or _continuous(dtype)


def _rand_like(self: Tensor, *, dtype: Any = None, **_: Any) -> bool:
    return _continuous(dtype or self.dtype)


def _randperm(n: int, *, dtype: Any = None, **_: Any) -> bool:
    dtype = dtype or torch.int64
    return n >= 0 and (dtype in (torch.int64, torch.float64) or (not dtype.is_complex and _exact(dtype) >= n))


def _exact(dtype: torch.dtype) -> int:
    """Return up to how large an ``n`` the dtype holds the permutation of."""
    if dtype.is_floating_point:
        # Up to there every integer has a float of its own.
        return int(2 / torch.finfo(dtype).eps) + 1
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _multinomial(self: Tensor, num_samples: int, replacement: bool = False, **_: Any) -> bool:
    # torch's own limit on the number of categories is 2**24.
    if not self.is_floating_point() or self.dim() not in (1, 2) or not 0 < self.size(-1) <= 2**24:
        return False
    return num_samples > 0 and (replacement or num_samples <= self.size(-1))


def _elsewhere(kernel: Callable[..., Any], fill: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel of ``rand_like`` that also answers a call for a tensor on another device."""

    def call(self: Tensor, *args: Any, device: Any = None, generator: Any = None, **kwargs: Any) -> Any:
        # ``rand_like`` of a tensor on another device, or for one.
        if device is None or torch.device(device).type == "jax":
            drawn_from = {} if generator is None else {"generator": generator}
            return kernel(self, *args, **drawn_from, **kwargs)
        return fill(torch.empty_like(self, device=device, **kwargs), *args, generator=generator)

    return call


def _randperm_out(n: int, *, generator: Any = None, out: Tensor) -> Tensor:
    permutation = torch.randperm(n, generator=generator, dtype=out.dtype, device=out.device)
    return out.resize_(permutation.shape).copy_(permutation)


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Drop elements in one program forward and one backward, where torch's composite takes four ops."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p:g}")
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1 and not _continuous(input.dtype):
        return input.mul(0)  # of integers torch can drop all, and not some
    return torch.native_dropout(input, p, True)[0]


_VALID: dict[OpOverload, Callable[..., bool]] = {
    aten.uniform_.default: _uniform,
    aten.normal_.default: _normal,
    aten.normal.Tensor_float: _normal_around,
    aten.normal.float_float: _normal_new,
    aten.exponential_.default: _exponential,
    aten.log_normal_.default: _positive_width,
    aten.cauchy_.default: _positive_width,
    aten.geometric_.default: _geometric,
    aten.bernoulli_.float: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.default: _floating,
    aten.bernoulli_.Tensor: _bernoulli_by,
    aten.poisson.default: _floating,
    getattr(aten.random_, "from"): _random_from,
    aten.random_.to: _random_to,
    aten.rand.default: _rand,
    aten.rand.generator: _rand,
    aten.randn.default: _rand,
    aten.randn.generator: _rand,
    aten.randint.default: _randint,
    aten.randint.generator: _randint,
    aten.randint.low: _randint_low,
    aten.randint.low_generator: _randint_low,
    aten.randperm.default: _randperm,
    aten.randperm.generator: _randperm,
    aten.multinomial.default: _multinomial,
}
_LIKE: dict[str, tuple[Callable[..., bool], Callable[..., Any]]] = {
    "rand_like": (_rand_like, Tensor.uniform_),
    "rand_like.generator": (_rand_like, Tensor.uniform_),
    "randn_like": (_rand_like, Tensor.normal_),
    "randn_like.generator": (_rand_like, Tensor.normal_),
    "randint_like": (_randint_like, Tensor.random_),
    "randint_like.generator": (_randint_like, Tensor.random_),
    "randint_like.low_dtype": (_randint_like_low, Tensor.random_),
    "randint_like.low_generator_dtype": (_randint_like_low, Tensor.random_),
}


def _kernels() -> dict[str, Callable[..., Any]]:
    kernels: dict[str, Callable[..., Any]] = {
        op.name().removeprefix("aten::"): checked(op, v)
        for op, v in _VALID.items()
        if not isinstance(op, Missing)
    }
    for name, (valid, fill) in _LIKE.items():
        op = overload_named(f"aten::{name}")
        if not isinstance(op, Missing):
            kernels[name] = _elsewhere(checked(op, valid), fill)
    kernels["randperm.generator_out"] = _randperm_out
    kernels["dropout"] = dropout
    return kernels


KERNELS = _kernels()
# The composite would be differentiated op by op; this one leaves it to native_dropout.
AUTOGRAD_KERNELS = {"dropout": dropout}
