"""Inputs are data: cases name an op and its arguments, ``run`` runs them in a mode, ``check`` compares."""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

import isthmus
import tests.cases
from isthmus._device.core.buffer import buffer_of
from isthmus._graph.names import Missing


@dataclass(frozen=True)
class Make:
    """A tensor to be made, the same on every call."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float = -3.0
    high: float = 3.0
    change: tuple[Any, ...] = ()

    def __call__(self) -> torch.Tensor:
        # Not hash(): that of a string differs from process to process.
        seed = zlib.crc32(repr((self.shape, self.dtype, self.low, self.high)).encode())
        g = torch.Generator().manual_seed(seed)
        if self.dtype == torch.bool:
            made = torch.randint(0, 2, self.shape, generator=g).bool()
        elif self.dtype.is_floating_point or self.dtype.is_complex:
            made = (
                torch.rand(self.shape, dtype=torch.float64, generator=g) * (self.high - self.low) + self.low
            )
            if self.dtype.is_complex:
                imag = (
                    torch.rand(self.shape, dtype=torch.float64, generator=g) * (self.high - self.low)
                    + self.low
                )
                made = torch.complex(made, imag)
            made = made.to(self.dtype)
        else:
            low = max(int(self.low), 0) if not self.dtype.is_signed else int(self.low)
            made = torch.randint(low, int(self.high) + 1, self.shape, generator=g).to(self.dtype)
        for change in self.change:
            made = change(made)
        return made

    def then(self, *change: Any) -> Make:
        """The tensor after these functions: ``f32(4, 7).then(lambda t: t.t())``."""
        return Make(self.dtype, self.shape, self.low, self.high, self.change + change)

    def between(self, low: float, high: float) -> Make:
        """The tensor with values in this range; integers include both ends."""
        return Make(self.dtype, self.shape, low, high, self.change)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}{list(self.shape)}".replace(" ", "")


def _maker(dtype: torch.dtype) -> Any:
    return lambda *shape: Make(dtype, shape)


f16, bf16, f32, f64 = (_maker(d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64))
i8, i16, i32, i64, u8 = (_maker(d) for d in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8))
b8, c64, c128 = (_maker(d) for d in (torch.bool, torch.complex64, torch.complex128))


def values(*data: Any, dtype: torch.dtype | None = None) -> Make:
    """A tensor with exactly these elements: ``values([0, 2, 1])``."""
    (only,) = data
    made = torch.tensor(only, dtype=dtype)
    return Make(made.dtype, tuple(made.shape), change=(lambda _: made.clone(),))


@dataclass(frozen=True)
class Case:
    """One call, and the error it must raise if any."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    id: str = ""
    error: type[Exception] | None = None
    match: str = ""
    exact: bool = field(default=False)

    def __str__(self) -> str:
        # A plain function's str holds its address, which differs between the workers that run the tests.
        name = str(self.op).removeprefix("aten.") if isinstance(self.op, OpOverload) else _name(self.op)
        return f"{name}({self.id or ','.join(_short(a) for a in self.args)})"


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or str(function)


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_short(v) for v in value) + "]"
    return str(value)


def case(op: Any, *args: Any, id: str = "", **kwargs: Any) -> Case:
    """A call whose result must agree with torch on the CPU."""
    return Case(op, args, kwargs, id)


def fails(op: Any, *args: Any, error: type[Exception], match: str, id: str = "", **kwargs: Any) -> Case:
    """A call that must raise what torch raises on the CPU."""
    return Case(op, args, kwargs, id or "fails-" + ",".join(_short(a) for a in args), error, match)


def load_families() -> dict[str, list[Case]]:
    """Every case, by the name of its file in tests/cases/."""
    families = {}
    for name in sorted(m.name for m in pkgutil.iter_modules(tests.cases.__path__)):
        cases: list[Case] = importlib.import_module(f"tests.cases.{name}").CASES
        # An older torch lacks some overloads; test_registry.py says which may be missing.
        families[name] = [case for case in cases if not isinstance(case.op, Missing)]
    return families


def build(value: Any) -> Any:
    """Return an argument with its tensors made."""
    if isinstance(value, Make):
        return value()
    if isinstance(value, (list, tuple)):
        return type(value)(build(v) for v in value)
    return value


def to_device(value: Any, device: str) -> Any:
    """Return an argument with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(v, device) for v in value)
    return torch.device(device) if isinstance(value, torch.device) else value


def run(case: Case, mode: str) -> Any:
    """Run a case on the device in one of the modes."""
    args = [to_device(build(a), "jax") for a in case.args]
    kwargs = {k: to_device(build(v), "jax") for k, v in case.kwargs.items()}
    return in_mode(case.op, mode)(*args, **kwargs)


def in_mode(function: Any, mode: str) -> Any:
    """Return a function as a mode runs it."""
    if mode == "eager":
        return function
    if mode == "lazy":
        return _lazily(function)
    assert mode == "compiled", mode
    torch._dynamo.reset()
    return torch.compile(lambda *a, **k: function(*a, **k), backend="isthmus", dynamic=False)


def _lazily(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with isthmus.lazy():
            return function(*args, **kwargs)

    return call


def expected(case: Case, widen: bool = False) -> Any:
    """Run a case on the CPU, in float64 if asked."""
    args = [_widen(build(a)) if widen else build(a) for a in case.args]
    kwargs = {k: _widen(build(v)) if widen else build(v) for k, v in case.kwargs.items()}
    return case.op(*args, **kwargs)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.double()
    if isinstance(value, (list, tuple)):
        return type(value)(_widen(v) for v in value)
    return torch.float64 if value in (torch.float16, torch.bfloat16) else value


def tensors(result: Any) -> list[Any]:
    """Return the tensors of a result, flat."""
    if isinstance(result, (list, tuple)):
        return [t for item in result for t in tensors(item)]
    return [result]


def check(case: Case, got: Any) -> None:
    """Compare with CPU torch: structure, shape, dtype, device, values."""
    want = tensors(expected(case))
    got = tensors(got)
    assert len(got) == len(want)
    half = any(isinstance(w, torch.Tensor) and w.dtype in (torch.float16, torch.bfloat16) for w in want)
    exact = tensors(expected(case, widen=True)) if half else want
    for g, w, e in zip(got, want, exact, strict=True):
        compare(g, w, e)


def compare(got: Any, want: Any, exact: Any = None) -> None:
    """Compare one result; half types may be no further than torch from the float64 answer."""
    if not isinstance(want, torch.Tensor):
        assert got == want, (got, want)
        return
    assert got.device.type == "jax", got.device
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    buffer = buffer_of(got)
    assert buffer.value.shape == buffer.signature.shape  # programs are chosen by the signature
    got = got.cpu()
    if want.dtype not in (torch.float16, torch.bfloat16) or exact is None:
        torch.testing.assert_close(got, want, equal_nan=True)
        return
    step = torch.finfo(want.dtype).eps * exact.double().abs()
    allowed = (want.double() - exact.double()).abs() + step + torch.finfo(want.dtype).tiny
    distance = (got.double() - exact.double()).abs()
    fine = (distance <= allowed) | (got == want) | (got.isnan() & want.isnan())
    assert fine.all(), (got[~fine], want[~fine], exact[~fine])
