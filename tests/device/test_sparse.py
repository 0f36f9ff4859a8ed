"""Kernels of sparse tensors against CPU torch, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import isthmus
from isthmus._device.kernels import sparse
from isthmus._graph.names import Missing, overload_named
from isthmus._graph.private import OpOverload
from isthmus.errors import MissingLowering
from tests.interpreters import forked_early

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")

Function = Callable[..., Any]
generator = torch.Generator().manual_seed(0)
INDICES = torch.stack([torch.randint(0, n, (9,), generator=generator) for n in (5, 7)])
NUMBERS = torch.randn(9, generator=generator)
DENSE = {size: torch.randn(*size, generator=generator) for size in ((5, 7), (7, 4), (5, 4))}


def coo(
    device: str, dtype: torch.dtype = torch.float32, shift: int = 0, coalesced: bool = True
) -> torch.Tensor:
    """Return a matrix of 5 rows and 7 columns with repeated indices, or with those added up."""
    numbers = NUMBERS if dtype.is_floating_point else (NUMBERS * 4).round()
    made = torch.sparse_coo_tensor(INDICES.roll(shift, 1), numbers.roll(2 * shift).to(dtype), (5, 7))
    return (made.coalesce() if coalesced else made).to(device)


def csr(
    device: str, dtype: torch.dtype = torch.float32, shift: int = 0, layout: Any = torch.sparse_csr
) -> torch.Tensor:
    return coo("cpu", dtype, shift).to_sparse(layout=layout).to(device)


def dense(size: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """Return a matrix of this size on the device and in the dtype of another."""
    whole = not (like.is_floating_point() or like.is_complex())
    return (
        (DENSE[size] * 4).round().to(like.device, like.dtype)
        if whole
        else DENSE[size].to(like.device, like.dtype)
    )


left = functools.partial(dense, (5, 7))
right = functools.partial(dense, (7, 4))
bias = functools.partial(dense, (5, 4))


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    """Compare layouts, dtypes, shapes and values; ours has to lie on the device."""
    if isinstance(theirs, (tuple, list)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other, tolerance)
        return
    if not isinstance(theirs, torch.Tensor):
        assert ours == theirs
        return
    assert ours.device.type == "jax"
    assert (ours.layout, ours.dtype, ours.shape) == (theirs.layout, theirs.dtype, theirs.shape)
    if theirs.layout is torch.sparse_coo:
        assert ours.is_coalesced() >= theirs.is_coalesced()
        if theirs.is_coalesced():
            assert torch.equal(ours.indices().cpu(), theirs.indices())
    ours, theirs = (x.detach().cpu().to_dense() for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


COO: dict[str, Function] = {
    "to": lambda s, t, d: s,
    "coalesce": lambda s, t, d: s.coalesce(),
    "indices and values": lambda s, t, d: (s.coalesce().indices(), s.coalesce().values(), s._indices(), s._values()),
    "numbers": lambda s, t, d: (s._nnz(), s.sparse_dim(), s.dense_dim(), s._dimI(), s._dimV(), s.is_coalesced()),
    "to_dense": lambda s, t, d: s.to_dense(),
    "mm": lambda s, t, d: torch.sparse.mm(s, right(s)),
    "mm out": lambda s, t, d: torch.mm(s, right(s), out=torch.empty_like(bias(s))),
    "dense @": lambda s, t, d: bias(s).t() @ s,
    "addmm": lambda s, t, d: torch.sparse.addmm(bias(s), s, right(s), beta=2, alpha=3),
    "addmm, no bias": lambda s, t, d: torch.addmm(bias(s), s, right(s), beta=0),
    "addmm_": lambda s, t, d: bias(s).clone().addmm_(s, right(s)),
    "mv": lambda s, t, d: s @ right(s)[:, 0],
    "bmm": lambda s, t, d: torch.bmm(torch.stack([s, t]), torch.stack([right(s), 2 * right(s)])),
    "sparse @ sparse": lambda s, t, d: s @ t.t(),
    "add, sub": lambda s, t, d: (s + t, s - t, torch.add(s, t, alpha=3), s.clone().add_(t), s.clone().sub_(t)),
    "sub out": lambda s, t, d: torch.sub(s, t, out=torch.empty_like(s)),
    "dense +": lambda s, t, d: (left(s) + s, left(s).clone().add_(s, alpha=-2)),
    "dense.t() +": lambda s, t, d: left(s).t().add(s.t()),
    "number": lambda s, t, d: (s * 3, s * 2.5, s / 2, s // 2, s.div(3, rounding_mode="floor"), 3 * s),
    "number, in place": lambda s, t, d: (s.clone().mul_(3), s.clone().div_(2), s.clone().floor_divide_(2)),
    "0-d": lambda s, t, d: (s * left(s)[0, 0], s / left(s)[0, 0], s.clone().mul_(left(s)[0, 1])),
    "0-d, in place": lambda s, t, d: (s.clone().div_(left(s)[0, 0]), s.clone().floor_divide_(left(s)[0, 1])),
    "0-d, rounded": lambda s, t, d: (
        s.div(left(s)[0, 0], rounding_mode="trunc"),
        s.clone().div_(left(s)[0, 0], rounding_mode="trunc"),
        torch.div(s, left(s)[0, 0], rounding_mode="trunc", out=torch.empty_like(s)),
        torch.div(s, left(s)[0, 0], out=torch.empty_like(s)),
        torch.floor_divide(s, left(s)[0, 0]),
        torch.floor_divide(s, left(s)[0, 0], out=torch.empty_like(s)),
    ),
    "mul": lambda s, t, d: (s * t, s.clone().mul_(t)),
    "mul dense": lambda s, t, d: (s * left(s), left(s) * s, s * left(s)[:1]),
    "sums": lambda s, t, d: (s.sum(), s.sum(0), torch.sparse.sum(s, 1), torch.sparse.sum(s)),
    "norms": lambda s, t, d: (s.norm(), torch.native_norm(s), torch.norm(s, 2, dtype=torch.float64)),
    "native_norm": lambda s, t, d: torch.ops.aten.native_norm.ScalarOpt_dim_dtype(s, 2, [], False, None),
    "any": lambda s, t, d: s.any(),
    "transposed": lambda s, t, d: (s.t(), s.transpose(0, 1).coalesce(), s.permute(1, 0)),
    "shapes": lambda s, t, d: (s.unsqueeze(0), s.narrow_copy(0, 1, 2), torch.cat([s, t]), s[1], torch.stack([s, t])),
    "broadcast": lambda s, t, d: torch.ops.aten._sparse_broadcast_to(s, (2, 5, 7)),
    "index_select": lambda s, t, d: [s.index_select(k, torch.tensor([2, 0, 2], device=d)) for k in (0, 1)],
    "masks": lambda s, t, d: (left(s).sparse_mask(s), t.sparse_mask(s)),
    "copies": lambda s, t, d: (s.clone(), s.to(torch.float64), torch.zeros_like(s), s.clone().zero_()),
    "copy_": lambda s, t, d: (torch.zeros_like(s).copy_(t), torch.zeros((5, 7), layout=torch.sparse_coo, device=d)),
    "zeros out": lambda s, t, d: torch.zeros((2, 3), out=s.clone()),
    "resize": lambda s, t, d: (s.clone().sparse_resize_((6, 8), 2, 0), s.clone().resize_as_sparse_(t)),
    "clear": lambda s, t, d: s.clone().sparse_resize_and_clear_((2, 3), 1, 1),
    "conversions": lambda s, t, d: (s.to_sparse_csr(), s.to_sparse_csc(), s.to_sparse(layout=torch.sparse_csr)),
    "blocks": lambda s, t, d: (s.to_sparse_bsr((1, 1)), s.to_sparse_bsc((1, 1))),
    "relu": lambda s, t, d: (s.relu(), s.coalesce().clone().relu_(), s.signbit()),
    "tests": lambda s, t, d: (s.isnan(), s.isinf(), s.isposinf(), s.isneginf()),
    "tests, out": lambda s, t, d: [
        f(s, out=torch.empty_like(s, dtype=torch.bool)) for f in (torch.signbit, torch.isposinf, torch.isneginf)
    ],
    "nan_to_num": lambda s, t, d: (s.nan_to_num(1.0), torch.nan_to_num(s, out=torch.empty_like(s))),
    "nan_to_num_": lambda s, t, d: s.coalesce().clone().nan_to_num_(),
    "pow": lambda s, t, d: (s**2, torch.pow(s, 3, out=torch.empty_like(s))),
    "threshold": lambda s, t, d: torch.ops.aten.threshold_backward(s, s, 0.1),
    "threshold, out": lambda s, t, d: torch.ops.aten.threshold_backward(s, s, 0.1, grad_input=torch.empty_like(s)),
    "complex": lambda s, t, d: torch.view_as_real(s.to(torch.complex64)),
    "from real": lambda s, t, d: torch.view_as_complex(torch.view_as_real(s.to(torch.complex64))),
    "conj out": lambda s, t, d: torch.conj_physical(s, out=torch.empty_like(s)),
    "pinned": lambda s, t, d: s.is_pinned(),
    "made": lambda s, t, d: torch.sparse_coo_tensor((3, 4), device=d),
}  # fmt: skip
COMPRESSED: dict[str, Function] = {
    "to": lambda s, t, d: s,
    "to_dense": lambda s, t, d: s.to_dense(),
    "values": lambda s, t, d: (s.values(), s._nnz(), s.sparse_dim(), s.dense_dim()),
    "mm": lambda s, t, d: (s @ right(s), bias(s).t() @ s),
    "mm out": lambda s, t, d: torch.mm(s, right(s), out=torch.empty_like(bias(s))),
    "mv": lambda s, t, d: s @ right(s)[:, 0],
    "addmm": lambda s, t, d: torch.addmm(bias(s), s, right(s), beta=2, alpha=3),
    "sparse @ sparse": lambda s, t, d: s @ t.t(),
    "dense +": lambda s, t, d: left(s) + s,
    "number": lambda s, t, d: (s * 3, s.clone().mul_(2)),
    "0-d": lambda s, t, d: (s * left(s)[0, 0], s.clone().mul_(left(s)[0, 0])),
    "Scalar": lambda s, t, d: (torch.ops.aten.mul.Scalar(s, 2), torch.ops.aten.mul_.Scalar(s.clone(), 2)),
    "sum": lambda s, t, d: s.sum(),
    "transposed": lambda s, t, d: s.t(),
    "conversions": lambda s, t, d: (s.to_sparse(), s.to_sparse_csc(), s.to_sparse_csr(), s.to_sparse(2)),
    "blocks": lambda s, t, d: (s.to_sparse_bsr((1, 1)), s.to_sparse_bsc((1, 1))),
    "copies": lambda s, t, d: (s.clone(), s.to(torch.float64), s.clone().zero_(), torch.empty_like(s).copy_(s)),
    "relu": lambda s, t, d: (s.relu(), s.clone().relu_(), s.signbit()),
    "tests": lambda s, t, d: (s.isnan(), s.isinf(), s.isposinf(), s.isneginf()),
    "angle": lambda s, t, d: (s.angle(), s.conj_physical(), s.clone().conj_physical_()),
    "select": lambda s, t, d: s[1],
    "mask": lambda s, t, d: left(s).sparse_mask(s),
    "threshold": lambda s, t, d: torch.ops.aten.threshold_backward(s, s, 0.1),
    "fill": lambda s, t, d: s.clone().fill_(3),
    "pinned": lambda s, t, d: s.is_pinned(),
}  # fmt: skip
CSR: dict[str, Function] = {
    **COMPRESSED,
    "parts": lambda s, t, d: (s.crow_indices(), s.col_indices()),
    "add": lambda s, t, d: (s + t, torch.add(s, t, alpha=3), s.clone().add_(t)),
    "mul": lambda s, t, d: (s * t, s * left(s), s.clone().mul_(s)),
    "sampled": lambda s, t, d: torch.sparse.sampled_addmm(s, bias(s), right(s).t(), beta=2, alpha=3),
    "outs": lambda s, t, d: [
        f(s, out=torch.empty_like(s)) for f in (torch.angle, torch.conj_physical)
    ],
    "tests, out": lambda s, t, d: [
        f(s, out=torch.empty_like(s, dtype=torch.bool)) for f in (torch.signbit, torch.isposinf, torch.isneginf)
    ],
    "resized": lambda s, t, d: (s.clone().resize_as_sparse_(t), s.clone().resize_((6, 7))),
    "sum over dims": lambda s, t, d: [s.sum(dims, keepdim=True) for dims in (0, 1, (0, 1))],
    "sum over dims refused": lambda s, t, d: s.sum(0),
    "conj": lambda s, t, d: torch.ops.aten._conj_physical(s),
    "empty": lambda s, t, d: torch.empty((3, 4), layout=torch.sparse_csr, device=d)._nnz(),
    "select copy": lambda s, t, d: torch.select_copy(s, 0, 2),
    "threshold, out": lambda s, t, d: torch.ops.aten.threshold_backward(s, s, 0.1, grad_input=torch.empty_like(s)),
}  # fmt: skip
CSC: dict[str, Function] = {**COMPRESSED, "parts": lambda s, t, d: (s.ccol_indices(), s.row_indices())}


def forms(name: str) -> dict[str, Function]:
    """Return the forms of a function that is 0 at 0: of a new tensor, in place, and into another."""
    function = getattr(torch, name)

    def in_place(s: torch.Tensor, t: torch.Tensor, d: str) -> torch.Tensor:
        return getattr((s.coalesce() if s.layout is torch.sparse_coo else s).clone(), f"{name}_")()  # type: ignore[no-any-return]

    return {
        name: lambda s, t, d: function(s),
        f"{name}_": in_place,
        f"{name} out": lambda s, t, d: function(s, out=torch.empty_like(s)),
    }


for _name in sparse.ZERO_AT_ZERO:
    COO.update(forms(_name))
    CSR.update(forms(_name))


def compare(function: Function, ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    """Call a function with sparse matrices on both devices; what the CPU refuses has to be refused alike."""
    try:
        wanted = function(*theirs, "cpu")
    except NotImplementedError:
        return  # a kernel that the CPU lacks for a dtype
    except RuntimeError as error:
        with pytest.raises(type(error)):
            function(*ours, "jax")
        return
    assert_same(function(*ours, "jax"), wanted)


def both(make: Function, **options: Any) -> tuple[tuple[Any, ...], ...]:
    """Return two matrices of the device, and the same two of the CPU."""
    return tuple(tuple(make(device, shift=n, **options) for n in (0, 1)) for device in ("jax", "cpu"))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[tuple[OpOverload, str]]:
    """Return the kernels of torch's that ran, with their dispatch keys."""
    found: set[tuple[OpOverload, str]] = set()
    theirs = sparse.redispatch

    def noting(op: OpOverload, key: str, *args: Any, **kwargs: Any) -> Any:
        found.add((op, key))
        return theirs(op, key, *args, **kwargs)

    monkeypatch.setattr(sparse, "redispatch", noting)
    return found


