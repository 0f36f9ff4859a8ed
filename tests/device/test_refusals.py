"""What the CPU refuses the device refuses, in every mode: by hand, and by calls made at random."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import isthmus
from tests.fuzz import refusals
from tests.interpreters import forked
from tests.support import in_mode

Make = Callable[..., Tensor]
f64, i16, i32, i64 = torch.float64, torch.int16, torch.int32, torch.int64
boolean, c64, u8 = torch.bool, torch.complex64, torch.uint8

# What is refused; ``z`` makes zeros on the device. "large" ones are shown to the CPU in other sizes.
REFUSED: dict[str, Callable[[Make], Any]] = {
    "mm": lambda z: torch.mm(z(2, 3, dtype=f64), z(3, 2)),
    "matmul": lambda z: z(2, 3) @ z(3, 2, dtype=f64),
    "matmul, large": lambda z: z(200, 300) @ z(300, 200, dtype=f64),
    "bmm": lambda z: torch.bmm(z(2, 2, 3, dtype=f64), z(2, 3, 2)),
    "addmm": lambda z: torch.addmm(z(2), z(2, 3, dtype=f64), z(3, 2)),
    "linear": lambda z: F.linear(z(2, 3, dtype=f64), z(4, 3), z(4)),
    "linear, three dims": lambda z: F.linear(z(2, 2, 3, dtype=f64), z(4, 3), z(4)),
    "linear, large": lambda z: F.linear(z(200, 300, dtype=f64), z(400, 300), z(400)),
    "layer_norm": lambda z: F.layer_norm(z(2, 3), (3,), z(3, dtype=f64), z(3, dtype=f64)),
    "layer_norm, large": lambda z: F.layer_norm(z(200, 300), (300,), z(300, dtype=f64), z(300, dtype=f64)),
    "group_norm": lambda z: F.group_norm(z(2, 4, 3), 2, z(4, dtype=f64), z(4, dtype=f64)),
    "group_norm, large": lambda z: F.group_norm(z(8, 64, 30, 30), 8, z(64, dtype=f64), z(64, dtype=f64)),
    "batch_norm": lambda z: F.batch_norm(z(2, 4, 3), z(4, dtype=f64), z(4, dtype=f64) + 1),
    "batch_norm, training": lambda z: F.batch_norm(
        z(2, 4, 3), None, None, z(4, dtype=f64), z(4, dtype=f64), training=True
    ),
    "instance_norm": lambda z: F.instance_norm(z(2, 4, 3), None, None, z(4, dtype=f64), z(4, dtype=f64)),
    "nll_loss": lambda z: F.nll_loss(z(2, 3), z(2, dtype=i32)),
    "nll_loss of images": lambda z: F.nll_loss(z(2, 3, 2, 2), z(2, 2, 2, dtype=i32)),
    "cross_entropy": lambda z: F.cross_entropy(z(2, 3), z(2, dtype=i32)),
    "index_select": lambda z: z(3).index_select(0, z(2, dtype=i16)),
    "index_select by floats": lambda z: z(3).index_select(0, z(2)),
    "put": lambda z: z(3).put(z(2, dtype=i32), z(2)),
    "put of another dtype": lambda z: z(3).put(z(2, dtype=i64), z(2, dtype=f64)),
    "put_": lambda z: z(3).put_(z(2, dtype=i32), z(2)),
    "take": lambda z: z(3).take(z(2, dtype=i32)),
    "gather": lambda z: z(3).gather(0, z(2, dtype=i16)),
    "scatter": lambda z: z(3).scatter(0, z(2, dtype=i64), z(2, dtype=f64)),
    "masked_select": lambda z: z(3).masked_select(z(3, dtype=i64)),
    "masked_fill": lambda z: z(3).masked_fill(z(3, dtype=u8), 1),
    "index_put": lambda z: z(3).index_put((z(2, dtype=i64),), z(2, dtype=f64)),
    "index_add": lambda z: z(3).index_add(0, z(2, dtype=i64), z(2, dtype=f64)),
    "index_add_": lambda z: z(3).index_add_(0, z(2, dtype=i64), z(2, dtype=f64)),
    "index_copy": lambda z: z(3).index_copy(0, z(2, dtype=i64), z(2, dtype=f64)),
    "index_copy_": lambda z: z(3).index_copy_(0, z(2, dtype=i64), z(2, dtype=f64)),
    "values of sort": lambda z: torch.sort(z(3), out=(z(3, dtype=f64), z(3, dtype=i64))),
    "indices of sort": lambda z: torch.sort(z(3), out=(z(3), z(3, dtype=i32))),
    "out of nonzero": lambda z: torch.nonzero(z(3), out=z(3, dtype=i32)),
    "out of masked_select": lambda z: torch.masked_select(z(3), z(3, dtype=boolean), out=z(0, dtype=f64)),
    "out of index_select": lambda z: torch.index_select(z(3), 0, z(2, dtype=i64), out=z(0, dtype=f64)),
    "out of multinomial": lambda z: torch.multinomial(z(3) + 1, 2, out=z(2, dtype=i32)),
    "scatter_ by itself": lambda z: _twice(z(3, dtype=i64), lambda x: x.scatter_(0, x, 1)),
    "scatter_ by itself, large": lambda z: _twice(z(30000, dtype=i64), lambda x: x.scatter_(0, x, 1)),
    "index_add_ of itself": lambda z: _twice(z(3), lambda x: x.index_add_(0, z(3, dtype=i64), x)),
    "index_copy_ of itself": lambda z: _twice(z(3), lambda x: x.index_copy_(0, z(3, dtype=i64), x)),
    "index_fill_ by itself": lambda z: _twice(z(3, dtype=i64), lambda x: x.index_fill_(0, x, 1)),
    "gather into itself": lambda z: _twice(z(3, dtype=i64), lambda x: torch.gather(x, 0, x, out=x)),
    "conv_transpose2d": lambda z: F.conv_transpose2d(z(1, 1, 2, 2), z(1, 1, 2, 2), output_padding=1),
    "conv_transpose2d, large": lambda z: F.conv_transpose2d(z(4, 8, 32, 32), z(8, 8, 3, 3), output_padding=1),
    "conv2d": lambda z: F.conv2d(z(1, 1, 2, 2, dtype=f64), z(1, 1, 2, 2)),
    "smooth_l1_loss": lambda z: F.smooth_l1_loss(z(2), z(2), beta=-1.0),
    "smooth_l1_loss, large": lambda z: F.smooth_l1_loss(z(20000), z(20000), beta=-1.0),
    "relu": lambda z: F.relu(z(2, dtype=boolean)),
    "relu_": lambda z: F.relu_(z(2, dtype=boolean)),
    "mm of booleans": lambda z: torch.mm(z(2, 2, dtype=boolean), z(2, 2, dtype=boolean)),
    "avg_pool1d": lambda z: F.avg_pool1d(z(1, 1, 4, dtype=i32), 2),
    "avg_pool2d": lambda z: F.avg_pool2d(z(1, 1, 4, 4, dtype=i32), 2),
    "avg_pool3d": lambda z: F.avg_pool3d(z(1, 1, 4, 4, 4, dtype=i32), 2),
    "max_pool2d": lambda z: F.max_pool2d(z(1, 1, 4, 4, dtype=boolean), 2),
    "adaptive_avg_pool2d": lambda z: F.adaptive_avg_pool2d(z(1, 1, 4, 4, dtype=i32), 2),
    "sort of complex numbers": lambda z: torch.sort(z(2, dtype=c64)),
    "max of complex numbers": lambda z: torch.max(z(2, dtype=c64)),
    "max of complex numbers along a dim": lambda z: torch.max(z(2, dtype=c64), 0),
    "sign of complex numbers": lambda z: torch.sign(z(2, dtype=c64)),
    "one_hot of floats": lambda z: F.one_hot(z(2)),
    "one_hot of negatives": lambda z: F.one_hot(z(2, dtype=i64) - 1, 3),
    "one_hot of too few classes": lambda z: F.one_hot(z(2, dtype=i64) + 2, 2),
    "one_hot of no classes": lambda z: F.one_hot(z(2, dtype=i64) + 2, 0),
    "one_hot of nothing": lambda z: F.one_hot(z(0, dtype=i64)),
    "quantile": lambda z: torch.quantile(z(3), 2.0),
    "quantiles": lambda z: torch.quantile(z(3), z(2) + 1.5),
    "quantile of integers": lambda z: torch.quantile(z(3, dtype=i32), 0.5),
    "quantile of another dtype": lambda z: torch.quantile(z(3), z((), dtype=f64)),
    "quantile of nothing": lambda z: torch.quantile(z(0), 0.5),
    "arange of booleans": lambda z: torch.arange(3, out=z(3, dtype=boolean)),
    "range of complex numbers": lambda z: torch.range(0, 3, dtype=c64, device=z(1).device),
    "hann_window of complex numbers": lambda z: torch.hann_window(4, dtype=c64, device=z(1).device),
    "max_unpool2d of integers": lambda z: F.max_unpool2d(z(1, 2, 2, dtype=i64), z(1, 2, 2, dtype=i64), 2),
    "fractional_max_pool2d of complex numbers": lambda z: F.fractional_max_pool2d(
        z(1, 1, 4, 4, dtype=c64), 2, output_size=2, _random_samples=z(1, 1, 2, dtype=c64)
    ),
    "_softmax_backward_data": lambda z: torch._softmax_backward_data(z(3), z(3, dtype=f64), 0, f64),
    "_softmax_backward_data of other sizes": lambda z: torch._softmax_backward_data(
        z(1, 3), z(3), 0, torch.float32
    ),
    "segment_reduce by bytes": lambda z: torch.segment_reduce(z(3), "sum", lengths=z(3, dtype=u8)),
    "out of ldl_factor": lambda z: torch.linalg.ldl_factor(z(2, 2), out=(z(2, 2), z(2))),
    "out of ormqr": lambda z: torch.ormqr(z(2, 2), z(2), z(2, 2), out=z(2, 2, dtype=f64)),
    "unique of complex numbers": lambda z: torch.unique(z(3, dtype=c64)),
    "grid_sample, a large result": lambda z: F.grid_sample(
        z(8, 9, 12, 13, 14), z(8, 24, 25, 26, 3, dtype=i32), align_corners=True
    ),
    "out of multinomial shows its memory twice": lambda z: torch.multinomial(
        z(3) + 1, 2, out=z(1, dtype=i64).expand(2)
    ),
    "max_pool2d_with_indices_backward": lambda z: torch.ops.aten.max_pool2d_with_indices_backward(
        z(1, 1, 1, dtype=i32), z(1, 2, 2, dtype=i32), [2], [2], [0], [1], False, z(1, 1, 1, dtype=i64)
    ),
    "nanquantiles": lambda z: torch.nanquantile(z(3), z(2) - 1),
    # In a compiled function these are constants, by which XLA would divide while it compiles: SIGFPE.
    "fmod of constants": lambda z: torch.fmod(torch.tensor([5, 3]).to(z(1).device), z(2, dtype=i64)),
    "% of constants": lambda z: torch.tensor([5, 3], dtype=u8).to(z(1).device) % z(2, dtype=u8),
    "// of constants": lambda z: torch.tensor([5, 3], dtype=i32).to(z(1).device) // z(2, dtype=i32),
    "div of constants": lambda z: torch.div(
        torch.tensor([5, 3]).to(z(1).device), z(2, dtype=i64), rounding_mode="trunc"
    ),
    "fmod by the number 0": lambda z: torch.fmod(z(2, dtype=i64) + 5, 0),
    "% by the number 0": lambda z: (z(200, 300, dtype=i32) + 5) % 0,
    "// by the number 0": lambda z: (z(2, dtype=u8) + 5) // 0,
    "a negative power": lambda z: (z(2, dtype=i64) + 5) ** -1,
    # Numbers that the dtype of what they are stored in does not have.
    "full": lambda z: torch.full((2,), 1e6, dtype=torch.float16, device=z(1).device),
    "full, large": lambda z: torch.full((2000, 300), 1000.0, dtype=torch.float8_e4m3fn, device=z(1).device),
    "full_like, large": lambda z: torch.full_like(z(300, 300, dtype=u8), 300),
    "new_full, large": lambda z: z(300, 300, dtype=u8).new_full((300,), 300),
    "masked_fill, large": lambda z: z(300, 300, dtype=torch.float16).masked_fill(
        z(300, 300, dtype=boolean), 1e6
    ),
    "clamp, large": lambda z: torch.clamp(z(300, 300, dtype=u8), max=300),
}


def _twice(x: Tensor, call: Callable[[Tensor], Any]) -> Any:
    return call(x)


def zeros_on(device: str) -> Make:
    return lambda *size, dtype=torch.float32: torch.zeros(*size, dtype=dtype).to(device)


def words(call: Callable[[Make], Any], device: str, mode: str) -> Exception:
    """Return what a call raises, when it is made or when its result is read."""
    try:
        found = in_mode(lambda: call(zeros_on(device)), mode)()
        results = [r.tolist() for r in (found if isinstance(found, (tuple, list)) else [found])]
    except Exception as error:
        return error
    raise AssertionError(f"{results}, and no error")


@pytest.fixture
def lenient(strict_fallback: None) -> None:
    isthmus.config.fallback = "cpu"


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_call_is_refused_in_the_words_of_the_cpu(name: str, mode: str) -> None:
    want = words(REFUSED[name], "cpu", "eager")
    got = words(REFUSED[name], "jax", mode)
    assert type(got) is type(want), got
    assert str(got).split(" (recorded at")[0] == str(want)


@pytest.mark.usefixtures("lenient", "fresh_dynamo")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_call_is_refused(name: str) -> None:
    want = words(REFUSED[name], "cpu", "eager")
    got = words(REFUSED[name], "jax", "compiled")
    # What torch refuses while it traces it raises as an error of its own, a RuntimeError.
    assert isinstance(got, (type(want), RuntimeError)), got


@pytest.mark.usefixtures("lenient", "fresh_dynamo")
@pytest.mark.parametrize("mode", ["eager", "lazy", "compiled"])
@pytest.mark.parametrize(
    ("size", "stride"), [((5,), (-1,)), ((-7,), (5,)), ((2, 3), (1, -2)), ((0, -1), (1, 1))]
)
def test_negative_sizes_and_strides_are_refused_in_the_words_of_the_cpu(
    size: tuple[int, ...], stride: tuple[int, ...], mode: str
) -> None:
    with pytest.raises(RuntimeError) as want:
        torch.empty_strided(size, stride)
    with pytest.raises(RuntimeError) as got:
        in_mode(lambda: torch.empty_strided(size, stride, device="jax"), mode)()
    assert str(want.value) in str(got.value)  # torch.compile adds where it was tracing


# Writes of some elements to an expanded tensor: deprecated, but what is written is seen everywhere.
SELECTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "index_fill_": lambda x, at: x.index_fill_(0, at, 1),
    "masked_fill_": lambda x, at: x.masked_fill_(at == 1, 1),
    "index_put_": lambda x, at: x.index_put_((at,), torch.ones(2).to(x.device)),
    "item": lambda x, at: x.__setitem__(at, 1.0) or x,
    "fill_": lambda x, at: x.fill_(3),
}


@pytest.mark.usefixtures("lenient")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("name", SELECTED)
def test_a_write_to_an_expanded_tensor_is_seen_everywhere(name: str, mode: str) -> None:
    """Not in compiled functions: AOTAutograd adds up what is written to an expanded tensor, with any backend."""

    def write(base: Tensor, at: Tensor) -> Tensor:
        SELECTED[name](base.expand(2, 3).T[:, 1], at)
        return base + 0

    at = torch.tensor([1, 1, 0])[:2]
    base = torch.zeros(2, 1)
    want = write(base, at if name != "masked_fill_" else torch.tensor([1, 0, 0]))
    there = torch.zeros(2, 1).to("jax")
    given = (at if name != "masked_fill_" else torch.tensor([1, 0, 0])).to("jax")
    assert in_mode(write, mode)(there, given).tolist() == want.tolist()
    assert there.tolist() == base.tolist() != [[0], [0]]


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("driver", ["gels", "gelsd"])
@pytest.mark.parametrize("rows", [3, 4])
def test_least_squares_of_a_batch_of_one_are_the_cpus(rows: int, driver: str) -> None:
    """torch takes the right-hand side for a matrix there, and returns the answer as often as it has rows."""
    a, b = torch.arange(3.0 * rows).sin().view(1, rows, 3), torch.arange(2.0 * rows).view(rows, 2)
    want, got = (torch.linalg.lstsq(a.to(d), b.to(d), driver=driver).solution for d in ("cpu", "jax"))
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("lenient", "fresh_dynamo")
@pytest.mark.parametrize("mode", ["eager", "lazy", "compiled"])
def test_the_factor_of_a_singular_matrix_is_not_inverted(mode: str) -> None:
    factors = torch.stack([torch.eye(2), torch.tensor([[1.0, 0], [2, 0]])])
    for upper in (False, True):
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            in_mode(lambda x, upper=upper: torch.cholesky_inverse(x, upper=upper), mode)(
                factors.to("jax")
            ).cpu()


@pytest.mark.usefixtures("lenient")
def test_numbers_in_a_row_are_written_to_an_out_of_any_shape_that_holds_them() -> None:
    for device in ("cpu", "jax"):
        out = torch.zeros(2, 2).to(device)
        assert torch.linspace(0, 3, 4, out=out).tolist() == [[0, 1], [2, 3]]
        assert torch.arange(4, 8, out=out).tolist() == [[4, 5], [6, 7]]
        assert torch.linspace(0, 1, 0, out=torch.zeros(0, 2).to(device)).shape == (0, 2)


def test_layouts_that_are_fine_leave_others_refused() -> None:
    """One key, whose views first do not overlap and then do."""
    base = torch.zeros(8, dtype=torch.int64).to("jax")
    target, index = base[1:4], base[4:7]
    assert target.scatter_(0, index, 1).tolist() == [1, 0, 0]
    with pytest.raises(RuntimeError, match="unsupported operation"):
        base[1:4].scatter_(0, base[2:5], 1)
    with pytest.raises(RuntimeError, match="unsupported operation"):
        target.scatter_(0, target, 1)
    assert base.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


# Ops that read ``x`` by indices ``i`` and write to ``out``.
SHARED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "gather": lambda x, out, i: torch.gather(x, 0, i, out=out),
    "take": lambda x, out, i: torch.take(x, i, out=out),
    "index_select": lambda x, out, i: torch.index_select(x, 0, i, out=out),
    "cat": lambda x, out, i: torch.cat([x[:2], x[2:]], out=out),
    "masked_select": lambda x, out, i: torch.masked_select(x, i == 0, out=out),
    "sort": lambda x, out, i: torch.sort(x, out=(out, i)),
    "topk": lambda x, out, i: torch.topk(x, 3, out=(out, i)),
    "kthvalue": lambda x, out, i: torch.kthvalue(x.view(1, 3), 1, 0, out=(out, i)),
    "where": lambda x, out, i: torch.where(i == 0, x, x + 1, out=out),
    "scatter_": lambda x, out, i: out.scatter_(0, i, x),
    "scatter_add_": lambda x, out, i: out.scatter_add_(0, i, x),
    "scatter_reduce_": lambda x, out, i: out.scatter_reduce_(0, i, x, "sum"),
    "index_put_": lambda x, out, i: out.index_put_((i,), x),
    "put_": lambda x, out, i: out.put_(i, x),
}


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("name", SHARED)
def test_shared_memory_is_refused_also_after_a_call_that_was_fine(name: str, mode: str) -> None:
    """Every call has tensors of the same sizes: only where they lie tells them apart."""

    def said(device: str, mode: str) -> list[str]:
        def make(x: Tensor, out: Tensor) -> Any:
            result = SHARED[name](x, out, torch.zeros(3, dtype=i64).to(device))
            return [t.tolist() for t in (result if isinstance(result, tuple) else [result])]

        base = torch.zeros(9).to(device)
        found = []
        for x, out in [
            (base[:3], base[4:7]),
            (base[:3], base[1:4]),
            (base[:3], base[:3]),
            (base[:3], base[4:5].expand(3)),
            (base[:1].expand(3), base[4:7]),
        ]:
            try:
                found.append(str(in_mode(lambda x=x, out=out: make(x, out), mode)()))
            except RuntimeError as error:
                found.append(str(error).split(". ")[0].split(" (recorded")[0])
        assert base.tolist() == [0] * 9
        return found

    want = said("cpu", "eager")
    assert said("jax", mode) == want
    assert any("unsupported operation" in words for words in want), want


def test_half_types_work_where_the_cpu_has_no_kernel() -> None:
    x = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float16)
    with pytest.raises(RuntimeError, match="not implemented for 'Half'"):
        torch.linalg.cholesky(x)
    assert refusals.NO_REFERENCE.search("\"cholesky_cpu\" not implemented for 'Half'")
    assert F.mish(x.to("jax")).dtype == torch.float16


def test_the_cpus_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    torch.randn(3, device="jax").bernoulli_(0.5).uniform_(0, 3)
    torch.multinomial(torch.ones(3, device="jax"), 2)
    assert torch.equal(torch.get_rng_state(), before)


WARNED: dict[str, Callable[[Make], Any]] = {
    "uint8 index": lambda z: z(3)[z(3, dtype=u8)],
    "uint8 indices": lambda z: z(3, 3)[z(3, dtype=u8), z(3, dtype=u8)],
    "write by a uint8 index": lambda z: z(3).__setitem__(z(3, dtype=u8), z(0)),
    "var": lambda z: torch.var(z(1)),
    "var along a dim": lambda z: torch.var(z(3, 1), 1),
    "std": lambda z: torch.std(z(2), correction=2),
    "var_mean": lambda z: torch.var_mean(z(1)),
    "var, large": lambda z: torch.var(z(20000), correction=10),
    "resized": lambda z: torch.add(z(2), 1, out=z(3)),
    "resized, large": lambda z: torch.add(z(20000), 1, out=z(3)),
}


def heard(call: Callable[[Make], Any], device: str, mode: str) -> list[tuple[str, str]]:
    """Return the warnings of a call, and the files it is said to be in, the second time it is made."""
    run = in_mode(lambda: call(zeros_on(device)), mode)
    run()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        run()
    return [(str(w.message).split(" (Triggered")[0], w.filename) for w in given]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("name", WARNED)
def test_warnings_are_those_of_the_cpu(name: str, mode: str) -> None:
    assert heard(WARNED[name], "jax", mode) == heard(WARNED[name], "cpu", "eager")


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_call_warns_when_it_is_compiled() -> None:
    x = torch.zeros(1, device="jax")
    with pytest.warns(UserWarning, match="degrees of freedom"):
        torch.compile(lambda x: x.var(), backend="isthmus")(x)


def test_a_complex_number_made_real_warns_once() -> None:
    """torch itself warns once per process, so it is asked in one of its own."""
    code = """
