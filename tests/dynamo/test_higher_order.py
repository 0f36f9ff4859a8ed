"""Ops that take graphs, compiled: control flow, nested regions, attention by functions, and what torch inlines."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as torch_map
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from isthmus._device.core.fallback import FallbackWarning
from tests.interpreters import forked_early


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


def slow(value: Any) -> Any:
    """Return a parameter whose rows are slow tests."""
    return pytest.param(value, marks=pytest.mark.slow)


def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """Compile a function whose every node must be inside a program, unless a test says otherwise."""
    options = {"fallback": how.pop("fallback", "error")}
    return torch.compile(function, backend="isthmus", fullgraph=True, options=options, **how)


def tensor(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor that depends on its shape only."""
    generator = torch.Generator().manual_seed(math.prod(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad)


def on_device(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("jax").requires_grad_(value.requires_grad)


def agree(
    function: Callable[..., Any],
    *args: Any,
    reference: Callable[..., Any] | None = None,
    call: Callable[..., Any] | None = None,
) -> None:
    """Require that a compiled function gives the results and gradients of a reference on the CPU."""
    theirs = [
        a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args
    ]
    ours = [on_device(a) for a in args]
    wanted = tree_leaves((reference or function)(*theirs))
    found = tree_leaves((call or compiled(function))(*ours))
    assert len(found) == len(wanted)
    for mine, its in zip(found, wanted, strict=True):
        assert isinstance(mine, Tensor)
        assert mine.device.type == "jax"
        assert mine.requires_grad == its.requires_grad
        torch.testing.assert_close(mine.detach().cpu(), its.detach())
    if any(its.requires_grad for its in wanted):
        _gradients_agree(found, wanted, ours, theirs)


def _gradients_agree(found: list[Tensor], wanted: list[Tensor], ours: list[Any], theirs: list[Any]) -> None:
    pairs = [(f, w) for f, w in zip(found, wanted, strict=True) if w.requires_grad]
    seeds = [tensor(*w.shape).to(w.dtype) for _, w in pairs]
    torch.autograd.backward([w for _, w in pairs], seeds)
    torch.autograd.backward([f for f, _ in pairs], [seed.to("jax") for seed in seeds])
    for mine, its in zip(ours, theirs, strict=True):
        if isinstance(its, Tensor) and its.requires_grad:
            wanted_grad = torch.zeros_like(its) if its.grad is None else its.grad
            found_grad = torch.zeros_like(its) if mine.grad is None else mine.grad.cpu()
            torch.testing.assert_close(found_grad, wanted_grad)


# Control flow.


def choose(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: (x.sin(), x + 1), lambda x: (x.cos(), x * 2), (x,))


@pytest.mark.parametrize("sign", [slow(1), -1])
@pytest.mark.parametrize("grad", [slow(False), True])
def test_cond(sign: int, grad: bool) -> None:
    agree(choose, (sign * tensor(3, 4).abs()).requires_grad_(grad))


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_cond_with_captured_weights(sign: int) -> None:
    weight = tensor(4, 4, grad=True)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ w, lambda x: x.cos(), (x,)) * 2

    agree(function, (sign * tensor(3, 4).abs()).requires_grad_(), weight)


@pytest.mark.slow
def test_cond_inside_cond() -> None:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.max() > 2, lambda x: x * 2, lambda x: x - 1, (x,))

    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, inner, lambda x: x.exp(), (x,))

    call = compiled(function)
    for x in (torch.ones(3), torch.full((3,), 3.0), -torch.ones(3)):
        agree(function, x, call=call)


@pytest.mark.slow
def test_cond_on_sizes_is_decided_while_tracing() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] > 3, lambda x: x.sin(), lambda x: x.cos(), (x,))

    for rows in (3, 5, 6):
        torch._dynamo.reset()
        agree(function, tensor(rows, 4), call=compiled(function, dynamic=True))


@pytest.mark.slow
def test_cond_keeps_integer_and_half_dtypes() -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x, y: (x + 1, y * 2), lambda x, y: (x - 1, y / 3), (x, y))

    agree(function, torch.arange(4, dtype=torch.int32), tensor(3, dtype=torch.float16))


def test_while_loop() -> None:
    def function(x: Tensor) -> Any:
        start = torch.tensor(0, device=x.device)
        return while_loop(lambda i, x: (i < 5) & (x.sum() < 50), lambda i, x: (i + 1, x * 2), (start, x))

    call = compiled(function)
    for x in (torch.ones(3, 4), torch.ones(3, 4) / 100, torch.full((3, 4), 9.0)):
        agree(function, x, call=call)