def missed(called: set[tuple[OpOverload, str]], names: tuple[str, ...], key: str) -> set[str]:
    ops = {overload_named(f"aten::{name}") for name in names}
    ran = {op for op, used in called if used == key}
    return {str(op) for op in ops if not isinstance(op, Missing) and op not in ran}


QUICK = (
    "coalesce",
    "to_dense",
    "mm",
    "addmm",
    "dense +",
    "number",
    "sums",
    "transposed",
    "conversions",
    "mul",
)


def test_what_is_used_most_agrees_with_the_cpu() -> None:
    for forms_of, make in ((COO, coo), (CSR, csr)):
        for name in QUICK:
            if name in forms_of:
                compare(forms_of[name], *both(make))


@pytest.mark.slow
def test_every_kernel_of_coo_agrees_with_the_cpu(called: set[tuple[OpOverload, str]]) -> None:
    for function in COO.values():
        compare(function, *both(coo))
    assert not missed(called, sparse.TORCHS_COO, "SparseCPU") - {"aten._sparse_coo_tensor_with_dims.default"}


@pytest.mark.slow
def test_every_kernel_of_csr_and_csc_agrees_with_the_cpu(called: set[tuple[OpOverload, str]]) -> None:
    for function in CSR.values():
        compare(function, *both(csr))
    for function in CSC.values():
        compare(function, *both(csr, layout=torch.sparse_csc))
    torch.empty_like(csr("jax")).normal_()  # has no values to compare
    assert not missed(called, sparse.TORCHS_COMPRESSED, "SparseCsrCPU")


