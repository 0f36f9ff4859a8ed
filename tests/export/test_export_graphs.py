"""Graphs to be exported: control flow, dynamic sizes in arguments of ops, attention in every form, and the passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as torch_map
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import isthmus
from isthmus.errors import ExportError, IsthmusError

Function = Callable[..., Any]


def agree(function: Function, args: Any, others: Any = (), dynamic_shapes: Any = None) -> Any:
    """Export a function for one example and compare it with torch on that and on others."""
    artifact = isthmus.export(function, args, dynamic_shapes=dynamic_shapes)
    program = artifact.module()
    for given in (args, *others):
        torch.testing.assert_close(tree_leaves(program(*given)), tree_leaves(function(*given)))
    return artifact


def branches(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: (x.sin(), x[:1] * 2), lambda x: (x.t().cos().t(), -x[-1:]), (x,))


def test_cond() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    artifact = agree(branches, (x,), [(-x,)])
    # A branch is a graph inside the call, printed with it.
    text = str(artifact.graph)
    assert "cond(%" in text
    assert text.count("  return %") == 2
    assert "  %0: float32[2, 3] = aten.sin.default(%a0)" in text


def test_cond_with_a_dynamic_size() -> None:
    x = torch.randn(4, 3)
    agree(branches, (x,), [(-x.abs(),), (torch.ones(7, 3),), (torch.zeros(2, 3),)], ({0: "rows"},))


def counted(x: Tensor, n: Tensor) -> Any:
    return while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x * 1.5 - i), (torch.zeros_like(n), x))


def stepped(x: Tensor, start: Tensor) -> Any:
    return scan(lambda carry, row: (carry + row.sum(), row * carry), start, x)


def mapped(x: Tensor, y: Tensor) -> Any:
    return torch_map(lambda row, y: row.sin() + y, x, y)


def accumulated(x: Tensor) -> Any:
    return associative_scan(lambda a, b: a * b + b, x, 0, combine_mode="generic")


@pytest.mark.parametrize(
    ("function", "args", "others", "shapes"),
    [
        (counted, (torch.ones(2), torch.tensor(3)), [(torch.ones(2), torch.tensor(0))], None),
        (counted, (torch.ones(2), torch.tensor(3)), [(torch.ones(5), torch.tensor(2))], ({0: "n"}, None)),
        (stepped, (torch.randn(3, 4), torch.tensor(0.5)), [], None),
        (stepped, (torch.randn(3, 4), torch.tensor(0.5)), [(torch.randn(3, 9), torch.tensor(1.0))], ({1: "n"}, None)),
        (mapped, (torch.randn(3, 4), torch.randn(4)), [(torch.randn(3, 6), torch.randn(6))], ({1: "n"}, {0: "n"})),
        (accumulated, (torch.randn(4, 2),), [(torch.randn(4, 2),)], None),
    ],
)  # fmt: skip
def test_loops(function: Function, args: Any, others: Any, shapes: Any) -> None:
    agree(function, args, others, shapes)


def test_an_index_out_of_range_inside_a_loop_is_told() -> None:
    def rows(table: Tensor, ids: Tensor) -> Tensor:
        return torch_map(lambda i, table: F.embedding(i, table), ids, table)

    table, ids = torch.eye(3), torch.tensor([[0, 1], [2, 1]])
    program = isthmus.export(rows, (table, ids)).module()
    torch.testing.assert_close(program(table, ids), rows(table, ids))
    with pytest.raises(IndexError, match="out of range"):
        program(table, ids + 1)


SIZES: dict[str, Function] = {
    "slices of a length": lambda x: (x[1:-1], x[:, -2:], x[x.shape[0] - 2 :], x[::2]),
    "the last of a length": lambda x: (x[-1], x.select(0, x.shape[0] - 1), x[0]),
    "numbers up to a length": lambda x: (
        torch.arange(x.shape[0]) * 2,
        torch.arange(1, x.shape[0] + 1, 2),
        torch.arange(x.shape[0], 0, -1),
        torch.arange(x.shape[0], dtype=torch.float32),
    ),
    "a length as a number": lambda x: (x / x.shape[0], x + x.numel(), x.mean(0) * x.shape[0]),
    "reshapes": lambda x: (x.t().sin().t().reshape(-1), x.reshape(-1, 2), x.flatten().unflatten(0, x.shape)),
    "views of views": lambda x: (x.t().t() + x, x.unsqueeze(0).expand(2, -1, -1).reshape(-1, 4)),
    "new tensors": lambda x: (x.new_zeros(x.shape), torch.ones(x.shape[0], 2), torch.full_like(x, 3.0)),
    "constants that are cast": lambda x: x * torch.ones(x.shape, dtype=torch.int64).to(torch.float32),
    "along a length": lambda x: (F.pad(x, (1, 2)), F.pad(x.t(), (2, 0)), x.cumsum(0), x.flip(0)),
    "sizes of both": lambda x: (x.repeat(2, 1), torch.cat([x, x[:1]]), x[:, None] * x[None], x @ x.t()),
    "the larger of two": lambda x: x.new_zeros(max(x.shape[0], 3)) + min(x.shape[0], 100),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_may_vary(name: str) -> None:
    others = [(torch.randn(n, 4),) for n in (4, 8, 21)]
    agree(SIZES[name], (torch.randn(6, 4),), others, ({0: torch.export.Dim("n", min=4)},))


def attends(*shapes: tuple[int, ...], **options: Any) -> Any:
    return shapes, options


FORMS = {
    "heads": attends((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4)),
    "no heads": attends((2, 5, 4), (2, 6, 4), (2, 6, 8), is_causal=True),
    "no batch": attends((5, 4), (6, 4), (6, 4)),
    "shared keys": attends((2, 6, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4), enable_gqa=True, scale=0.3),
    "keys of one batch": attends((2, 3, 5, 4), (1, 3, 6, 4), (1, 3, 6, 4)),
    "a mask": attends((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), (5, 6)),
    "a mask of heads": attends((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), (2, 1, 5, 6)),
    "no heads and a mask": attends((2, 5, 4), (2, 6, 4), (2, 6, 4), (2, 5, 6)),
    "more dims": attends((2, 2, 3, 5, 4), (2, 2, 3, 6, 4), (2, 2, 3, 6, 4)),
}


@pytest.mark.parametrize("device", ["cpu", "jax"])
@pytest.mark.parametrize("form", FORMS)
def test_attention(form: str, device: str) -> None:
    shapes, options = FORMS[form]
    given = [torch.randn(shape) for shape in shapes]

    def attention(*args: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*args, **options)

    program = isthmus.export(attention, [x.to(device) for x in given]).module()
    torch.testing.assert_close(program(*given), attention(*given))


def test_attention_with_dropout_is_refused() -> None:
    x = torch.randn(1, 2, 3, 4, device="jax")
    with pytest.raises(ExportError, match=r"dropout|random"):
        isthmus.export(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), (x,))


def test_the_gradient_of_a_loss_with_a_dynamic_batch() -> None:
    def loss(w: Tensor, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x @ w, target, reduction="sum")

    def examples(n: int) -> tuple[Tensor, ...]:
        return torch.randn(4, 5), torch.randn(n, 4), torch.arange(n) % 5

    step = make_fx(torch.func.grad_and_value(loss), tracing_mode="symbolic")(*examples(6))
    program = isthmus.export(step, examples(6), dynamic_shapes=(None, {0: "n"}, {0: "n"})).module()
    for n in (2, 6, 9):
        given = examples(n)
        torch.testing.assert_close(list(program(*given)), list(torch.func.grad_and_value(loss)(*given)))


def test_a_graph_with_branches_has_no_form_in_fx() -> None:
    artifact = isthmus.export(branches, torch.ones(2, 3))
    with pytest.raises(IsthmusError, match="cond is no op of torch"):
        artifact.graph.to_fx()