@pytest.mark.slow
def test_while_loop_that_counts_with_a_python_number() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, (x @ w).sin()), (0, x))[1]

    agree(function, tensor(3, 4), tensor(4, 4))


@pytest.mark.slow
def test_while_loop_whose_number_is_read_stays_outside() -> None:
    def function(x: Tensor) -> Any:
        count, x = while_loop(lambda i, x: x.sum() < 50, lambda i, x: (i + 1, x * 2), (0, x))
        return x + count

    agree(function, torch.ones(3, 4), call=_left_outside(function, "a number that a loop computes"))


def _left_outside(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Compile, and require the warning that a node is left outside for this reason."""
    call = compiled(function, fallback="warn")

    def run(*args: Any) -> Any:
        with pytest.warns(FallbackWarning, match=reason):
            return call(*args)

    return run


@pytest.mark.parametrize("grad", [False, slow(True)])
@pytest.mark.parametrize("reverse", [slow(False), True])
def test_scan(grad: bool, reverse: bool) -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        start = torch.zeros(4, device=x.device)
        return scan(lambda c, x: ((c @ w).sin() + x, c * x), start, x, reverse=reverse)

    agree(function, tensor(5, 4, grad=grad), tensor(4, 4, grad=grad))


@pytest.mark.slow
def test_scan_along_another_dim_with_several_carries() -> None:
    def step(carry: Any, x: Any) -> Any:
        count, total = carry
        return (count + 1, total + x["a"] * count), {"y": total.cos(), "n": count.clone()}

    def function(a: Tensor) -> Any:
        start = (torch.zeros((), dtype=torch.int64, device=a.device), torch.zeros(3, device=a.device))
        return scan(step, start, {"a": a}, dim=1)

    agree(function, tensor(3, 4))


@pytest.mark.slow
def test_scan_whose_body_makes_copies_of_views() -> None:
    def step(carry: Tensor, x: Tensor) -> Any:
        return carry + x[1:].log_softmax(-1).t().reshape(2, 4), x[0].expand(3, 4).narrow(
            1, 1, 2
        ) * carry.sum()

    agree(lambda x: scan(step, x[0, 1:] * 0, x), tensor(5, 3, 4, grad=True))


@pytest.mark.parametrize("grad", [slow(False), True])
def test_map(grad: bool) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch_map(lambda x, w: (x.sin() @ w).relu(), x, w)

    agree(function, tensor(5, 4, grad=grad), tensor(4, 4, grad=grad))


@pytest.mark.slow
def test_dynamic_sizes_inside_bodies() -> None:
    def function(x: Tensor) -> Any:
        carry, rows = scan(lambda c, x: (c + x, x.view(-1, 2) * x.shape[0]), x[0] * 0, x)
        return torch.cond(carry.sum() > 0, lambda x: x.sum(0), lambda x: x[1] * 1, (rows,))

    call = compiled(function, dynamic=True)
    for shape in ((3, 4), (5, 6), (4, 8)):
        agree(function, tensor(*shape), call=call)


@pytest.mark.slow
def test_associative_scan_is_inlined_by_torch() -> None:
    def function(x: Tensor) -> Tensor:
        return associative_scan(lambda a, b: a * b + 1, x, 0, combine_mode="generic")

    agree(function, tensor(5, 4, grad=True))


def test_associative_scan_as_an_op() -> None:
    """torch makes it only for devices with a kernel of its own, so the graph is made by hand."""
    from isthmus._dynamo.backend import _compile
    from isthmus._dynamo.options import Options

    def function(x: Tensor, y: Tensor) -> Any:
        def combine(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
            return [a * c, b * c + d]

        return list(torch.ops.higher_order.associative_scan(combine, [x, y], ()))

    x, y = tensor(7, 4), tensor(7, 4) * 2
    graph = make_fx(function, tracing_mode="fake")(x, y)
    assert any(n.target is torch.ops.higher_order.associative_scan for n in graph.graph.nodes)
    found = _compile(Options(fallback="error"), "test", graph, [x, y])([x.to("jax"), y.to("jax")])
    product, total = x[0], y[0]
    wanted = [(product, total)]
    for row, shift in zip(x[1:], y[1:], strict=True):
        product, total = product * row, total * row + shift
        wanted.append((product, total))
    for mine, its in zip(found, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(mine.cpu(), torch.stack(its))


def attention(x: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("grad", [False, slow(True)])
def test_attention_inside_bodies(grad: bool) -> None:
    def function(x: Tensor) -> Any:
        chosen = torch.cond(x.sum() > 0, attention, lambda x: x * 1, (x,))
        return chosen, torch_map(attention, x[None] * 2)

    agree(function, tensor(1, 2, 5, 4).abs().requires_grad_(grad))


@pytest.mark.slow
def test_strides_of_an_argument_of_a_body_stay_outside() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0, lambda x: x.as_strided((2, 2), (4, 2)) * 1, lambda x: x[:2, :2] * 2, (x,)
        )

    call = _left_outside(function, "strides of an argument")
    agree(function, torch.arange(9.0).reshape(3, 3), call=call)


# Conditions on values that lowerings require inside a body.


def test_an_index_out_of_range_is_told_by_the_branch_that_ran() -> None:
    def function(x: Tensor, i: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x, i: x[i], lambda x, i: x[i * 0], (x, i))

    call = compiled(function)
    x, good, bad = torch.ones(4), torch.tensor([1, 3]), torch.tensor([1, 4])
    agree(function, x, good, call=call)
    agree(function, -x, bad, call=call)
    with pytest.raises(IndexError, match="out of"):
        call(on_device(x), on_device(bad))


@pytest.mark.slow
def test_an_index_out_of_range_is_told_by_a_loop() -> None:
    def looped(x: Tensor, i: Tensor) -> Any:
        start = torch.tensor(0, device=x.device)
        return while_loop(lambda n, i: n < 3, lambda n, i: (n + 1, x[i] + i + n), (start, i))

    def scanned(x: Tensor, i: Tensor) -> Any:
        return scan(lambda c, i: (c + x[i], x[i] * 2), x[:1] * 0, i)

    def mapped(x: Tensor, i: Tensor) -> Any:
        return torch_map(lambda i, x: x[i], i, x)

    x, good, bad = torch.zeros(8, dtype=torch.int64), torch.tensor([1, 3]), torch.tensor([1, 7])
    agree(looped, x, good)
    with pytest.raises(IndexError, match="out of"):
        compiled(looped)(on_device(x), on_device(bad))
    for function in (scanned, mapped):
        rows = torch.tensor([[0], [2], [3]])
        agree(function, tensor(4), rows)
        with pytest.raises(IndexError, match="out of"):
            compiled(function)(on_device(tensor(4)), on_device(rows + 1))


@pytest.mark.slow
def test_an_index_that_decides_whether_a_loop_goes_on_stays_outside() -> None:
    def function(x: Tensor, i: Tensor) -> Any:
        return while_loop(lambda i, x: x[i].sum() < 3, lambda i, x: (i + 1, x + 0), (i, x))

    x, i = torch.arange(6.0), torch.tensor([0])
    agree(function, x, i, call=_left_outside(function, "whether a loop goes on"))


# Random numbers.


@pytest.mark.parametrize("kind", [slow("cond"), slow("while"), slow("scan"), slow("map"), "region"])
def test_random_ops_inside_a_body_stay_outside(kind: str) -> None:
    def draw(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    region = torch.compiler.nested_compile_region(draw)

    def function(x: Tensor) -> Tensor:
        if kind == "cond":
            return torch.cond(x.sum() > 0, draw, lambda x: x.sin(), (x,))
        if kind == "while":
            start = torch.tensor(0, device=x.device)
            return while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, draw(x)), (start, x))[1]
        if kind == "scan":
            return scan(lambda c, x: (c + 0, draw(x)), x[0], x)[1]
        return torch_map(draw, x) if kind == "map" else torch.stack([region(x[0]), region(x[1])])

    call = _left_outside(function, "native_dropout|bernoulli|rand")
    found = call(torch.ones(2, 400, device="jax")).cpu()
    assert set(found.unique().tolist()) <= {0.0, 1.0, 2.0, 4.0}
    assert not torch.equal(found[0], found[1]), "each step draws its own numbers"


def test_checkpoint_draws_the_same_mask_again() -> None:
    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.nn.functional.dropout(x.sin().cos(), 0.5), x, use_reentrant=False)

    x = torch.linspace(0.1, 0.9, 1000, device="jax").requires_grad_()
    out = compiled(function)(x)
    out.backward(torch.ones_like(out))
    kept = out.detach().cpu() != 0
    assert 400 < kept.sum() < 600
    plain = x.detach().cpu()
    slope = -plain.sin().sin() * plain.cos() * 2
    torch.testing.assert_close(x.grad.cpu(), torch.where(kept, slope, 0.0))


# What torch inlines, nests or leaves to others.


@pytest.mark.parametrize("grad", [slow(False), True])
def test_nested_compile_region(grad: bool) -> None:
    @torch.compiler.nested_compile_region
    def region(x: Tensor, w: Tensor) -> Tensor:
        return (x.sin() @ w).relu()

    agree(lambda x, w: region(region(x, w), w) * 2, tensor(3, 4, grad=grad), tensor(4, 4, grad=grad))


def test_nested_compile_region_tells_of_a_bad_index() -> None:
    @torch.compiler.nested_compile_region
    def region(x: Tensor, i: Tensor) -> Tensor:
        return x[i] * 2

    def function(x: Tensor, i: Tensor) -> Tensor:
        return region(x, i) + region(x + 1, i)

    call = compiled(function)
    agree(function, tensor(4), torch.tensor([3]), call=call)
    with pytest.raises(IndexError, match="out of"):
        call(on_device(tensor(4)), torch.tensor([4], device="jax"))


def test_checkpoint() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda x: (x @ w).sin().exp(), x, use_reentrant=False) * 2

    agree(function, tensor(3, 4, grad=True), tensor(4, 4, grad=True))


def test_autocast() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16):
            product = x @ w
            with torch.autocast(device_type=x.device.type, enabled=False):
                wide = x @ w
        return product, wide + product

    agree(function, tensor(3, 4, grad=True), tensor(4, 4, grad=True))


def test_no_grad_inside() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = x @ w
        return fixed * x

    agree(function, tensor(3, 4, grad=True), tensor(4, 4, grad=True))


TRANSFORMS = {
    "vmap": lambda x, w: torch.vmap(lambda row: (row @ w).sin())(x),
    "vmap of grad": lambda x, w: torch.vmap(torch.func.grad(lambda row: (row @ w).sin().sum()))(x),
    "grad": lambda x, w: torch.func.grad(lambda x: (x @ w).sin().sum())(x),
    "jacrev": lambda x, w: torch.func.jacrev(lambda row: (row @ w).cos())(x[0]),
    "jvp": lambda x, w: torch.func.jvp(lambda x: (x @ w).cos(), (x,), (x + 1,)),
}


@pytest.mark.parametrize("name", [slow(name) if at % 2 else name for at, name in enumerate(TRANSFORMS)])
def test_transforms(name: str) -> None:
    agree(TRANSFORMS[name], tensor(3, 4), tensor(4, 4))


def test_vmap_with_gradients() -> None:
    agree(TRANSFORMS["vmap"], tensor(3, 4, grad=True), tensor(4, 4, grad=True))


class Doubled(torch.autograd.Function):
    """A sine whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * 2


def test_autograd_function() -> None:
    agree(lambda x: Doubled.apply(x * 3) + 1, tensor(3, 4, grad=True))


@torch.library.custom_op("isthmus_test::increase", mutates_args=("x",))
def increase(x: Tensor, by: float) -> None:
    x.add_(by)


@torch.library.custom_op("isthmus_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


def test_custom_ops_run_between_programs() -> None:
    def function(x: Tensor) -> Any:
        z = x.sin() * 2
        increase(z, 1.0)
        y = twice(z.cos() + 1)
        increase(x, 2.0)
        return y.exp() + x, z

    x = tensor(3, 4)
    ours, theirs = x.to("jax"), x.clone()
    with pytest.warns(FallbackWarning) as told:
        found = compiled(function, fallback="warn")(ours)
    names = {str(warning.message).split(" ")[0] for warning in told}
    assert names == {"auto_functionalized_v2", "isthmus_test.twice.default"}
    for mine, its in zip(found, function(theirs), strict=True):
        torch.testing.assert_close(mine.cpu(), its)
    torch.testing.assert_close(ours.cpu(), theirs)


def test_control_flow_in_a_graph_that_is_cut() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos(), (x,))
        z = twice(y * 3)
        return scan(lambda c, x: (c + x, c * 2), z[0] * 0, z)[1] + y

    call = compiled(function, fallback="cpu")
    agree(function, tensor(3, 4), call=call)
    agree(function, -tensor(3, 4), call=call)


# Attention by functions of scores: torch's own has no gradients on the CPU, so the reference is written out.


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what queries attend to, and the log-sum-exp, in float64 throughout."""
    group = query.shape[1] // key.shape[1]
    wide = [x.double() for x in (query, key, value)]
    k, v = (x.repeat_interleave(group, 1) for x in wide[1:])
    scores = wide[0] @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(query.shape[-1]))
    place = torch.meshgrid([torch.arange(n) for n in scores.shape], indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *place)
    if mask_mod is not None:
        scores = torch.where(mask_mod(*place), scores, -math.inf)
    sums = scores.logsumexp(-1)
    empty = sums == -math.inf
    chances = torch.where(empty[..., None], 0, (scores - torch.where(empty, 0, sums)[..., None]).exp())
    return (chances @ v).to(query.dtype), sums.float()


def inputs(heads: int = 4, dtype: torch.dtype = torch.float32, batch: int = 2) -> list[Tensor]:
    """Return queries of four heads, keys and values of ``heads``, all wanting gradients."""
    shapes = [(2, 4, 16, 8), (batch, heads, 24, 8), (batch, heads, 24, 6)]
    return [tensor(*shape).to(dtype).requires_grad_() for shape in shapes]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def later(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q > 3 + b) & (h != 2)


def blocks(mask_mod: Callable[..., Tensor], device: Any, batch: int | None = None) -> BlockMask:
    heads = None if batch is None else 4
    return create_block_mask(mask_mod, batch, heads, 16, 24, device=device, BLOCK_SIZE=8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [None, 0.25])
def test_flex_attention(dtype: torch.dtype, scale: float | None) -> None:
    agree(
        lambda q, k, v: flex_attention(q, k, v, scale=scale),
        *inputs(dtype=dtype),
        reference=lambda q, k, v: attend(q, k, v, scale=scale)[0],
    )


@pytest.mark.slow
def test_flex_attention_without_gradients() -> None:
    agree(flex_attention, *[x.detach() for x in inputs()], reference=lambda q, k, v: attend(q, k, v)[0])


def recency(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + q - k


def test_flex_attention_in_half_precision_is_no_further_from_the_truth_than_torch() -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = recency(q @ k.transpose(-1, -2) / math.sqrt(8), *torch.meshgrid(*places, indexing="ij"))
        return scores.softmax(-1) @ v

    places = [torch.arange(n) for n in (2, 4, 16, 24)]
    given = inputs(dtype=torch.bfloat16)
    truth = _with_gradients(lambda *qkv: attend(*qkv, recency)[0], [x.detach().double() for x in given])
    theirs = _with_gradients(plain, given)
    ours = _with_gradients(
        compiled(lambda *qkv: flex_attention(*qkv, score_mod=recency)), map(on_device, given)
    )
    for mine, its, true in zip(ours, theirs, truth, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.cpu().double() - true).norm() <= (its.double() - true).norm()


def _with_gradients(function: Callable[..., Tensor], args: Any) -> list[Tensor]:
    """Return a result and the gradients of its sum of squares."""
    given = [x.detach().requires_grad_() for x in args]
    out = function(*given)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in given)]


@pytest.mark.parametrize("mask_mod", [slow(causal), later])
def test_flex_attention_with_a_block_mask(mask_mod: Callable[..., Tensor]) -> None:
    batch = 2 if mask_mod is later else None

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = blocks(mask_mod, q.device, batch)
        out, aux = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    agree(function, *inputs(2), reference=lambda q, k, v: attend(q, k, v, mask_mod=mask_mod))


@pytest.mark.slow
def test_flex_attention_with_a_mask_made_outside() -> None:
    mask = blocks(causal, "jax")
    agree(
        lambda q, k, v: flex_attention(q, k, v, block_mask=mask),
        *inputs(),
        reference=lambda q, k, v: attend(q, k, v, mask_mod=causal)[0],
    )


@pytest.mark.slow
def test_flex_attention_tells_the_highest_scores() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        aux = flex_attention(q, k, v, scale=0.5, return_aux=AuxRequest(lse=True, max_scores=True))[1]
        return aux.lse, aux.max_scores

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
        scores = q @ k.transpose(-1, -2) * 0.5
        return scores.logsumexp(-1), scores.amax(-1)

    agree(function, *[x.detach() for x in inputs()], reference=reference)


def slope(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *captured: Tensor) -> Tensor:
    return s + captured[0][h] * (q - k)


def relative(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *captured: Tensor) -> Tensor:
    slopes, table, factor = captured
    return torch.tanh(s) * factor + table[q - k + 30] * slopes[h] + table[k] + table.sum()


@pytest.mark.parametrize("score_mod", [slope, slow(relative)])
def test_flex_attention_with_captured_tensors(score_mod: Callable[..., Tensor]) -> None:
    captured = [tensor(4, grad=True), tensor(64, grad=True), torch.tensor(1.3, requires_grad=True)]

    def function(q: Tensor, k: Tensor, v: Tensor, *captured: Tensor) -> Tensor:
        change = lambda s, b, h, i, j: score_mod(s, b, h, i, j, *captured)  # noqa: E731
        return flex_attention(q, k, v, score_mod=change, block_mask=blocks(causal, q.device), enable_gqa=True)

    def reference(q: Tensor, k: Tensor, v: Tensor, *captured: Tensor) -> Tensor:
        return attend(q, k, v, lambda *given: score_mod(*given, *captured), causal)[0]

    agree(function, *inputs(2), *captured, reference=reference)


@pytest.mark.slow
def test_flex_attention_with_documents() -> None:
    documents = torch.tensor([0] * 5 + [1] * 11 + [2] * 8)

    def function(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        mask = blocks(lambda b, h, i, j: ids[i] == ids[j], q.device)
        return flex_attention(q, k, v, block_mask=mask)

    def reference(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return attend(q, k, v, mask_mod=lambda b, h, i, j: ids[i] == ids[j])[0]

    agree(function, *inputs(), documents, reference=reference)


@pytest.mark.slow
def test_flex_attention_with_blocks_and_no_function() -> None:
    """Which blocks are listed decides, as in torch's compiled kernels."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count = torch.tensor([[[1, 2]]], dtype=torch.int32, device=q.device)
        columns = torch.tensor([[[[1, 0, 2], [2, 0, 1]]]], dtype=torch.int32, device=q.device)
        mask = BlockMask.from_kv_blocks(count, columns, BLOCK_SIZE=8, seq_lengths=(16, 24))
        return flex_attention(q, k, v, block_mask=mask)

    def listed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(q < 8, k // 8 == 1, k // 8 != 1)

    agree(function, *inputs(), reference=lambda q, k, v: attend(q, k, v, mask_mod=listed)[0])


@pytest.mark.slow
def test_flex_attention_with_keys_of_one_batch() -> None:
    agree(
        lambda q, k, v: flex_attention(q, k, v, block_mask=blocks(later, q.device, 2)),
        *inputs(batch=1),
        reference=lambda q, k, v: attend(q, *(x.expand(2, *x.shape[1:]) for x in (k, v)), mask_mod=later)[0],
    )


@pytest.mark.slow
def test_flex_attention_tells_of_a_bad_index() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[i])

    with pytest.raises(IndexError, match="out of"):
        compiled(function)(*[on_device(x.detach()) for x in inputs()], torch.zeros(15, device="jax"))


@pytest.mark.slow
def test_flex_attention_for_sizes_that_vary() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + i - j)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, lambda s, b, h, i, j: s + i - j)[0]

    call = compiled(function, dynamic=True)
    for length in (12, 20):
        shapes = [(2, 4, length, 8), (2, 4, length + 3, 8), (2, 4, length + 3, 8)]
        agree(function, *[tensor(*s, grad=True) for s in shapes], reference=reference, call=call)