@pytest.mark.slow
def test_every_conversion_of_dense_tensors(called: set[tuple[OpOverload, str]]) -> None:
    dense = coo("cpu").to_dense()
    for convert in (
        lambda x: x.to_sparse(), lambda x: x.to_sparse(1), lambda x: x.to_sparse_csr(), lambda x: x.to_sparse_csc(),
        lambda x: x.to_sparse_bsr((1, 7)), lambda x: x.to_sparse_bsc((5, 1)),
    ):  # fmt: skip
        assert_same(convert(dense.to("jax")), convert(dense))
    assert not missed(called, sparse.TORCHS_DENSE, "CPU")


@pytest.mark.slow
@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32], ids=str)
def test_other_dtypes_agree_with_the_cpu(dtype: torch.dtype, coalesced: bool) -> None:
    for function in COO.values():
        compare(function, *both(coo, dtype=dtype, coalesced=coalesced))


def test_empty_and_hybrid_tensors() -> None:
    for device in ("cpu", "jax"):
        made = [
            torch.sparse_coo_tensor(
                torch.empty((2, 0), dtype=torch.long), torch.empty(0), (3, 4), device=device
            ),
            torch.sparse_coo_tensor(INDICES, torch.stack([NUMBERS, -NUMBERS], 1), (5, 7, 2), device=device),
            torch.sparse_coo_tensor(INDICES[:, :1], NUMBERS[:1], (5, 7), device=device),
            torch.sparse_coo_tensor(torch.empty((0, 2), dtype=torch.long), NUMBERS[:2], (), device=device),
        ]
        found = [(x.to_dense(), x.coalesce(), x + x, x * x, x * 2) for x in made]
        if device == "cpu":
            wanted = found
    assert_same(found, wanted)


