"""Random programs of views and writes: after each, every tensor alive must equal CPU torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SHAPES = [(6,), (3, 4), (2, 3, 4), (4, 4), (1, 5), (2, 2, 2, 2), ()]
DTYPES = [torch.float32, torch.float32, torch.int64, torch.bfloat16, torch.complex64]
Pair = tuple[torch.Tensor, torch.Tensor]


class Program:
    """The same steps on the CPU and on the device, driven by hypothesis's choices."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.alive: list[Pair] = []

    def pick(self, options: list[Any]) -> Any:
        return self.data.draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def start(self) -> None:
        shape, dtype = self.pick(SHAPES), self.pick(DTYPES)
        count = int(torch.Size(shape).numel())
        base = torch.arange(1, count + 1).reshape(shape).to(dtype)
        source = self.pick(
            [base, base.mT if base.dim() > 1 else base, base[..., ::2] if base.dim() else base]
        )
        self.alive.append((source.clone(), source.to("jax")))

    def both(self, function: Any, *pairs: Pair) -> Pair | None:
        """Run on both sides; if the CPU refuses, the device must too."""
        try:
            want = function(*[p[0] for p in pairs])
        except (RuntimeError, IndexError, ValueError) as error:
            refused = error
        else:
            return want, function(*[p[1] for p in pairs])
        with pytest.raises((type(refused), RuntimeError)):
            function(*[p[1] for p in pairs])
        return None

    def view(self) -> None:
        pair = self.pick(self.alive)
        function = getattr(self, "_view_" + self.pick(VIEWS))(pair[0])
        made = self.both(function, pair) if function is not None else None
        if made is not None:
            assert made[1].shape == made[0].shape
            assert made[1].stride() == made[0].stride()
            assert made[1].storage_offset() == made[0].storage_offset()
            assert made[1].dtype == made[0].dtype
            self.alive.append(made)

    def _dim(self, x: torch.Tensor) -> int:
        return self.number(-x.dim(), x.dim() - 1) if x.dim() else 0

    def _view_select(self, x: torch.Tensor) -> Any:
        dim, index = self._dim(x), self.number(-3, 3)
        return lambda t: t.select(dim, index)

    def _view_slice(self, x: torch.Tensor) -> Any:
        if not x.dim():
            return None
        start, stop, step = self.number(0, 3), self.number(0, 6), self.number(1, 3)
        return lambda t: t[start:stop:step]

    def _view_last(self, x: torch.Tensor) -> Any:
        start, stop, step = self.number(0, 2), self.number(1, 6), self.number(1, 2)
        return lambda t: t[..., start:stop:step]

    def _view_transpose(self, x: torch.Tensor) -> Any:
        a, b = self._dim(x), self._dim(x)
        return lambda t: t.transpose(a, b)

    def _view_unsqueeze(self, x: torch.Tensor) -> Any:
        dim = self.number(0, x.dim())
        return lambda t: t.unsqueeze(dim)

    def _view_expand(self, x: torch.Tensor) -> Any:
        n = self.number(1, 2)
        return lambda t: t.expand(n, *t.shape)

    def _view_diagonal(self, x: torch.Tensor) -> Any:
        offset = self.number(-1, 1)
        return lambda t: t.diagonal(offset)

    def _view_unfold(self, x: torch.Tensor) -> Any:
        dim, size, step = self._dim(x), self.number(1, 2), self.number(1, 2)
        return lambda t: t.unfold(dim, size, step)

    def _view_flat(self, x: torch.Tensor) -> Any:
        return lambda t: t.view(-1)

    def _view_reshape(self, x: torch.Tensor) -> Any:
        return lambda t: t.reshape(-1, 2)

    def _view_strided(self, x: torch.Tensor) -> Any:
        n, m, a, b, o = (
            self.number(1, 3),
            self.number(1, 2),
            self.number(0, 4),
            self.number(1, 3),
            self.number(0, 2),
        )
        return lambda t: t.as_strided((n, m), (a, b), o)

    def _view_detach(self, x: torch.Tensor) -> Any:
        return lambda t: t.detach()

    def _view_bits(self, x: torch.Tensor) -> Any:
        dtype = self.pick([torch.int32, torch.int16, torch.int8])
        return (lambda t: t.view(dtype)) if not x.dtype.is_complex else torch.view_as_real

    def _view_chunk(self, x: torch.Tensor) -> Any:
        dim = self._dim(x)
        return lambda t: t.chunk(2, dim)[-1]

    def write(self) -> None:
        target = self.pick(self.alive)
        if _overlaps_itself(target[0]) or _denormal(target[0]):
            return
        kind = self.pick(WRITES)
        if kind == "tensor":
            source = self.pick(self.alive)
            if not _disturbs(target[0], source[0]) or _denormal(source[0]):
                return
            name = self.pick(["add_", "copy_", "mul_"])
            self.both(lambda t, s: getattr(t, name)(s), target, source)
        elif kind == "item":
            self.both(lambda t: t.__setitem__(0, 7), target)
        elif kind == "out":
            self.both(lambda t: torch.add(t, 1, out=t), target)
        elif kind == "mask":
            self.both(lambda t: t.masked_fill_(t == t, 2), target)
        else:
            value = self.number(-2, 3)
            self.both(lambda t: getattr(t, kind)(value), target)

    def relayout(self) -> None:
        pair = self.pick(self.alive)
        if pair[0].dim() > 1:
            self.both(lambda t: t.transpose_(0, 1), pair)

    def check(self) -> None:
        for want, got in self.alive:
            torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


VIEWS = [name.removeprefix("_view_") for name in vars(Program) if name.startswith("_view_")]
WRITES = ["tensor", "tensor", "add_", "mul_", "fill_", "item", "out", "mask"]


def _addresses(x: torch.Tensor) -> set[int]:
    width = x.element_size()
    index = torch.full((), x.storage_offset(), dtype=torch.int64)
    for n, s in zip(x.shape, x.stride(), strict=True):
        index = index.unsqueeze(-1) + torch.arange(n) * s
    return {
        x.untyped_storage().data_ptr() + width * i + k
        for i in index.reshape(-1).tolist()
        for k in range(width)
    }


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Whether several elements share memory without a zero stride: torch leaves such writes undefined."""
    expanded = any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))
    return not expanded and len(_addresses(x)) != x.numel() * x.element_size()


def _denormal(x: torch.Tensor) -> bool:
    """Whether integers written through another dtype left numbers that XLA's arithmetic flushes to zero."""
    if not x.is_floating_point():
        return bool(x.is_complex() and _denormal(torch.view_as_real(x)))
    return bool(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).any())


def _disturbs(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the result is defined: the source is apart from the target, or is the target itself."""
    same = (
        target.shape == source.shape and target.stride() == source.stride() and target.dtype == source.dtype
    )
    same = same and target.data_ptr() == source.data_ptr()
    return same or not (_addresses(target) & _addresses(source))


def run(data: st.DataObject, steps: int = 8) -> None:
    program = Program(data)
    program.start()
    for _ in range(steps):
        getattr(program, program.pick(["view", "view", "write", "write", "start", "relayout"]))()
    program.check()


def programs(count: int) -> settings:
    """Return the settings for this many programs, the same ones every time."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        # Shrinking compiles hundreds of programs; the failing one prints its steps instead.
        phases=[Phase.explicit, Phase.generate],
    )


@programs(200)
@given(st.data())
def test_random_programs(data: st.DataObject) -> None:
    run(data)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@programs(2000)
@given(st.data())
def test_many_random_programs(data: st.DataObject) -> None:
    run(data, steps=12)
