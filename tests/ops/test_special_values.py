"""nan, infinity and zero where they decide: samples at points that are no points, zero divisors, complex functions."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import in_mode

NAN, INF = math.nan, math.inf
MODES = ["eager", "lazy", "compiled"]


def sampled(
    image: Tensor, grid: Tensor, mode: str, padding: str, align: bool, differentiate: bool
) -> list[Tensor]:
    """Return the samples at a grid, and the gradients if asked."""
    image, grid = image.detach().requires_grad_(), grid.detach().requires_grad_()
    out = F.grid_sample(image, grid, mode, padding, align)
    found = torch.autograd.grad(out, [image, grid], torch.ones_like(out)) if differentiate else ()
    return [out.detach(), *found]


def grids() -> Iterator[Any]:
    """Yield every way to sample in every mode and two dtypes; one in six is not slow."""
    kinds = ["bilinear", "nearest", "bicubic", "bilinear 3-D", "nearest 3-D"]
    paddings, dtypes = ["zeros", "border", "reflection"], [torch.float32, torch.float64]
    every = itertools.product(MODES, dtypes, [False, True], paddings, kinds)
    for place, (run, dtype, align, padding, kind) in enumerate(every):
        quick = dtype is torch.float32 and (place % 2 == 0 if run == "eager" else place % 8 == 5)
        marks = [] if quick else [pytest.mark.slow]
        name = f"{kind}-{padding}-{align}-{dtype}-{run}"
        yield pytest.param(kind, padding, align, dtype, run, id=name, marks=marks)


@pytest.mark.parametrize(("kind", "padding", "align", "dtype", "run"), grids())
def test_samples_at_points_that_are_none(
    kind: str, padding: str, align: bool, dtype: torch.dtype, run: str
) -> None:
    mode, *deep = kind.split()
    dim = 3 if deep else 2
    # Not 1e10: there XLA's fused multiply-add rounds a tie otherwise, and reflections count every unit.
    points = torch.tensor(
        list(itertools.product([NAN, INF, -INF, 1.1e10, -3e38, 0.3, -1.0, 2.3], repeat=dim))
    )
    image = torch.randn(1, 2, *(3, 4, 5)[:dim], generator=torch.Generator().manual_seed(0))
    # Here torch's CPU kernel writes to where a nan leads it, and the process ends.
    differentiate = not (kind == "bilinear" and padding != "zeros")
    grid = points.reshape(1, -1, *[1] * (dim - 1), dim).to(dtype)
    image, options = image.to(dtype), (mode, padding, align, differentiate)
    want = sampled(image, grid, *options)
    got = in_mode(lambda i, g: sampled(i, g, *options), run)(image.to("jax"), grid.to("jax"))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.cpu(), w, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_a_gradient_no_cpu_can_compute_is_finite() -> None:
    grid = torch.tensor([[NAN, 0.0], [0.0, NAN], [0.2, 0.3]], device="jax").reshape(1, 3, 1, 2)
    image = torch.arange(12.0, device="jax").reshape(1, 1, 3, 4)
    for padding in ("border", "reflection"):
        _, for_image, for_grid = sampled(image, grid, "bilinear", padding, False, True)
        assert for_image.isfinite().all()
        assert for_image.sum().item() == pytest.approx(3)
        assert for_grid.isfinite().all()


DIVISIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "number //": lambda a, b: 7 // b,
    "number %": lambda a, b: 7 % b,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "floor_divide": torch.floor_divide,
    "div floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "true division": lambda a, b: a / b,
    "remainder_": lambda a, b: a.remainder_(b),
    "fmod_": lambda a, b: a.fmod_(b),
    "floor_divide_": lambda a, b: a.floor_divide_(b),
    "div_ floor": lambda a, b: a.div_(b, rounding_mode="floor"),
    "div_ trunc": lambda a, b: a.div_(b, rounding_mode="trunc"),
    "%=": operator.imod,
    "//=": operator.ifloordiv,
    "remainder out": lambda a, b: torch.remainder(a, b, out=torch.empty_like(a)),
    "fmod out": lambda a, b: torch.fmod(a, b, out=torch.empty_like(a)),
    "one divisor": lambda a, b: a % b[1],
    "none of none": lambda a, b: a[:0] // b[1],
    "foreach": lambda a, b: torch._foreach_div([a, a], [b, b]),
}
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def answer(call: Callable[..., Any], *given: Tensor) -> Any:
    """Return what a call gives, or the words of its error."""
    try:
        result = call(*given)
        return [t.tolist() for t in (result if isinstance(result, (list, tuple)) else [result])]
    except RuntimeError as error:
        return type(error), str(error).split()[0]  # in lazy mode the line of the call follows


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DIVISIONS)
def test_integers_are_not_divided_by_zero(name: str, mode: str) -> None:
    call = DIVISIONS[name]
    for dtype in INTEGERS if mode == "eager" else [torch.int32]:
        run = in_mode(call, mode)
        for divisors in ([2, 3, 5], [2, 0, 5], [2, 3, 5]):
            a, b = torch.tensor([7, 9, 11], dtype=dtype), torch.tensor(divisors, dtype=dtype)
            there, by = a.to("jax"), b.to("jax")
            want = answer(call, a, b)
            assert answer(run, there, by) == want, (dtype, divisors)
            if mode == "eager":
                # A failed call leaves its target as it was; on the CPU it is written to until the zero is met.
                after = [7, 9, 11] if isinstance(want, tuple) else a.tolist()
                assert there.tolist() == after


@pytest.mark.parametrize("mode", MODES)
def test_floats_are_divided_by_zero(mode: str) -> None:
    a, b = torch.tensor([7.0, -9.0, 0.0]), torch.zeros(3, dtype=torch.int64)
    for name in ("//", "%", "fmod", "div floor", "div trunc"):
        got, want = in_mode(DIVISIONS[name], mode)(a.to("jax"), b.to("jax")), DIVISIONS[name](a, b)
        torch.testing.assert_close(got.cpu(), want, equal_nan=True)


def test_a_zero_scalar_of_the_cpu_divides_no_integer() -> None:
    x = torch.arange(3, device="jax")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        x % torch.tensor([1, 0])[1]
    assert (x % torch.tensor([0, 2])[1]).tolist() == [0, 1, 0]


# Not reciprocal, rsqrt and sigmoid: torch's quotients of complex numbers are nan where others have an answer.
COMPLEX = ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "abs", "angle", "square", "sgn"]
COMPLEX += ["sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"]
PARTS = [0.0, -0.0, 1.0, -1.0, 0.5, -2.0, INF, -INF, NAN, math.pi / 2]
LARGE = {
    "sin": [88.9j, 1 - 88.9j, -710j],
    "cos": [88.9j, 1 - 88.9j, 710j],
    "sinh": [88.9],
    "cosh": [-88.9, 710],
}
LARGE |= {
    "log": [1e30 + 1j],
    "asinh": [1e30 - 1e30j],
    "atan": [1e30j],
    "log1p": [-1 + 1e-30j],
    "atanh": [1 + 1e-30j],
}


def in_parts(result: Tensor) -> Tensor:
    return torch.view_as_real(result) if result.is_complex() else result[..., None]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_functions_at_infinity_and_on_their_cuts(name: str, dtype: torch.dtype) -> None:
    numbers = [complex(x, y) for x, y in itertools.product(PARTS, PARTS)] + LARGE.get(name, [])
    given = torch.tensor(numbers, dtype=dtype)
    if name == "log1p":  # an infinite imaginary part alone is nan or not, by the real part, on the CPU
        given = given[~(given.imag.isinf() & given.real.isfinite())]
    if name == "sgn":  # the CPU's vectors and its single numbers differ
        given = given[given.real.isfinite() & given.imag.isfinite()]
    call = getattr(torch, name)
    got, want = in_parts(call(given.to("jax")).cpu()), in_parts(call(given))
    # A part far smaller than the other has that one's rounding errors.
    size = want.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True) * torch.finfo(dtype).eps * 64
    same = torch.isclose(got, want, rtol=1e-4, atol=0, equal_nan=True) | ((got - want).abs() <= size)
    wrong = ~same.all(-1)
    assert not wrong.any(), (given[wrong][:5], got[wrong][:5], want[wrong][:5])


@pytest.mark.parametrize("mode", MODES)
def test_complex_functions_in_every_mode(mode: str) -> None:
    given = torch.tensor([complex(-INF, NAN), complex(INF, NAN), complex(-1.0, -0.0), complex(NAN, INF)])
    for got, want in zip(
        in_mode(lambda x: [x.exp(), x.sqrt(), x.log(), x.abs()], mode)(given.to("jax")),
        [given.exp(), given.sqrt(), given.log(), given.abs()],
        strict=True,
    ):
        torch.testing.assert_close(in_parts(got.cpu()), in_parts(want), equal_nan=True)