import torch, warnings, isthmus
x = torch.ones(3, dtype=torch.complex64, device="jax")
with warnings.catch_warnings(record=True) as given:
    warnings.simplefilter("always")
    assert x.to(torch.float32).tolist() == [1, 1, 1]
assert ["Casting complex values to real" in str(w.message) for w in given] == [True], given
"""
    ran = forked(code)
    assert ran.returncode == 0, ran.stderr


def test_old_warnings_are_not_shown_again() -> None:
    """A new key does not reset what Python remembers of warnings it has shown."""
    seen: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("default")
        for n in range(3):
            warnings.warn_explicit("old", UserWarning, "file.py", 1, registry=seen)
            torch.zeros(n + 2, 7).to("jax").sum(0)
    assert len(given) == 1


# ---- calls made at random

CHUNKS = refusals.CALLS // refusals.CHUNK


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, CHUNKS))],
)
def test_calls_made_at_random_are_refused_as_on_the_cpu(seed: int, record_property: Any) -> None:
    tally = refusals.Tally()
    for call in refusals.calls(seed, refusals.CHUNK):
        tally.add(call)
    print(tally)
    record_property("refusals", str(tally))
    assert not tally.unlisted, "\n".join([str(tally), *tally.unlisted])
    # Ninety-nine of a hundred agree; a chunk is small enough for one more to differ by chance.
    assert tally.counts["differ"] <= 1 + refusals.CHUNK // 100, tally.listed


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in range(15)])
def test_calls_whose_tensors_share_memory_are_refused_as_on_the_cpu(seed: int) -> None:
    tally = refusals.Tally()
    for call in refusals.calls(seed, refusals.CHUNK, "share"):
        tally.add(call)
    assert not tally.unlisted, "\n".join([str(tally), *tally.unlisted])
    assert tally.counts["differ"] <= 1 + refusals.CHUNK // 100, tally.listed


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("row", refusals.rows(), ids=lambda row: row["example"])
def test_a_row_of_the_table_is_true(row: dict[str, Any]) -> None:
    call = refusals.Call.parse(row["example"])
    difference = refusals.differs(call)
    assert difference, (
        f"{call} agrees now: take the row out of {refusals.TABLE.name}, or give another example"
    )
    assert refusals.row_of(call, difference) is row, difference
