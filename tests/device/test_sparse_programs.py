"""Programs with sparse tensors against CPU torch: gradients, optimizers, files, and what each mode does."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import isthmus
from isthmus.errors import IsthmusError
from tests.device.test_sparse import DENSE, INDICES, NUMBERS, assert_same, bias, coo, csr, left, right

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")

Function = Callable[..., Any]


def numbers(device: str) -> torch.Tensor:
    return NUMBERS.to(device, copy=True).requires_grad_()


def matrix(values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(INDICES.to(values.device), values, (5, 7))


LOSSES: dict[str, Function] = {
    "mm": lambda v: torch.sparse.mm(matrix(v), right(v)) * bias(v),
    "mm of coalesced": lambda v: torch.sparse.mm(matrix(v).coalesce(), right(v)) * bias(v),
    "mm of csr": lambda v: torch.sparse.mm(matrix(v).coalesce().to_sparse_csr(), right(v)) * bias(v),
    "to_dense": lambda v: matrix(v).to_dense() * left(v),
    "sum": lambda v: torch.sparse.sum(matrix(v)) ** 2,
    "sum over a dim": lambda v: torch.sparse.sum(matrix(v).coalesce(), 0).to_dense() ** 2,
    "products": lambda v: (matrix(v) * matrix(v.detach()) * 3).to_dense() * left(v),
    "dense +": lambda v: (left(v) + matrix(v)) ** 2,
    "sparse @ sparse": lambda v: torch.sparse.mm(matrix(v).coalesce(), matrix(v).coalesce().t()).to_dense() ** 2,
    "transposed": lambda v: (matrix(v).t() + matrix(v).t()).to_dense() ** 2,
    "values": lambda v: matrix(v).coalesce().values() ** 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(loss, marks=pytest.mark.slow if name == "sparse @ sparse" else ())
        for name, loss in LOSSES.items()
    ],
    ids=LOSSES,
)
def test_gradients_agree_with_the_cpu(loss: Function) -> None:
    grads = []
    for device in ("cpu", "jax"):
        values = numbers(device)
        loss(values).sum().backward()
        grads.append(values.grad)
    assert_same(grads[1], grads[0])


def test_gradients_of_the_dense_factor_and_of_what_is_masked() -> None:
    grads = []
    for device in ("cpu", "jax"):
        factor = DENSE[7, 4].to(device, copy=True).requires_grad_()
        masked = DENSE[5, 7].to(device, copy=True).requires_grad_()
        for make in (coo, csr):
            torch.sparse.mm(make(device), factor).square().sum().backward()
        (
            torch.sparse.mm(masked.to_sparse(), factor).sum()
            + masked.sparse_mask(coo(device)).to_dense().sum()
        ).backward()
        grads.append((factor.grad, masked.grad))
    assert_same(grads[1], grads[0])


def trained(device: str, make: Function, table: Function = torch.nn.Embedding, mode: str = "eager") -> Any:
    """Train a table of embeddings with sparse gradients; return losses, weights and the last gradient."""
    torch.manual_seed(0)
    model = table(20, 3, sparse=True).to(device)
    optimizer = make(model.parameters())
    rng = torch.Generator().manual_seed(1)
    losses = []

    def step(indices: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(indices).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    if mode == "compiled" and device == "jax":
        torch._dynamo.reset()
        step = torch.compile(step, backend="isthmus")
    with isthmus.lazy() if mode == "lazy" and device == "jax" else contextlib.nullcontext():
        for _ in range(3):
            losses.append(step(torch.randint(0, 20, (4, 5), generator=rng).to(device)).detach())
    assert model.weight.grad.is_sparse
    return losses, model.weight.detach(), model.weight.grad.coalesce()


OPTIMIZERS: dict[str, Function] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p), 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_sparse_gradients_train_embeddings(make: Function) -> None:
    assert_same(trained("jax", make), trained("cpu", make))


def test_sparse_gradients_of_bags() -> None:
    table = functools.partial(torch.nn.EmbeddingBag, mode="sum")
    assert_same(
        trained("jax", OPTIMIZERS["SparseAdam"], table), trained("cpu", OPTIMIZERS["SparseAdam"], table)
    )


@pytest.mark.parametrize("mode", ["lazy", "compiled"])
@pytest.mark.parametrize("name", ["SGD", pytest.param("SparseAdam", marks=pytest.mark.slow)])
def test_sparse_gradients_in_graphs(name: str, mode: str) -> None:
    assert_same(trained("jax", OPTIMIZERS[name], mode=mode), trained("cpu", OPTIMIZERS[name]))


@pytest.mark.parametrize("make", [coo, csr])
def test_lazy_mode_and_compiled_graphs(make: Function) -> None:
    def function(s: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (torch.sparse.mm(s, x.cos()) + 1).sin() + s.to_dense()[:, :4]

    wanted = function(make("cpu"), DENSE[7, 4])
    with isthmus.lazy():
        found = function(make("jax"), DENSE[7, 4].to("jax"))
    assert_same(found, wanted)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="isthmus")
    for _ in range(2):
        assert_same(compiled(make("jax"), DENSE[7, 4].to("jax")), wanted)


def test_isthmus_jit_says_what_it_cannot_take() -> None:
    with pytest.raises(IsthmusError, match="sparse_coo tensor has no memory of its own"):
        isthmus.jit(torch.sparse.mm)(coo("jax"), DENSE[7, 4].to("jax"))
    ours = isthmus.jit(
        lambda i, v, x: torch.sparse.mm(torch.sparse_coo_tensor(i, v, (5, 7), check_invariants=False), x)
    )
    parts = INDICES.to("jax"), NUMBERS.to("jax"), DENSE[7, 4].to("jax")
    for _ in range(3):
        assert_same(ours(*parts), coo("cpu") @ DENSE[7, 4])


def test_files_and_modules() -> None:
    for make in (coo, csr):
        file = io.BytesIO()
        torch.save(make("jax"), file)
        for place in ("jax", "cpu"):
            file.seek(0)
            loaded = torch.load(file, map_location=place)
            assert loaded.device.type == place
            assert_same(loaded.to("jax"), make("cpu"))
        module = torch.nn.Module()
        module.register_buffer("a", make("cpu"))
        assert_same(module.to("jax").a, make("cpu"))
        assert module.cpu().a.device.type == "cpu"


def test_printing() -> None:
    for make in (coo, csr):
        text = repr(make("jax"))
        assert "device='jax:0'" in text
        assert "layout=torch.sparse" in text