def reduced(device: str, reduce: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Reduce a matrix with an empty row, equal entries, a nan and an infinity, and return values and gradients."""
    rows = torch.tensor([0, 2, 2, 5, 7, 9])
    columns = torch.tensor([0, 2, 1, 1, 2, 0, 3, 0, 1])
    numbers = torch.tensor([1, 2, 3, 3, torch.nan, 2, -1, 0.5, 0.25], dtype=dtype)
    dense = torch.tensor([[1, -2, 0.5], [0, -0.0, 3], [5, torch.inf, 1], [-1, -1, -1]], dtype=dtype)
    matrix = torch.sparse_csr_tensor(rows, columns, numbers, (5, 4)).to(device).requires_grad_()
    dense = dense.to(device).requires_grad_()
    with torch.no_grad():
        plain = torch.sparse.mm(matrix, dense, reduce)
    out = torch.sparse.mm(matrix, dense, reduce)
    (out * torch.arange(15, device=device).reshape(5, 3)).sum().backward()
    assert matrix.grad is not None
    return plain, out, matrix.grad.values(), dense.grad, matrix.grad.crow_indices(), matrix.grad.col_indices()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_products_that_reduce(reduce: str, dtype: torch.dtype) -> None:
    assert_same(reduced("jax", reduce, dtype), reduced("cpu", reduce, dtype))


def test_products_that_reduce_nothing_and_those_refused() -> None:
    empty = torch.zeros(2, 3).to_sparse_csr()
    for reduce in ("mean", "amax"):
        found = [empty.to(device).clone().requires_grad_() for device in ("jax", "cpu")]
        out, wanted = (torch.sparse.mm(x, torch.ones(3, 2, device=x.device), reduce) for x in found)
        for x in (out, wanted):
            x.sum().backward()
        assert_same((out, found[0].grad), (wanted, found[1].grad))
    with pytest.raises(RuntimeError, match="reduce type of prod has not been enabled"):
        torch.sparse.mm(csr("jax"), right(csr("jax")), "prod")
    with pytest.raises(RuntimeError, match="scalar type Float"):
        torch.sparse.mm(csr("jax"), right(csr("jax")).double(), "sum")


def test_an_index_out_of_range_raises() -> None:
    beyond = torch.sparse_coo_tensor(
        torch.tensor([[0], [9]]), torch.ones(1), (5, 7), device="jax", check_invariants=False
    )
    with pytest.raises((IndexError, RuntimeError)):
        beyond.to_dense().cpu()


def test_what_nothing_lowers_runs_on_the_cpu_and_is_counted() -> None:
    with pytest.raises(MissingLowering, match="_sparse_softmax"):
        torch.sparse.softmax(coo("jax"), 1)
    isthmus.config.fallback = "cpu"
    isthmus.metrics.clear()
    assert_same(torch.sparse.softmax(coo("jax"), 1), torch.sparse.softmax(coo("cpu"), 1))
    assert any("_sparse_softmax" in op for op in isthmus.metrics.fallbacks())


def test_what_has_no_kernel_is_refused_in_words() -> None:
    with pytest.raises(
        NotImplementedError, match=r"exp\.default has no kernel for sparse tensors, on the CPU neither"
    ):
        coo("jax").exp()
    with pytest.raises(
        NotImplementedError, match="quantized dtypes on 'jax'; torchao's quantized tensors work"
    ):
        torch.empty(3, dtype=torch.qint8, device="jax")


def test_the_first_call_on_the_device_may_be_a_sparse_one() -> None:
    code = "import torch; print(torch.zeros(2, 3, layout=torch.sparse_coo, device='jax').to_dense().cpu().tolist())"
    done = forked_early(code)
    assert done.stdout.strip() == "[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]", done.stderr


def test_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.sparse.mm(coo("jax"), DENSE[7, 4])
    with pytest.raises(RuntimeError, match="Expected dim 0 size 7, got 5"):
        torch.sparse.mm(coo("jax"), DENSE[5, 4].to("jax"))
