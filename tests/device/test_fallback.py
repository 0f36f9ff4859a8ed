"""The tiers below a lowering: decompositions in one program, then the CPU, counted and with torch's semantics."""

from __future__ import annotations

import warnings

import pytest
import torch

import isthmus
from isthmus._device.core.fallback import FallbackWarning
from isthmus._runtime import counters
from isthmus.errors import MissingLowering


@pytest.fixture(autouse=True)
def cpu_allowed(strict_fallback: None) -> None:
    isthmus.config.fallback = "cpu"
    counters.clear()


def library(name: str, schema: str, kernel: object) -> tuple[torch.library.Library, object]:
    made = torch.library.Library(name, "DEF")
    made.define(schema)
    packet = schema.split("(")[0]
    made.impl(packet, kernel, "CPU")
    return made, getattr(getattr(torch.ops, name), packet).default


def test_error_says_what_with_what_and_what_next() -> None:
    isthmus.config.fallback = "error"
    _keep, op = library("fall1", "f(Tensor x, int n) -> Tensor", lambda x, n: x + n)
    with pytest.raises(MissingLowering) as caught:
        op(torch.zeros(2, 3, device="jax"), 4)
    text = str(caught.value)
    assert "no lowering for fall1.f.default" in text
    assert "x: f32[2, 3], n: 4" in text
    assert 'isthmus.config.fallback = "cpu"' in text


def test_warned_once() -> None:
    isthmus.config.fallback = "warn"
    _keep, op = library("fall2", "f(Tensor x) -> Tensor", lambda x: x + 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        op(torch.zeros(2, device="jax"))
        op(torch.zeros(3, device="jax"))
    found = [w for w in caught if issubclass(w.category, FallbackWarning)]
    assert len(found) == 1
    assert "fall2.f.default" in str(found[0].message)
    assert counters.fallbacks["fall2.f.default"] == 2


def test_a_long_failure_is_told_in_a_line() -> None:
    isthmus.config.fallback = "warn"
    _keep, op = library("fall9", "f(Tensor x) -> Tensor", lambda x: x + 1)

    @torch.library.register_fake("fall9::f")
    def fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @isthmus.lowering(op)
    def fails(x: object) -> object:
        raise RuntimeError("no kernel for this\nHloModule with\nall its lines")

    with pytest.warns(FallbackWarning, match="no kernel for this") as caught:
        assert op(torch.zeros(2, device="jax")).tolist() == [1, 1]
    assert not any("HloModule" in str(each.message) for each in caught)


def test_writes_reach_every_alias() -> None:
    _keep, op = library("fall3", "f_(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1))
    base = torch.zeros(4, device="jax")
    view = base[1:3]
    assert op(view) is view
    assert base.tolist() == [0, 1, 1, 0]


def test_out_is_resized_and_returned() -> None:
    def kernel(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.resize_(x.shape).copy_(x * 2)

    _keep, op = library("fall4", "f(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", kernel)
    out = torch.empty(0, device="jax")
    assert op(torch.ones(3, device="jax"), out=out) is out
    assert out.tolist() == [2, 2, 2]


def test_lists_of_tensors_and_several_results() -> None:
    _keep, op = library(
        "fall5", "f(Tensor[] xs) -> (Tensor, Tensor)", lambda xs: (xs[0] + xs[1], xs[0].clone())
    )
    a, b = op([torch.ones(2, device="jax"), torch.ones(2, device="jax")])
    assert (a.device.type, a.tolist(), b.tolist()) == ("jax", [2, 2], [1, 1])


def test_an_error_on_the_cpu_is_the_users_error_and_loses_nothing() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such luck")

    _keep, op = library("fall6", "f_(Tensor(a!) x) -> Tensor(a!)", kernel)
    x = torch.ones(2, device="jax")
    with pytest.raises(ValueError, match="no such luck"):
        op(x)
    assert x.tolist() == [1, 1]


def test_a_decomposition_is_one_program() -> None:
    """An op torch can take apart needs no lowering and no CPU: it compiles once and is found again."""
    from isthmus._ops.registry import registry

    torch.zeros(1, device="jax")
    op = torch.ops.aten.huber_loss.default
    entry = registry.pop(op, None)
    from isthmus._device.core.dispatch import Kernel

    try:
        kernel = Kernel(op)
        a, b = torch.randn(5), torch.randn(5)
        x, y = a.to("jax"), b.to("jax")
        before = counters.counts["compilations"]
        got, again = kernel(x, y), kernel(x, y)
        assert counters.counts["compilations"] == before + 1
        torch.testing.assert_close(got.cpu(), op(a, b))
        torch.testing.assert_close(again.cpu(), op(a, b))
        assert not counters.fallbacks
    finally:
        if entry is not None:
            registry[op] = entry
