"""Recompilation storms: one warning at the line, which says what changed; none where programs are found again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import isthmus
from isthmus._device.core.buffer import buffer_of
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Node
from isthmus._lazy import recompile_warnings
from isthmus._lazy.recompile_warnings import RecompilationWarning
from tests.lazy.helpers import setting


@pytest.fixture(autouse=True)
def quiet() -> None:
    recompile_warnings.forget()


@contextmanager
def caught() -> Iterator[list[warnings.WarningMessage]]:
    """Collect the warnings about storms."""
    found: list[warnings.WarningMessage] = []
    with warnings.catch_warnings(record=True) as every:
        warnings.simplefilter("always")
        yield found
    found += [w for w in every if issubclass(w.category, RecompilationWarning)]


def run(sizes: list[int]) -> list[float]:
    found = []
    with isthmus.lazy():
        for n in sizes:
            x = torch.ones(n).to("jax")
            found.append(x.mul(2).sum().item())
    return found


def test_a_shape_that_never_comes_back_is_warned_about_once() -> None:
    with setting("shapes", "exact"), caught() as found:
        assert run(list(range(1, 13))) == [2.0 * n for n in range(1, 13)]
    (warning,) = found
    assert (warning.filename, warning.lineno) == (__file__, run.__code__.co_firstlineno + 5)
    text = str(warning.message)
    assert "5 new programs in a row" in text
    assert "array 0, read by aten.mul.Tensor as self, was float32[4], is float32[5]" in text
    assert "pad it" in text


def test_shapes_in_ranges_are_no_storm() -> None:
    with caught() as found:
        assert run(list(range(1, 13))) == [2.0 * n for n in range(1, 13)]
    assert found == []


def test_what_cannot_be_padded_is_named() -> None:
    with caught() as found, isthmus.lazy():
        for n in range(4, 16):
            x = torch.ones(n).to("jax")
            assert torch.fft.rfft(x[1:]).real.sum().item() == pytest.approx(n - 1)
    (warning,) = found
    assert "not padded    fft: of a padded axis" in str(warning.message)


@pytest.mark.parametrize("sizes", [[1, 2, 3, 4], [7] * 12, [1, 2, 3, 4, 1, 5, 6, 7, 8, 1]], ids=str)
def test_fewer_in_a_row_are_not(sizes: list[int]) -> None:
    isthmus._lazy.programs._families.clear()
    with setting("shapes", "exact"), caught() as found:
        run(sizes)
    assert found == []


def test_lines_have_rows_of_their_own() -> None:
    with setting("shapes", "exact"), caught() as found, isthmus.lazy():
        for n in range(20, 24):
            x = torch.ones(n).to("jax")
            x.mul(2).sum().item()
            x.mul(3).add(1).sum().item()
    assert found == []


def test_a_warning_made_an_error_loses_nothing() -> None:
    kept: list[Tensor] = []

    def grow() -> None:
        for n in range(30, 40):
            kept.append(torch.ones(n).to("jax").mul(2))
            kept[-1].sum().item()

    with setting("shapes", "exact"), isthmus.lazy(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RecompilationWarning):
            grow()
        assert [t.tolist() for t in kept] == [[2.0] * n for n in range(30, 35)]


def test_lines_kept_are_few() -> None:
    graph = graph_of(lambda: torch.ones(2).to("jax") + 1)
    for n in range(1000):
        recompile_warnings.note(f"file.py:{n}", graph)
    assert len(recompile_warnings._rows) == recompile_warnings._LINES
    for n in range(1000):
        recompile_warnings._warned.add(f"file.py:{n}")
        recompile_warnings.note(f"file.py:{n}", graph)
    assert len(recompile_warnings._last) == recompile_warnings._LINES
    assert recompile_warnings.last("file.py:999") is graph
    assert recompile_warnings._due == []  # a line that was told is not told again


def graph_of(*calls: Callable[[], Tensor]) -> Graph:
    """Return the graph that computes what these calls return."""
    with isthmus.lazy():
        isthmus.sync()
        held = [buffer_of(tensor).held for tensor in [call() for call in calls]]
    assert all(isinstance(n, Node) for n in held)
    return Graph.of(held)


X = torch.ones(4, 6).to("jax")
Y = torch.ones(5, 6).to("jax")
W = torch.ones(6, 6).to("jax")
H = torch.ones(4, 6, dtype=torch.float16).to("jax")
CHANGES: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], str, str]] = {
    "shape": (
        lambda: X @ W,
        lambda: Y @ W,
        "array 0, read by aten.mm.default as self, was float32[4, 6], is float32[5, 6]",
        recompile_warnings._SHAPE,
    ),
    "shape that decides an argument before it": (
        lambda: torch.zeros(4, 6, device="jax") + X,
        lambda: torch.zeros(5, 6, device="jax") + Y,
        "array 0, read by aten.add.Tensor as other, was float32[4, 6], is float32[5, 6]",
        recompile_warnings._SHAPE,
    ),
    "shape in a list": (
        lambda: torch.cat([W, X]),
        lambda: torch.cat([W, Y]),
        "array 1, read by aten.cat.default as tensors, was float32[4, 6], is float32[5, 6]",
        recompile_warnings._SHAPE,
    ),
    "dtype": (
        lambda: X.cos(),
        lambda: H.cos(),
        "array 0, read by aten.cos.default as self, was float32[4, 6], is float16[4, 6]",
        recompile_warnings._DTYPE,
    ),
    "constant": (
        lambda: X.softmax(0),
        lambda: X.softmax(1),
        "argument dim of aten._softmax.default was 0, is 1",
        recompile_warnings._CONSTANT,
    ),
    "constant that was left out": (
        lambda: X.sum(0),
        lambda: X.sum(0, keepdim=True),
        "argument keepdim of aten.sum.dim_IntList was its default, is True",
        recompile_warnings._CONSTANT,
    ),
    "size": (
        lambda: torch.zeros(3, device="jax").cos(),
        lambda: torch.zeros(4, device="jax").cos(),
        "argument size of aten.zeros.default was [3], is [4]",
        recompile_warnings._SHAPE,
    ),
    "dtype asked for": (
        lambda: X.to(torch.float64),
        lambda: X.to(torch.float16),
        "argument dtype of aten._to_copy.default was torch.float64, is torch.float16",
        recompile_warnings._DTYPE,
    ),
    "type of a number": (
        lambda: X * 2,
        lambda: X * 2.0,
        "a number, read by aten.mul.Tensor as other, was of type int, is float",
        recompile_warnings._NUMBER,
    ),
    "another op": (
        lambda: X.cos().sin(),
        lambda: X.cos().tan(),
        "the op was aten.sin.default, is aten.tan.default",
        recompile_warnings._BRANCH,
    ),
    "more ops": (
        lambda: X.cos(),
        lambda: X.cos().sin().tan(),
        "the number of ops was 1, is 3; the first that only one of the two has is aten.sin.default",
        recompile_warnings._BRANCH,
    ),
    "fewer ops": (
        lambda: X.cos().sin(),
        lambda: X.cos(),
        "the number of ops was 2, is 1; the first that only one of the two has is aten.sin.default",
        recompile_warnings._BRANCH,
    ),
    "other wires": (
        lambda: X.cos() * X.sin(),
        lambda: X.cos() * X.cos().sin(),
        "aten.sin.default reads other values",
        recompile_warnings._BRANCH,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed(name: str) -> None:
    old, new, what, advice = CHANGES[name]
    assert recompile_warnings.change(graph_of(old), graph_of(new)) == (what, advice)


def test_other_results_kept() -> None:
    both = graph_of(lambda: X.cos(), lambda: X.cos().sin())
    one = graph_of(lambda: X.cos().sin())
    assert recompile_warnings.change(both, one) == (
        "other results are kept: 2 before, 1 now",
        recompile_warnings._KEPT,
    )


def test_the_same_graph_differs_in_what_is_held() -> None:
    graph = graph_of(lambda: X.cos())
    what, advice = recompile_warnings.change(graph, graph)
    assert what.startswith("nothing in the graph")
    assert advice == recompile_warnings._HELD


def test_matmul_precision() -> None:
    old, before = graph_of(lambda: X @ W), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        new = graph_of(lambda: X @ W)
    finally:
        torch.set_float32_matmul_precision(before)
    what, advice = recompile_warnings.change(old, new)
    assert what == f"the float32 matmul precision was {before}, is medium"
    assert advice == recompile_warnings._CONTEXT
