"""The registry: what it refuses, custom ops, and how it takes changes in torch's schemas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest
import torch

import isthmus
from isthmus._graph.names import Missing, aten
from isthmus._ops import known_schemas
from isthmus._ops.registry import attempted, refused, registry
from isthmus._runtime import counters
from isthmus.errors import MissingLowering, SchemaError

_numbers = itertools.count()


class Toy:
    """A library of its own for each test, with one CPU kernel per op."""

    def __init__(self) -> None:
        self.name = f"toy{next(_numbers)}"
        self.library = torch.library.Library(self.name, "DEF")

    def define(self, schema: str, kernel: Any, meta: Any = None) -> Any:
        self.library.define(schema)
        full = schema.split("(")[0]
        self.library.impl(full, kernel, "CPU")
        if meta is not None:
            self.library.impl(full, meta, "Meta")
        packet, _, overload = full.partition(".")
        return getattr(getattr(getattr(torch.ops, self.name), packet), overload or "default")


@pytest.fixture
def toy() -> Iterator[Toy]:
    made = Toy()
    yield made
    for op in [op for op in registry if op._schema.name.startswith(made.name)]:
        del registry[op]


X = torch.arange(4.0)


def test_custom_op_runs_on_the_device(toy: Toy) -> None:
    op = toy.define("twice(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
    isthmus.lowering(op)(lambda x: x + x)
    counters.clear()
    torch.testing.assert_close(op(X.to("jax")).cpu(), X * 2)
    assert not counters.fallbacks


def test_custom_op_without_a_meta_kernel(toy: Toy) -> None:
    op = toy.define("pair(Tensor x) -> (Tensor, Tensor)", lambda x: (x, x[:2].clone()))
    isthmus.lowering(op)(lambda x: (x * 1, x[:2]))
    a, b = op(X.to("jax"))
    torch.testing.assert_close(a.cpu(), X)
    torch.testing.assert_close(b.cpu(), X[:2])


def test_torch_custom_op_decorator_gets_a_lowering() -> None:
    @torch.library.custom_op(f"toy_custom{next(_numbers)}::shift", mutates_args=())
    def shift(x: torch.Tensor, by: float) -> torch.Tensor:
        return x.cpu().add(by).to(x.device)

    shift.register_fake(lambda x, by: torch.empty_like(x))
    isthmus.lowering(shift._opoverload)(lambda x, by: x + by)
    torch.testing.assert_close(shift(X.to("jax"), 2.0).cpu(), X + 2)


def test_in_place_form_of_a_custom_op_is_derived(toy: Toy) -> None:
    op = toy.define("grow(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like)
    toy.define("grow_(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1), lambda x: x)
    isthmus.lowering(op)(lambda x: x + 1)
    x = X.to("jax")
    getattr(torch.ops, toy.name).grow_.default(x[1:3])
    torch.testing.assert_close(x.cpu(), torch.tensor([0.0, 2.0, 3.0, 3.0]))


def test_an_optional_argument_added_upstream_changes_nothing_at_its_default(toy: Toy) -> None:
    op = toy.define("f(Tensor x, *, bool fancy=False) -> Tensor", lambda x, fancy=False: x * 2 + fancy, None)
    isthmus.lowering(op)(lambda x: x * 2)
    torch.testing.assert_close(op(X.to("jax")).cpu(), X * 2)
    torch.testing.assert_close(op(X.to("jax"), fancy=False).cpu(), X * 2)


def test_an_argument_nobody_knows_goes_to_the_cpu_when_it_matters(toy: Toy) -> None:
    op = toy.define("f(Tensor x, *, bool fancy=False) -> Tensor", lambda x, fancy=False: x * 2 + fancy, None)
    isthmus.lowering(op)(lambda x: x * 2)
    with pytest.raises(MissingLowering, match="does not know fancy=True"):
        op(X.to("jax"), fancy=True)
    isthmus.config.fallback = "cpu"
    counters.clear()
    torch.testing.assert_close(op(X.to("jax"), fancy=True).cpu(), X * 2 + 1)
    assert counters.fallbacks[str(op)] == 1


def test_a_renamed_overload_is_reported_and_the_new_one_falls_back(toy: Toy) -> None:
    op = toy.define("f.renamed(Tensor x) -> Tensor", lambda x: x * 2)
    from isthmus._graph.names import _Namespace

    missing = _Namespace(toy.name).f.original
    assert isinstance(missing, Missing)
    isthmus.lowering(missing)(lambda x: x * 2)
    assert f"{toy.name}.f.original" in refused
    isthmus.config.fallback = "cpu"
    torch.testing.assert_close(op(X.to("jax")).cpu(), X * 2)


def test_a_split_overload_keeps_the_half_that_is_lowered(toy: Toy) -> None:
    scalar = toy.define(
        "f.Scalar(Tensor x, Scalar y) -> Tensor", lambda x, y: x * y, lambda x, y: torch.empty_like(x)
    )
    tensor = toy.define("f.Tensor(Tensor x, Tensor y) -> Tensor", lambda x, y: x * y)
    isthmus.lowering(scalar)(lambda x, y: x * y.value.astype(x.dtype))
    counters.clear()
    torch.testing.assert_close(scalar(X.to("jax"), 3.0).cpu(), X * 3)
    isthmus.config.fallback = "cpu"
    torch.testing.assert_close(tensor(X.to("jax"), X.to("jax")).cpu(), X * X)
    assert list(counters.fallbacks) == [str(tensor)]


def test_an_argument_whose_type_changed_still_arrives(toy: Toy) -> None:
    """``int n`` became ``int[] n``: the lowering gets a list it does not expect, and the CPU answers."""
    op = toy.define("f(Tensor x, int[] n) -> Tensor", lambda x, n: x * n[0])
    isthmus.lowering(op)(lambda x, n: x * n)
    with pytest.raises(MissingLowering, match="lowering failed"):
        op(X.to("jax"), [3])
    isthmus.config.fallback = "cpu"
    torch.testing.assert_close(op(X.to("jax"), [3]).cpu(), X * 3)


def test_a_lowering_that_disagrees_with_torch_is_not_believed(toy: Toy) -> None:
    op = toy.define("f(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
    isthmus.lowering(op)(lambda x: (x * 2).astype(jnp.float64))
    with pytest.raises(MissingLowering, match="gave float64"):
        op(X.to("jax"))
    isthmus.config.fallback = "cpu"
    torch.testing.assert_close(op(X.to("jax")).cpu(), X * 2)


def test_replacing_a_lowering(toy: Toy) -> None:
    op = toy.define("f(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
    isthmus.lowering(op)(lambda x: x * 2)
    torch.testing.assert_close(op(X.to("jax")).cpu(), X * 2)
    isthmus.lowering(op, replace=True)(lambda x: x * 5)
    torch.testing.assert_close(op(X.to("jax")).cpu(), X * 5)


@pytest.mark.parametrize(
    ("op", "function", "message"),
    [
        (torch.ops.aten.add, lambda self: self, "one overload"),
        (torch.ops.aten.add_.Tensor, lambda self, other: self, "writes to self"),
        (torch.ops.aten.transpose.int, lambda self, dim0, dim1: self, "returns a view"),
        (torch.ops.aten.add.Tensor, lambda self, other: self, "already has a lowering"),
        (torch.ops.aten._sparse_log_softmax.default, lambda self, wrong: self, "lacks: wrong"),
        (torch.ops.aten._sparse_log_softmax.default, lambda self: self, "ignores required"),
    ],
    ids=["packet", "mutating", "view", "duplicate", "stranger", "required"],
)
def test_refused_at_import(op: Any, function: Any, message: str) -> None:
    torch.zeros(1, device="jax")
    with pytest.raises(SchemaError, match=message):
        isthmus.lowering(op)(function)


# Overloads that some torch we support does not have yet, or no longer.
SOMEWHERE = {"aten._foreach_clone.default", "aten._foreach_mm.default", "aten.cholesky.default"}


def test_every_lowering_and_kernel_fits_this_torch() -> None:
    torch.zeros(1, device="jax")
    assert {name for name in refused if not name.startswith("toy")} <= SOMEWHERE


def test_every_lowering_and_kernel_has_its_schema_in_the_list() -> None:
    torch.zeros(1, device="jax")
    ours = {name for name in attempted if name.startswith(("aten.", "prims."))}
    missing = sorted(ours - set(known_schemas.known_forms()))
    assert not missing, f"run tests/update_schemas.py for {missing}"


def test_namespace_proxy() -> None:
    assert aten.add.Tensor is torch.ops.aten.add.Tensor
    assert isinstance(aten.add.NoSuchOverload, Missing)
    assert isinstance(aten.no_such_op.default, Missing)
