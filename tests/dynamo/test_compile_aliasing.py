"""torch.compile(backend="isthmus"): what is written, what is shared and what is returned is what eager says.

Each case is a function and its arguments. It runs eagerly on the CPU and compiled on a device, several times on the
same arguments; after each call everything a program could see is compared: values, layouts, which tensor is which,
who shares memory with whom, gradients. At the end every tensor is written to, and all the others are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
Make = Callable[..., Tensor]
CALLS = 3

RETYPED = "a view of another dtype is stored on its own"


@dataclass(frozen=True)
class Case:
    """A function, how its arguments are made, under what it is called, and why it fails if it does."""

    name: str
    function: Callable[..., Any]
    make: Callable[[Make], tuple[Any, ...]]
    under: Callable[[], AbstractContextManager[Any]] = nullcontext
    gap: str = ""


def maker(device: str) -> Make:
    """Return a function that makes tensors of distinct numbers on a device."""
    count = 0

    def make(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
        nonlocal count
        count += 1
        numbers = torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape) * 0.25 + count
        return numbers.to(dtype).to(device).requires_grad_(grad)

    return make


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results, those of modules too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, nn.Module):
        yield from tensors([*value.parameters(), *value.buffers()])


def skeleton(value: Any) -> Any:
    """Return a result with its tensors left out."""
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, (list, tuple)):
        return type(value)(skeleton(item) for item in value)
    if isinstance(value, dict):
        return {name: skeleton(item) for name, item in value.items()}
    return value


def layout(t: Tensor) -> tuple[Any, ...]:
    """Return what is promised about a tensor besides its values."""
    return tuple(t.shape), t.stride(), t.dtype, t.requires_grad, t.is_leaf


def contents(found: list[Tensor]) -> list[Tensor]:
    """Return copies of the values on the host."""
    with torch.no_grad():
        return [t.detach().cpu().clone() for t in found]


def sharing(found: list[Tensor]) -> list[int]:
    """Return for each tensor the first that shares its storage."""
    storages = [t.untyped_storage()._cdata for t in found]
    return [storages.index(storage) for storage in storages]


def identity(found: list[Tensor]) -> list[int]:
    """Return for each tensor the first that is the same object."""
    names = [id(t) for t in found]
    return [names.index(name) for name in names]


def observe(args: Any, result: Any) -> dict[str, Any]:
    """Return everything a program can see after a call."""
    found = [*tensors(args), *tensors(result)]
    return {
        "structure": skeleton(result),
        "layouts": [layout(t) for t in found],
        "values": contents(found),
        "sharing": sharing(found),
        "identity": identity(found),
        "gradients": [
            None if t.grad is None else t.grad.detach().cpu().clone() for t in tensors(args) if t.is_leaf
        ],
    }


def written(args: Any, result: Any) -> list[Any]:
    """Write to the first element of one tensor after another; return what all of them show then."""
    seen: list[Any] = []
    found = [*tensors(args), *tensors(result)]
    for t in found:
        if t.numel():
            with torch.inference_mode(t.is_inference()), torch.no_grad():
                t.detach()[(0,) * t.dim()].copy_(torch.tensor(1))
        seen.append(contents(found))
    return seen


def run(case: Case, device: str, backend: str | None) -> list[Any]:
    """Run a case several times on the same arguments; return what was seen."""
    args = case.make(maker(device))
    function = torch.compile(case.function, backend=backend) if backend else case.function
    seen: list[Any] = []
    for _ in range(CALLS):
        with case.under():
            result = function(*args)
        seen.append(observe(args, result))
        loss = [t.sum() for t in tensors(result) if t.requires_grad]
        if loss:
            sum(loss).backward()  # type: ignore[union-attr]
            seen.append(observe(args, result))
    seen.append(written(args, result))
    return seen


def same(got: Any, want: Any, where: str = "") -> None:
    """Compare what was seen, item by item."""
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want, msg=lambda m: f"{where}: {m}")
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for name in want:
            same(got[name], want[name], f"{where}.{name}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), (where, got, want)
        for at, (one, other) in enumerate(zip(got, want, strict=True)):
            same(one, other, f"{where}[{at}]")
    else:
        assert got == want, (where, got, want)


def split(base: Tensor, *views: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """Return several views of one tensor."""
    return tuple(view(base) for view in views)


# ---- writes to arguments


def add_and_return(x: Tensor) -> Tensor:
    return x.add_(1)


def add_only(x: Tensor) -> None:
    x.add_(1)


def twice(x: Tensor) -> Tensor:
    x.mul_(2)
    y = x + 1
    x.mul_(3)
    return y * x


def through(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Write through a view taken inside the function; return something computed afterwards."""

    def function(x: Tensor) -> Tensor:
        view(x).mul_(2).add_(1)
        return x * 2

    return function