@pytest.mark.slow
def test_flex_attention_under_autocast() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(device_type=q.device.type, dtype=torch.bfloat16):
            return flex_attention(q, k, v)

    given = [x.detach() for x in inputs()]
    found = compiled(function)(*map(on_device, given))
    half = compiled(flex_attention)(*(on_device(x.bfloat16()) for x in given))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.cpu(), half.cpu())


def test_flex_attention_still_refuses_other_devices() -> None:
    x = torch.empty(1, 1, 2, 2, device="meta")
    with pytest.raises(ValueError, match="only supported on"):
        flex_attention(x, x, x)


FLEX = """
import torch
from torch.nn.attention.flex_attention import flex_attention

def earlier(score, batch, head, query, key):
    return torch.where(query >= key, score, -float("inf"))

def attend(q):
    return flex_attention(q, q, q, score_mod=earlier)

q = torch.randn(1, 2, 16, 16)
wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
x = q.to("jax").requires_grad_()
{call}
torch.testing.assert_close(found.detach().cpu(), wanted)
found.sum().backward()
assert x.grad.shape == q.shape
"""


@pytest.mark.parametrize(
    "call",
    ["found = attend(x)", "found = torch.compile(attend, backend='isthmus')(x)"],
    ids=["eager", "compiled"],
)
def test_flex_attention_is_the_first_thing_a_process_does(call: str) -> None:
    done = forked_early(FLEX.format(call=call))
    assert done.returncode == 0, done.stderr[-2000:]