def first_written(x: Tensor, y: Tensor) -> Tensor:
    before = y * 2
    x.mul_(3)
    return before + y


def both_written(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    y.add_(x.sum())
    return x.sum() + y.sum()


def both_written_separately(x: Tensor, y: Tensor) -> None:
    x.mul_(2)
    y.add_(1)


def both_returned(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x.mul_(2)
    return x, y, y + 1


def base_and_view(base: Tensor, view: Tensor) -> tuple[Tensor, Tensor]:
    view.add_(10)
    return base.sum(), view


def base_written(base: Tensor, view: Tensor) -> Tensor:
    base.add_(10)
    return view * 2


def swap(x: Tensor, y: Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def overlapping_copy(x: Tensor) -> Tensor:
    x[1:].copy_(x[:-1].clone())
    return x


def out_variant(x: Tensor, out: Tensor) -> Tensor:
    torch.add(x, 1, out=out)
    return out


def cache_copy(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache.index_copy_(1, at, new)
    return cache.sum(1)


def cache_slice(cache: Tensor, new: Tensor) -> Tensor:
    cache[:, 2:3] = new
    return cache


def cache_position(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache[:, at] = new
    return cache[:, : int(cache.shape[1])] * 1.0


def cache_position_mean(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache.select(0, 0).index_put_((at,), new)
    return cache.mean()


def masked_write(x: Tensor) -> Tensor:
    x[x > 3] = 0
    return x


def scatter_write(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
    return x.scatter_add_(0, index, source)


def foreach_write(a: Tensor, b: Tensor) -> None:
    torch._foreach_mul_([a, b], 2)
    torch._foreach_add_([a, b], [a.clone(), a.clone()])


def fill_written(x: Tensor) -> Tensor:
    x.zero_()
    return x + 1


def dtype_write(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(y)
    return x


def transposed_argument(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.t().contiguous() + 1


def detached_write(x: Tensor) -> Tensor:
    x.detach().add_(1)
    return x * 2


def data_written(x: Tensor) -> Tensor:
    x.data.add_(1)
    return x * 2


WRITES = [
    Case("returned", add_and_return, lambda t: (t(4),)),
    Case("not returned", add_only, lambda t: (t(4),)),
    Case("twice", twice, lambda t: (t(2, 3),)),
    Case("scalar", add_and_return, lambda t: (t(),)),
    Case("empty", add_and_return, lambda t: (t(0, 3),)),
    Case("int64", add_and_return, lambda t: (t(4, dtype=torch.int64),)),
    Case("bool", lambda x: x.logical_not_(), lambda t: (t(4) > 1.6,)),
    Case("bfloat16", add_and_return, lambda t: (t(4, dtype=torch.bfloat16),)),
    Case("complex", add_and_return, lambda t: (t(4, dtype=torch.complex64),)),
    Case("through slice", through(lambda x: x[1:3]), lambda t: (t(4, 3),)),
    Case("through steps", through(lambda x: x[::2, 1:]), lambda t: (t(5, 4),)),
    Case("through transpose", through(lambda x: x.t()), lambda t: (t(3, 4),)),
    Case("through select", through(lambda x: x[1]), lambda t: (t(3, 4),)),
    Case("through diagonal", through(lambda x: x.diagonal()), lambda t: (t(3, 4),)),
    Case(
        "through as_strided", through(lambda x: torch.as_strided(x, (2, 2), (4, 1), 1)), lambda t: (t(3, 4),)
    ),
    Case("through view", through(lambda x: x.view(6, 2)), lambda t: (t(3, 4),)),
    Case("through unbind", through(lambda x: x.unbind(1)[2]), lambda t: (t(3, 4),)),
    Case("through split", through(lambda x: x.split(2, 1)[1]), lambda t: (t(3, 4),)),
    Case(
        "through view of other type",
        through(lambda x: x.view(torch.int32).bitwise_and(1).view(torch.float32)),
        lambda t: (t(4),),
    ),
    Case("through real", through(torch.real), lambda t: (t(4, dtype=torch.complex64),)),
    Case("through view_as_real", through(torch.view_as_real), lambda t: (t(4, dtype=torch.complex64),)),
    Case("argument is slice", add_and_return, lambda t: (t(6)[2:5],)),
    Case("argument is transposed", add_and_return, lambda t: (t(3, 4).t(),)),
    Case("argument is column", add_and_return, lambda t: (t(3, 4)[:, 1],)),
    Case("argument has steps", transposed_argument, lambda t: (t(6, 8)[::2, 1::3],)),
    Case("argument is as_strided", add_and_return, lambda t: (t(12).as_strided((2, 3), (5, 1), 1),)),
    Case("argument is transposed, computed", transposed_argument, lambda t: (t(3, 4).t(),)),
    Case(
        "argument is channels last",
        add_and_return,
        lambda t: (t(1, 2, 3, 3).contiguous(memory_format=torch.channels_last),),
    ),
    Case("overlapping, first", first_written, lambda t: split(t(6), lambda b: b[:4], lambda b: b[2:])),
    Case("overlapping, both", both_written, lambda t: split(t(6), lambda b: b[:4], lambda b: b[2:])),
    Case("overlapping, returned", both_returned, lambda t: split(t(6), lambda b: b[:4], lambda b: b[2:])),
    Case(
        "overlapping, shifted offsets",
        both_returned,
        lambda t: split(t(9), lambda b: b[2:6], lambda b: b[4:]),
    ),
    Case(
        "disjoint, both",
        both_written_separately,
        lambda t: split(t(6), lambda b: b[:3], lambda b: b[3:]),
    ),
    Case("disjoint, used", both_written, lambda t: split(t(6), lambda b: b[:3], lambda b: b[3:])),
    Case("disjoint, returned", both_returned, lambda t: split(t(6), lambda b: b[:3], lambda b: b[3:])),
    Case("disjoint columns", both_written, lambda t: split(t(4, 2), lambda b: b[:, 0], lambda b: b[:, 1])),
    Case("disjoint, swapped", swap, lambda t: split(t(6), lambda b: b[:3], lambda b: b[3:])),
    Case(
        "transpose and base, view written",
        base_and_view,
        lambda t: split(t(3, 4), lambda b: b, lambda b: b.t()),
    ),
    Case("slice and base, view written", base_and_view, lambda t: split(t(6), lambda b: b, lambda b: b[2:4])),
    Case("slice and base, base written", base_written, lambda t: split(t(6), lambda b: b, lambda b: b[2:4])),
    Case("slice and base, reversed", base_written, lambda t: split(t(6), lambda b: b[2:4], lambda b: b)),
    Case(
        "as_strided and base",
        base_and_view,
        lambda t: split(t(3, 4), lambda b: b, lambda b: b.as_strided((2, 2), (4, 2), 1)),
    ),
    Case("same tensor twice", first_written, lambda t: split(t(4), lambda b: b, lambda b: b)),
    Case("same tensor twice, both written", both_written, lambda t: split(t(4), lambda b: b, lambda b: b)),
    Case("same tensor twice, returned", both_returned, lambda t: split(t(4), lambda b: b, lambda b: b)),
    Case("alias of the same layout", both_written, lambda t: split(t(4), lambda b: b, lambda b: b.view(4))),
    Case("detached alias", first_written, lambda t: split(t(4), lambda b: b, lambda b: b.detach())),
    Case(
        "three views",
        lambda x, y, z: (x.add_(1), y.mul_(z.sum()), z.sub_(x.sum()))[1] * 2,
        lambda t: split(t(9), lambda b: b[:4], lambda b: b[3:6], lambda b: b[5:8]),
    ),
    Case("swap", swap, lambda t: (t(4), t(4))),
    Case("copy within", overlapping_copy, lambda t: (t(5),)),
    Case("out=", out_variant, lambda t: (t(4), t(4))),
    Case("out= of a view", out_variant, lambda t: (t(3), t(6)[1:4])),
    Case("out= is the input", out_variant, lambda t: split(t(4), lambda b: b, lambda b: b)),
    Case("cache, index_copy_", cache_copy, lambda t: (t(2, 5, 3), t(1).long(), t(2, 1, 3))),
    Case("cache, slice", cache_slice, lambda t: (t(2, 5, 3), t(2, 1, 3))),
    Case("cache, position", cache_position, lambda t: (t(2, 5, 3), t(1).long(), t(2, 1, 3))),
    Case("cache, position in a view", cache_position_mean, lambda t: (t(2, 5, 3), t(2).long(), t(2, 3))),
    Case("masked", masked_write, lambda t: (t(3, 4),)),
    Case("scatter_add_", scatter_write, lambda t: (t(5), torch.zeros_like(t(3)).long(), t(3))),
    Case("foreach", foreach_write, lambda t: (t(3), t(3))),
    Case("zero_", fill_written, lambda t: (t(3),)),
    Case("copy_ of another type", dtype_write, lambda t: (t(3, dtype=torch.int64), t(3))),
    Case("copy_ broadcast", dtype_write, lambda t: (t(2, 3), t(3))),
    Case("through detach", detached_write, lambda t: (t(3),)),
    Case("through detach, with gradient", detached_write, lambda t: (t(3, grad=True),)),
    Case("through .data", data_written, lambda t: (t(3, grad=True),)),
    Case("of an argument nobody reads", lambda x, y: y.fill_(2), lambda t: (t(3), t(3))),
    Case("expression of the old value returned", lambda x: (x * 2, x.add_(1), x * 2), lambda t: (t(3),)),
    Case("view taken before", lambda x: (x[1:], x.add_(1))[0], lambda t: (t(3),)),
    Case("fill diagonal", lambda x: x.fill_diagonal_(7.0), lambda t: (t(3, 3),)),
    Case("transpose_", lambda x: x.t_(), lambda t: (t(3, 4),)),
    Case("squeeze_", lambda x: x.squeeze_(0), lambda t: (t(1, 4),)),
    Case("unsqueeze_ on intermediate", lambda x: (x + 1).unsqueeze_(0).add_(2), lambda t: (t(4),)),
    Case("nothing changed", lambda x: x.add_(0), lambda t: (t(4),)),
    Case(
        "dict and list",
        lambda d, l: {"a": d["a"].add_(1), "b": [l[0].mul_(2), l[1]]},
        lambda t: ({"a": t(2)}, [t(3), t(4)]),
    ),
]


# ---- what is returned

RESULTS = [
    Case("argument", lambda x: x, lambda t: (t(3),)),
    Case("argument with another result", lambda x: (x, x + 1), lambda t: (t(3),)),
    Case("argument that requires grad", lambda x: (x, x + 1), lambda t: (t(3, grad=True),)),
    Case("argument twice", lambda x: (x, x, x * 2), lambda t: (t(3),)),
    Case("view of argument", lambda x: (x[1:], x * 2), lambda t: (t(3),)),
    Case("view of view argument", lambda x: (x[1:], x.t(), x * 2), lambda t: (t(4, 5)[1:, 1:],)),
    Case("view of argument with gradient", lambda x: (x[1:], x * 2), lambda t: (t(3, grad=True),)),
    Case("only a view", lambda x: x.view(3, 2), lambda t: (t(2, 3),)),
    Case("detached argument", lambda x: (x.detach(), x * 2), lambda t: (t(3, grad=True),)),
    Case("alias of argument", lambda x: (torch.ops.aten.alias(x), x * 2), lambda t: (t(3),)),
    Case("expand of argument", lambda x: (x.expand(4, 3), x + 1), lambda t: (t(1, 3),)),
    Case("unfold of argument", lambda x: (x.unfold(0, 3, 1), x + 1), lambda t: (t(6),)),
    Case("diagonal of argument", lambda x: (x.diagonal(1), x + 1), lambda t: (t(3, 4),)),
    Case("as_strided of argument", lambda x: (x.as_strided((2, 2), (1, 3), 2), x + 1), lambda t: (t(3, 4),)),
    Case(
        "as_strided of offset argument",
        lambda x: (x.as_strided((2, 2), (1, 3), 2), x + 1),
        lambda t: (t(3, 4)[1:],),
    ),
    Case(
        "complex argument as real",
        lambda x: (torch.view_as_real(x), x + 1),
        lambda t: (t(3, dtype=torch.complex64),),
    ),
    Case("argument as other type", lambda x: (x.view(torch.int32), x + 1), lambda t: (t(4),)),
    Case("argument as narrower type", lambda x: (x.view(torch.int16), x + 1), lambda t: (t(4),)),
    Case("conjugate of argument", lambda x: (x.conj(), x + 1), lambda t: (t(3, dtype=torch.complex64),)),
    Case("imaginary part", lambda x: (x.imag, x + 1), lambda t: (t(3, dtype=torch.complex64),)),
    Case("intermediate and view", lambda x: split(x * 2, lambda y: y, lambda y: y[1:]), lambda t: (t(4),)),
    Case(
        "two views of an intermediate",
        lambda x: split(x * 2, lambda y: y[:3], lambda y: y[1:]),
        lambda t: (t(4),),
    ),
    Case("one view of an intermediate", lambda x: (x * 2)[1:3, ::2], lambda t: (t(4, 5),)),
    Case(
        "intermediate and view, with gradient",
        lambda x: split(x * 2, lambda y: y, lambda y: y[1:]),
        lambda t: (t(4, grad=True),),
    ),
    Case(
        "two views, with gradient",
        lambda x: split(x * 2, lambda y: y[:3], lambda y: y.view(2, 2)),
        lambda t: (t(4, grad=True),),
    ),
    Case("chunks of a projection", lambda x: (x @ x.t()).chunk(3, 1), lambda t: (t(3, 4, grad=True),)),
    Case("unbind of an intermediate", lambda x: (x * 2).unbind(0), lambda t: (t(3, 2),)),
    Case("transposed intermediate", lambda x: (x * 2).t(), lambda t: (t(3, 4),)),
    Case("permuted result", lambda x: (x * 2).permute(2, 0, 1), lambda t: (t(2, 3, 4, grad=True),)),
    Case("expanded intermediate", lambda x: (x * 2).expand(4, 3), lambda t: (t(1, 3),)),
    Case(
        "expanded twice", lambda x: split(x * 2, lambda y: y.expand(4, 3), lambda y: y), lambda t: (t(1, 3),)
    ),
    Case("unfolded intermediate", lambda x: (x * 2).unfold(0, 3, 1), lambda t: (t(6),)),
    Case("diagonal of an intermediate", lambda x: (x * 2).diagonal(), lambda t: (t(3, 4),)),
    Case(
        "as_strided of an intermediate", lambda x: (x * 2).as_strided((2, 2), (1, 3), 2), lambda t: (t(3, 4),)
    ),
    Case(
        "intermediate as other type",
        lambda x: split(x * 2, lambda y: y, lambda y: y.view(torch.int32)),
        lambda t: (t(4),),
        gap=RETYPED,
    ),
    Case(
        "real part of an intermediate",
        lambda x: split(x * 2j, lambda y: y, lambda y: y.real),
        lambda t: (t(3),),
        gap=RETYPED,
    ),
    Case("conjugate of an intermediate", lambda x: (x * 2j).conj(), lambda t: (t(3),)),
    Case(
        "as_strided of a negative view",
        lambda x: torch._neg_view(x * 2).as_strided((2, 2), (1, 3), 2) + 0,
        lambda t: (t(3, 4),),
    ),
    Case(
        "as_strided of the imaginary part of a conjugate",
        lambda x: (x * (1 + 1j)).conj().imag.as_strided((2,), (4,), 1) + 0,
        lambda t: (t(4),),
    ),
    Case(
        "as_strided of a conjugate",
        lambda x: x.conj().as_strided((2,), (2,), 1) + 0,
        lambda t: (t(4, dtype=torch.complex64),),
    ),
    Case("result twice", lambda x: (lambda y: (y, y, [y]))(x * 2), lambda t: (t(3),)),
    Case("result twice, with gradient", lambda x: (lambda y: (y, y))(x * 2), lambda t: (t(3, grad=True),)),
    Case("equal expressions", lambda x: (x * 2, x * 2), lambda t: (t(3),)),
    Case("equal expressions, with gradient", lambda x: (x.sin(), x.sin()), lambda t: (t(3, grad=True),)),
    Case("equal constants", lambda x: (torch.zeros_like(x), torch.zeros_like(x)), lambda t: (t(3),)),
    Case("no-op chain", lambda x: (x.contiguous(), x.to(torch.float32), x + 1), lambda t: (t(3),)),
    Case("clone", lambda x: (x.clone(), x), lambda t: (t(3),)),
    Case("clone of transposed", lambda x: (x.clone(), x.contiguous()), lambda t: (t(3, 4).t(),)),
    Case("reshape that copies", lambda x: (x.reshape(12), x + 1), lambda t: (t(3, 4).t(),)),
    Case("reshape that does not", lambda x: (x.reshape(12), x + 1), lambda t: (t(3, 4),)),
    Case("flip and roll", lambda x: (x.flip(0), x.roll(1)), lambda t: (t(4),)),
    Case("None and numbers", lambda x: (None, 3, 2.5, "word", True, x + 1, x.shape[0]), lambda t: (t(3),)),
    Case("nothing", lambda x: None, lambda t: (t(3),)),
    Case("shape", lambda x: (x.shape, x.stride(), x + 1), lambda t: (t(3, 4),)),
    Case("dict of results", lambda x: {"y": x + 1, "x": x, "n": None}, lambda t: (t(3),)),
    Case("constant tensor", lambda x: (torch.tensor([1.0, 2.0]), x + 1), lambda t: (t(3),)),
    Case("detach inside", lambda x: (x * 2).detach() * x, lambda t: (t(3, grad=True),)),
    Case(
        "detached result",
        lambda x: split(x * 2, lambda y: y, lambda y: y.detach()),
        lambda t: (t(3, grad=True),),
    ),
    Case("part without gradient", lambda x, y: (x * 2, y * 2, x * y), lambda t: (t(3, grad=True), t(3))),
    Case("integer result beside gradient", lambda x: (x.max(0), x * 2), lambda t: (t(3, grad=True),)),
    Case(
        "channels last result",
        lambda x: x + 1,
        lambda t: (t(1, 2, 3, 3).contiguous(memory_format=torch.channels_last),),
    ),
    Case("argument with gaps", lambda x: (x + 1, x), lambda t: (t(4, 6)[:, ::2],)),
    Case("expanded argument", lambda x: (x + 1, x), lambda t: (t(1, 3).expand(4, 3),)),
    Case("scalar argument expanded", lambda x: x * 2, lambda t: (t().expand(4),)),
    Case("tensor list", lambda xs: [x * 2 for x in xs], lambda t: ([t(2), t(3)],)),
    Case(
        "shared by two arguments",
        lambda x, y: (x + y, x, y),
        lambda t: split(t(6), lambda b: b[:3], lambda b: b[3:]),
    ),
]


# ---- writes inside, and gradients through them


def intermediate_written(x: Tensor) -> Tensor:
    y = x * 2
    y[1:].mul_(3)
    y.t()[0].add_(1)
    return y * x


def intermediate_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    view = y[1:]
    y.add_(1)
    return y, view


def written_then_differentiated(x: Tensor, state: Tensor) -> Tensor:
    state.mul_(0.9).add_(x.detach(), alpha=0.1)
    return x * state


def written_with_gradient(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    z.add_(y)
    return z.sin_()


def sgd(p: Tensor, x: Tensor) -> Tensor:
    loss = (p * x).square().sum()
    with torch.no_grad():
        p.add_(p.detach(), alpha=-0.1)
    return loss.detach()


def update(p: Tensor, grad: Tensor) -> None:
    with torch.no_grad():
        p.add_(grad, alpha=-0.5)


def update_data(p: Tensor, grad: Tensor) -> None:
    p.data.sub_(grad, alpha=0.5)


def no_grad_part(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        y = x * 2
    return y, x * y


def enable_grad_part(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x * 3


def in_inference_mode(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        y = x * 2
        return y, y[1:]


def under_inference_mode(x: Tensor) -> tuple[Tensor, ...]:
    x.add_(1)
    return x, x * 2


def inference(t: Make, *shape: int) -> Tensor:
    """Return an inference tensor."""
    with torch.inference_mode():
        return t(*shape) * 1


def requires_grad_inside(x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    return (y * 2).detach()


def leaf_view_written(x: Tensor) -> Tensor:
    y = x.clone()
    for i in range(y.shape[0]):
        y[i] = y[i] * i
    return y


def set_data(x: Tensor, y: Tensor) -> Tensor:
    x.set_(y)
    return x * 2


def resize(x: Tensor) -> Tensor:
    x.resize_(2, 2)
    return x * 2


def resize_intermediate(x: Tensor) -> Tensor:
    y = x * 2
    y.resize_(2, 2)
    return y


def written_between_breaks(x: Tensor) -> tuple[Tensor, Tensor]:
    view = x[1:]
    x.add_(1)
    torch._dynamo.graph_break()
    view.mul_(2)
    return x * 1, view


class Counter(nn.Module):
    """A module with a buffer it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return (x * self.weight - self.mean) * self.steps


class Rebinding(nn.Module):
    """A module that gives its buffer a new tensor on every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + x.mean(0)
        return x - self.mean


class Tied(nn.Module):
    """A module with one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        nn.init.constant_(self.table.weight, 0.5)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


def module(kind: Callable[[], nn.Module], *shape: int, grad: bool = False, train: bool = True) -> Any:
    """Return how a module and its input are made."""

    def make(t: Make) -> tuple[Any, ...]:
        torch.manual_seed(3)
        x = t(*shape)
        return kind().to(x.device).train(train), x.requires_grad_(grad)

    return make


def call(module: nn.Module, x: Tensor) -> Any:
    return module(x)


INSIDE = [
    Case("intermediate", intermediate_written, lambda t: (t(3, 3),)),
    Case("intermediate, with gradient", intermediate_written, lambda t: (t(3, 3, grad=True),)),
    Case("intermediate and its view returned", intermediate_returned, lambda t: (t(4),)),
    Case("intermediate and its view, with gradient", intermediate_returned, lambda t: (t(4, grad=True),)),
    Case(
        "state written, then differentiated", written_then_differentiated, lambda t: (t(3, grad=True), t(3))
    ),
    Case("in place with gradient", written_with_gradient, lambda t: (t(3, grad=True), t(3, grad=True))),
    Case("parameter under no_grad", sgd, lambda t: (t(3, grad=True), t(3))),
    Case("parameter updated", update, lambda t: (t(3, grad=True), t(3))),
    Case("parameter updated by .data", update_data, lambda t: (t(3, grad=True), t(3))),
    Case("part under no_grad", no_grad_part, lambda t: (t(3, grad=True),)),
    Case("enable_grad", enable_grad_part, lambda t: (t(3, grad=True),)),
    Case("detach().requires_grad_()", requires_grad_inside, lambda t: (t(3),)),
    Case("rows of a clone", leaf_view_written, lambda t: (t(3, 2, grad=True),)),
    Case("inference mode inside", in_inference_mode, lambda t: (t(3),)),
    Case("in inference mode", in_inference_mode, lambda t: (inference(t, 3),)),
    Case("under inference mode", under_inference_mode, lambda t: (inference(t, 3),), torch.inference_mode),
    Case(
        "under inference mode, plain argument", under_inference_mode, lambda t: (t(3),), torch.inference_mode
    ),
    Case(
        "under inference mode, slice",
        under_inference_mode,
        lambda t: (inference(t, 6)[1:4],),
        torch.inference_mode,
    ),
    Case(
        "under inference mode, view returned",
        lambda x: (x[1:], x * 2),
        lambda t: (inference(t, 3),),
        torch.inference_mode,
    ),
    Case(
        "under inference mode, overlapping",
        both_written,
        lambda t: split(inference(t, 6), lambda b: b[:4], lambda b: b[2:]),
        torch.inference_mode,
    ),
    Case(
        "under inference mode, parameter",
        lambda m, x: m(x),
        module(lambda: nn.Linear(3, 3), 4, 3),
        torch.inference_mode,
    ),
    Case("under no_grad", lambda x: (x * 2, x, x[1:]), lambda t: (t(3, grad=True),), torch.no_grad),
    Case("under no_grad, written", lambda x: (x.add_(1), x * 2), lambda t: (t(3, grad=True),), torch.no_grad),
    Case("inference tensor read outside", lambda x: (x * 2, x), lambda t: (inference(t, 3),)),
    Case("set_", set_data, lambda t: (t(3), t(4))),
    Case("resize_", resize, lambda t: (t(4),)),
    Case("resize_ of an intermediate", resize_intermediate, lambda t: (t(4),)),
    Case("graph break", written_between_breaks, lambda t: (t(4),)),
    Case("buffers", call, module(Counter, 4, 3)),
    Case("buffers, input with gradient", call, module(Counter, 4, 3, grad=True)),
    Case("buffer rebound", call, module(Rebinding, 4, 3)),
    Case("tied weights", lambda m, x: m(x.long()), module(Tied, 2)),
    Case("batch norm 1d", call, module(lambda: nn.BatchNorm1d(3), 4, 3)),
    Case("batch norm 2d", call, module(lambda: nn.BatchNorm2d(2), 2, 2, 3, 3, grad=True)),
    Case(
        "batch norm without momentum", call, module(lambda: nn.BatchNorm1d(3, momentum=None), 4, 3, grad=True)
    ),
    Case("batch norm in eval", call, module(lambda: nn.BatchNorm1d(3), 4, 3, train=False)),
    Case(
        "instance norm with statistics",
        call,
        module(lambda: nn.InstanceNorm1d(3, track_running_stats=True), 2, 3, 4),
    ),
    Case("relu in place", call, module(lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), 4, 3)),
    Case("relu in place on the argument", call, module(lambda: nn.ReLU(inplace=True), 4, 3)),
    Case(
        "embedding with max_norm",
        lambda m, x: m(x.long()),
        module(lambda: nn.Embedding(5, 3, max_norm=1.0), 2),
    ),
]


def rows() -> Iterator[Any]:
    """Yield each case on each device; one in six, not the same on each device, is not slow."""
    for kind, cases in (("writes", WRITES), ("results", RESULTS), ("inside", INSIDE)):
        for place, each in enumerate(cases):
            for turn, device in enumerate(("jax", "cpu")):
                marks = [] if (place + 3 * turn) % 6 == 0 else [pytest.mark.slow]
                if each.gap:
                    marks.append(pytest.mark.xfail(reason=each.gap))
                yield pytest.param(each, device, id=f"{kind}-{each.name}-{device}", marks=marks)


@pytest.mark.parametrize(("case", "device"), rows())
def test_agrees_with_eager(case: Case, device: str) -> None:
    want = run(case, "cpu", None)
    same(run(case, device, "isthmus"), want)
