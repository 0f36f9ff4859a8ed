"""Graphs without a device: nodes made once, what is valid, passes, printing, torch.fx, the reference backend."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isthmus
from isthmus._graph import passes, view_calls
from isthmus._graph.backends import backend_named, register_backend
from isthmus._graph.fx import to_fx
from isthmus._graph.graph import Graph, check
from isthmus._graph.layout import Spec
from isthmus._graph.nodes import TABLE, Call, Input, Item, Leaf, Node, Type, call_of, leaf, node, temporary
from isthmus._graph.reference import Reference
from isthmus._graph.text import dot, text
from isthmus.errors import ConfigError, IsthmusError

aten = torch.ops.aten
F32 = torch.float32


def array(index: int, *size: int, dtype: torch.dtype = F32) -> Node:
    """Return the leaf of an array."""
    return leaf("array", index, Type(size, dtype))


def unary(op: Any, given: Node, **arguments: Any) -> Node:
    """Return a call of an op that keeps its input's type."""
    return node(call_of(op, {"self": Input(0)} | arguments, [given.type]), given)


def view(given: Node, *size: int) -> Node:
    return node(view_calls.view(given.type, size), given)


def permute(given: Node, *dims: int) -> Node:
    return node(view_calls.permute(given.type, dims), given)


def expand(given: Node, *size: int) -> Node:
    call = call_of(aten.expand.default, {"self": Input(0), "size": size}, [Type(size, given.type.dtype)])
    return node(call, given)


def cast(given: Node, dtype: torch.dtype) -> Node:
    call = call_of(aten._to_copy.default, {"self": Input(0), "dtype": dtype}, [Type(given.type.size, dtype)])
    return node(call, given)


def read(storage: Node, size: Any, stride: Any, *offset: Node) -> Node:
    arguments = {"self": Input(0), "size": size, "stride": stride}
    arguments |= {"storage_offset": Input(1)} if offset else {}
    return node(call_of(aten.as_strided.default, arguments, [Type(size, F32)]), storage, *offset)


def write(storage: Node, new: Node, stride: Any, *offset: Node) -> Node:
    _, call, _ = view_calls.scatter(storage.type, Spec(new.type.size, stride, F32), bool(offset))
    return node(call, storage, new, *offset)


def topk(given: Node) -> Node:
    types = [Type((2,), F32), Type((2,), torch.int64)]
    return node(call_of(aten.topk.default, {"self": Input(0), "k": 2}, types), given)


def example(graph: Graph) -> list[Any]:
    """Return a value for each input of a graph of arrays and offsets."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for n in graph.inputs:
        assert isinstance(n.call, Leaf)
        if n.call.kind == "offset":
            made.append(n.call.index + 1)
        else:
            made.append(torch.randn(n.type.size, generator=generator).to(n.type.dtype))
    return made


def compute(graph: Graph, values: dict[Node, Any]) -> list[Tensor]:
    """Return what the reference makes of a graph whose inputs are among these."""
    return list(Reference().compile(graph)(*[values[given] for given in graph.inputs]))


def assert_same(before: Graph, after: Graph) -> None:
    """Assert that two graphs are valid and compute the same bits."""
    check(before)
    check(after)
    values = dict(zip(before.inputs, example(before), strict=True))
    for a, b in zip(compute(before, values), compute(after, values), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


class TestConsing:
    def test_the_same_call_twice_is_one_node(self) -> None:
        x = array(0, 4)
        assert array(0, 4) is x
        assert unary(aten.relu.default, x) is unary(aten.relu.default, x)
        assert unary(aten.relu.default, x) is not unary(aten.relu.default, array(1, 4))
        assert unary(aten.relu.default, x) is not unary(aten.neg.default, x)

    def test_leaves_of_other_kinds_sizes_and_dtypes_are_others(self) -> None:
        kinds = [array(0, 4), array(1, 4), array(0, 5), array(0, 4, dtype=torch.float64)]
        numbers = [leaf("number", 0, Type((), torch.float64)), leaf("offset", 0, Type((), torch.int64), int)]
        assert len({*kinds, *numbers}) == 6

    @pytest.mark.parametrize(("a", "b"), [(1, 1.0), (1, True), (1.0, True), (0.0, -0.0), (1, 1 + 0j)])
    def test_numbers_that_python_calls_equal_are_told_apart(self, a: Any, b: Any) -> None:
        assert a == b
        x = array(0, 4)
        first, second = (unary(aten.add.Scalar, x, other=value) for value in (a, b))
        assert first is not second
        assert first is unary(aten.add.Scalar, x, other=a)
        # inside a list too
        lists = [call_of(aten.pad.default, {"self": Input(0), "pad": [0, v]}, [x.type]) for v in (a, b)]
        assert lists[0] is not lists[1]

    def test_defaults_say_nothing_and_lists_are_tuples(self) -> None:
        x = array(0, 4)
        assert unary(aten.add.Scalar, x, other=2, alpha=1) is unary(aten.add.Scalar, x, other=2)
        assert unary(aten.add.Scalar, x, other=2, alpha=2) is not unary(aten.add.Scalar, x, other=2)
        assert unary(aten.flip.default, x, dims=[0]) is unary(aten.flip.default, x, dims=(0,))

    def test_results_belong_to_their_call(self) -> None:
        found = topk(array(0, 5))
        assert found.results == topk(array(0, 5)).results
        assert [result.type for result in found.results if result] == list(found.types)


def invalid() -> Iterator[Any]:
    """Yield a graph that breaks each rule, and what is said of it."""
    x, y = array(0, 4), array(1, 4)
    relu = unary(aten.relu.default, x)
    both = topk(array(0, 5))
    first, _ = both.results
    assert first is not None
    mutating = unary(aten.relu_.default, x)
    unknown = unary(aten.relu.default, x, nonsense=1)
    unnamed = node(call_of(aten.relu.default, {"self": Input(0)}, [x.type]), x, y)
    absent = node(call_of(aten.add.Tensor, {"self": Input(0), "other": Input(1)}, [x.type]), x)
    yield "twice given", Graph((x, x), (), (x,)), "an input is there twice"
    yield "no leaf", Graph((relu,), (), (relu,)), "an input is not a leaf"
    yield "twice computed", Graph((x,), (relu, relu), (relu,)), "is there twice"
    yield "order", Graph((x,), (unary(aten.neg.default, relu), relu), (relu,)), "before what it needs"
    yield "open", Graph((), (relu,), (relu,)), "before what it needs"
    yield "leaf inside", Graph((x,), (y,), (x,)), "neither a call nor an item"
    yield "item of one", Graph((x,), (Node(Item(0), (x,)),), (x,)), "no result of its input"
    yield (
        "item twice made",
        Graph((array(0, 5),), (both, Node(Item(1), (both,))), (array(0, 5),)),
        "no result",
    )
    yield "mutation", Graph((x,), (mutating,), (mutating,)), "writes to its arguments"
    yield "argument", Graph((x,), (unknown,), (unknown,)), "has no such argument"
    yield "unnamed input", Graph((x, y), (unnamed,), (unnamed,)), "does not name its inputs"
    yield "absent input", Graph((x,), (absent,), (absent,)), "does not name its inputs"
    read_whole = unary(aten.relu.default, first)
    read_whole = node(read_whole.call, both)  # type: ignore[arg-type]
    yield (
        "several as one",
        Graph((array(0, 5),), (both, read_whole), (read_whole,)),
        "reads several results as one",
    )
    yield "output", Graph((x,), (), (relu,)), "an output is not computed"
    yield "whole output", Graph((array(0, 5),), (both,), (both,)), "an output has several results"


@pytest.mark.parametrize(("graph", "message"), [pytest.param(g, m, id=name) for name, g, m in invalid()])
def test_an_invalid_graph_is_refused(graph: Graph, message: str) -> None:
    with pytest.raises(IsthmusError, match=message):
        check(graph)


def test_what_graph_of_returns_is_valid_and_holds_nothing_dead() -> None:
    x, y = array(1, 5), array(0, 4)
    draw = leaf("draw", 0, Type((4,), torch.uint32))
    noise = node(call_of(aten.rand.default, {"size": (4,), "dtype": F32}, [y.type], random=True), draw)
    total = node(call_of(aten.add.Tensor, {"self": Input(0), "other": Input(1)}, [y.type]), noise, y)
    unary(aten.neg.default, total)
    first, second = topk(x).results
    assert first is not None
    assert second is not None
    graph = Graph.of([total, second, total])
    check(graph)
    assert graph.inputs == (y, x, draw)
    assert graph.nodes == (noise, total, topk(x), second)
    assert graph.ops == (aten.rand.default, aten.add.Tensor, aten.topk.default)


class TestText:
    def test_a_value_a_line(self) -> None:
        x, number = array(3, 5), leaf("number", 0, Type((), torch.float64))
        first, second = topk(unary(aten.flip.default, x, dims=[0])).results
        scaled = node(call_of(aten.mul.Scalar, {"self": Input(0), "other": Input(1)}, [Type((2,), F32)]))
        assert first is not None
        assert second is not None
        scaled = node(scaled.call, first, number)  # type: ignore[arg-type]
        graph = Graph.of([scaled, second])
        assert str(graph) == (
            "%a0: float32[5] = array 3\n"
            "%n0: float64[] = number 0\n"
            "%0: float32[5] = aten.flip.default(%a0, [0])\n"
            "%1: (float32[2], int64[2]) = aten.topk.default(%0, 2)\n"
            "%2: float32[2] = %1[0]\n"
            "%3: float32[2] = aten.mul.Scalar(%2, %n0)\n"
            "%4: int64[2] = %1[1]\n"
            "return %3, %4"
        )
        check(graph)

    def test_names_where_position_does_not_say_it_and_lines(self) -> None:
        x = array(0, 2)
        draw = leaf("draw", 2, Type((4,), torch.uint32))
        made = node(
            call_of(aten.rand_like.default, {"self": Input(0), "dtype": F32}, [x.type], random=True), x, draw
        )
        graph = Graph.of([made])
        rows = text(graph, {made: "train.py:7"}).splitlines()
        assert (
            rows[2] == "%0: float32[2] = aten.rand_like.default(%a0, dtype=float32, draw=%d0)  # train.py:7"
        )
        assert "#" not in rows[0]

    def test_dot_has_an_edge_for_every_use(self) -> None:
        x = array(0, 5)
        first, _ = topk(x).results
        assert first is not None
        both = node(
            call_of(aten.mul.Tensor, {"self": Input(0), "other": Input(1)}, [first.type]), first, first
        )
        lines = dot(Graph.of([both])).splitlines()
        edges = [line.strip() for line in lines if "->" in line]
        assert edges == ['"a0" -> "0"', '"0" -> "1"', '"1" -> "2"', '"1" -> "2"', '"2" -> "return 0"']
        assert lines[0] == "digraph {"
        assert lines[-1] == "}"
        assert any('"0" [label="aten.topk.default\\n(float32[2], int64[2])"]' in line for line in lines)


PASSES = {each.name: each for each in passes.PASSES if "lazy" in each.modes}


def optimised(graph: Graph) -> Graph:
    """Return a graph after all passes of lazy mode."""
    return passes.optimise(graph, "lazy")


class TestPasses:
    def folded(self, *outputs: Node, by: str = "fold_views") -> list[str]:
        """Return the rows of a folded graph's text after its inputs."""
        before = Graph.of(outputs)
        after = optimised(before) if by == "all" else PASSES[by](before)
        assert_same(before, after)
        rows = str(after).splitlines()
        return rows[len(after.inputs) :]

    def test_dead_code(self) -> None:
        x = array(0, 4)
        relu, dead = unary(aten.relu.default, x), unary(aten.neg.default, array(1, 4))
        graph = Graph((x, array(1, 4)), (relu, dead), (relu,))
        check(graph)
        assert optimised(graph) == Graph((x,), (relu,), (relu,))

    def test_view_of_view(self) -> None:
        x = array(0, 4, 6)
        assert self.folded(view(view(view(x, 24), 2, 12), 3, 8)) == [
            "%0: float32[3, 8] = aten.view.default(%a0, [3, 8])",
            "return %0",
        ]
        assert self.folded(view(view(x, 24), 4, 6)) == ["return %a0"]

    def test_permute_of_permute(self) -> None:
        x = array(0, 2, 3, 4)
        assert self.folded(permute(permute(x, 1, 2, 0), 1, 2, 0)) == [
            "%0: float32[4, 2, 3] = aten.permute.default(%a0, [2, 0, 1])",
            "return %0",
        ]
        assert self.folded(permute(permute(x, 1, 2, 0), 2, 0, 1)) == ["return %a0"]
        assert self.folded(permute(x, 0, -2, 2)) == ["return %a0"]

    def test_expand_and_identities(self) -> None:
        x = array(0, 1, 4)
        assert self.folded(expand(expand(x, 3, 4), 2, 3, 4)) == [
            "%0: float32[2, 3, 4] = aten.expand.default(%a0, [2, 3, 4])",
            "return %0",
        ]
        same = unary(aten.clone.default, cast(expand(view(x, 1, 4), 1, 4), F32))
        assert self.folded(same) == ["return %a0"]

    def test_bits_seen_as_another_dtype_and_back(self) -> None:
        def retype(given: Node, dtype: torch.dtype, size: int) -> Node:
            call = call_of(aten.view.dtype, {"self": Input(0), "dtype": dtype}, [Type((size,), dtype)])
            return node(call, given)

        x, bytes_ = array(0, 4), array(1, 4, dtype=torch.uint8)
        assert self.folded(retype(retype(x, torch.int16, 8), F32, 4)) == ["return %a0"]
        assert len(self.folded(retype(retype(bytes_, torch.bool, 4), torch.uint8, 4))) == 3

    def test_a_read_of_what_was_written(self) -> None:
        storage, new = array(0, 12), array(1, 2, 3)
        offset, other = (leaf("offset", n, Type((), torch.int64), int) for n in (0, 1))
        assert self.folded(read(write(storage, new, (6, 2)), (2, 3), (6, 2))) == ["return %a0"]
        assert self.folded(read(write(storage, new, (6, 1), offset), (2, 3), (6, 1), offset)) == [
            "return %a0"
        ]
        # Another place, another layout: what was there remains in part.
        assert len(self.folded(read(write(storage, new, (6, 1), offset), (2, 3), (6, 1), other))) == 3
        assert len(self.folded(read(write(storage, new, (6, 2)), (2, 3), (6, 1)))) == 3
        assert len(self.folded(read(write(storage, new, (6, 2), offset), (2, 3), (6, 2)))) == 3

    def test_a_read_of_elements_written_twice_is_not_what_was_written(self) -> None:
        storage, new = array(0, 12), array(1, 2, 3)
        assert len(self.folded(read(write(storage, new, (0, 1)), (2, 3), (0, 1)))) == 3
        assert len(self.folded(read(write(storage, new, (1, 1)), (2, 3), (1, 1)))) == 3

    def test_the_last_of_two_writes(self) -> None:
        storage, old, new = array(0, 12), array(1, 2, 3), array(2, 2, 3)
        offset, other = (leaf("offset", n, Type((), torch.int64), int) for n in (0, 1))
        twice = write(write(storage, old, (6, 1), offset), new, (6, 1), offset)
        assert self.folded(twice) == [
            "%0: float32[12] = aten.as_strided_scatter.default(%a0, %a1, [2, 3], [6, 1], %o0)",
            "return %0",
        ]
        assert len(self.folded(write(write(storage, old, (6, 1), offset), new, (6, 1), other))) == 3
        assert len(self.folded(write(write(storage, old, (6, 2)), new, (6, 1)))) == 3

    def test_static_offsets_are_told_apart(self) -> None:
        storage, old, new = array(0, 12), array(1, 3), array(2, 3)

        def at(given: Node, src: Node, place: int) -> Node:
            arguments = {
                "self": Input(0),
                "src": Input(1),
                "size": (3,),
                "stride": (1,),
                "storage_offset": place,
            }
            return node(call_of(aten.as_strided_scatter.default, arguments, [storage.type]), given, src)

        assert len(self.folded(at(at(storage, old, 1), new, 7))) == 3
        assert len(self.folded(at(at(storage, old, 1), new, 1))) == 2

    def test_constants(self) -> None:
        zeros = node(call_of(aten.zeros.default, {"size": (6,), "dtype": F32}, [Type((6,), F32)]))
        seen = cast(expand(permute(view(zeros, 2, 3), 1, 0), 4, 3, 2), torch.int64)
        by = "fold_constants"
        assert self.folded(seen, by=by) == [
            "%0: int64[4, 3, 2] = aten.full.default([4, 3, 2], 0, dtype=int64)",
            "return %0",
        ]
        ones = unary(aten.ones_like.default, unary(aten.exp.default, array(0, 2)))
        assert self.folded(ones, by=by) == [
            "%0: float32[2] = aten.full.default([2], 1.0, dtype=float32)",
            "return %0",
        ]

    def test_a_number_that_a_dtype_rounds_is_left_to_the_device(self) -> None:
        def full(number: Any, dtype: torch.dtype) -> Node:
            arguments = {"size": (2,), "fill_value": number, "dtype": dtype}
            return node(call_of(aten.full.default, arguments, [Type((2,), dtype)]))

        by = "fold_constants"
        assert len(self.folded(cast(full(0.1, F32), torch.float64), by=by)) == 3
        assert len(self.folded(cast(full(2.5, F32), torch.int32), by=by)) == 3
        assert len(self.folded(cast(full(300, torch.int64), torch.uint8), by=by)) == 3
        assert self.folded(cast(full(0.1, torch.float64), torch.complex128), by=by)[0].endswith(
            "aten.full.default([2], (0.1+0j), dtype=complex128)"
        )
        assert self.folded(cast(full(-0.0, F32), torch.float64), by=by)[0].endswith("-0.0, dtype=float64)")

    def test_numbers_given_at_run_time_are_no_constants(self) -> None:
        number = leaf("number", 0, Type((), torch.float64))
        arguments = {"size": (2,), "fill_value": Input(0), "dtype": F32}
        filled = node(call_of(aten.full.default, arguments, [Type((2,), F32)]), number)
        graph = Graph.of([cast(filled, torch.float64)])
        assert optimised(graph) == graph

    def test_several_results_come_through(self) -> None:
        x = array(0, 5)
        first, second = topk(view(view(x, 1, 5), 5)).results
        assert first is not None
        assert second is not None
        assert self.folded(second, first, by="all")[0].endswith("aten.topk.default(%a0, 2)")

    def test_a_long_chain_takes_one_round_and_no_recursion(self) -> None:
        found = array(0, 2, 3)
        for _ in range(10_001):
            found = permute(found, 1, 0)
        after = optimised(Graph.of([found]))
        assert [n.type.size for n in after.nodes] == [(3, 2)]

    @pytest.mark.parametrize("seed", range(40))
    def test_random_graphs_compute_the_same(self, seed: int) -> None:
        graph = random_graph(random.Random(seed))
        check(graph)
        after = graph
        for apply in PASSES.values():
            after = apply(after)
            assert_same(graph, after)
        assert optimised(graph) == after
        assert optimised(after) == after


def random_graph(rng: random.Random) -> Graph:
    """Return views, casts and writes of two arrays and a constant, a dozen deep."""
    ones = node(call_of(aten.ones.default, {"size": (12,), "dtype": F32}, [Type((12,), F32)]))
    offset = leaf("offset", 0, Type((), torch.int64), int)
    known: list[Node] = [array(0, 3, 4), array(1, 12), ones]
    for _ in range(14):
        # Mostly the last one, so that chains form.
        given = known[-1] if rng.random() < 0.7 else rng.choice(known)
        known.append(_random_step(rng, given, known, offset))
    return Graph.of(known[-3:])


def _random_step(rng: random.Random, given: Node, known: list[Node], offset: Node) -> Node:
    rank = len(given.type.size)
    kind = rng.randrange(6)
    if kind == 0:
        return view(given, *rng.choice([(12,), (3, 4), (2, 6), (4, 3), (1, 12), (2, 3, 2)]))
    if kind == 1:
        return permute(given, *rng.sample(range(rank), rank))
    if kind == 2:
        flat = view(given, 12)
        return read(expand(view(flat, 1, 12), 2, 12), (12,), (2,))
    layout: tuple[Any, ...] = rng.choice([((2, 3), (4, 1)), ((2, 3), (0, 2)), ((5,), (2,))])
    places = rng.choice([(), (offset,)])
    if kind == 3:
        part = read(rng.choice(known), *layout, *places)
        return write(given, part, layout[1], *places)
    if kind == 4:
        part = read(given, *layout, *places)
        return write(
            write(given, part, layout[1], *places), unary(aten.neg.default, part), layout[1], *places
        )
    return rng.choice([cast(cast(given, torch.float64), F32), unary(aten.clone.default, given)])


class Recorder:
    """A backend that keeps the graphs it is given and their values, and runs them with the reference."""

    def __init__(self) -> None:
        self.seen: list[tuple[Graph, tuple[Any, ...]]] = []

    def compile(self, graph: Graph) -> Callable[..., Any]:
        run = Reference().compile(graph)

        def keep(*values: Any) -> Any:
            kept = [value.clone() if isinstance(value, Tensor) else value for value in values]
            self.seen.append((graph, tuple(kept)))
            return run(*values)

        return keep


@pytest.fixture
def backend() -> Iterator[Callable[[str], None]]:
    """Yield what sets the backend for the length of a test."""
    yield lambda name: setattr(isthmus.config, "backend", name)
    isthmus.config.backend = "xla"


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.b = nn.Linear(4 * 3 * 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.a(x)), inplace=True)
        return self.b(F.max_pool2d(y, 2).flatten(1))

    sample = (4, 2, 8, 8)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    sample = (6, 5)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])

    sample = (3, 4, 4)


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mask = None if self.causal else torch.ones(5, 5, dtype=x.dtype, device=x.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2).mean(1))

    sample = (3, 5, 8)


ADAM, SGD = torch.optim.Adam, torch.optim.SGD
STEPS: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "mlp Adam": (Mlp, ADAM, {}),
    "mlp Adam one by one": (Mlp, ADAM, {"foreach": False, "capturable": False}),
    "mlp AdamW fused": (Mlp, torch.optim.AdamW, {"fused": True}),
    # Written out, because torch's choice of it depends on the device, and with it what becomes of gradients.
    "conv SGD": (ConvNet, SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "conv Adam": (ConvNet, ADAM, {}),
    "lstm": (lambda: Recurrent(nn.LSTM), ADAM, {}),
    "gru": (lambda: Recurrent(nn.GRU), ADAM, {}),
    "attention causal": (lambda: Attention(True), ADAM, {}),
    "attention mask": (lambda: Attention(False), SGD, {}),
}


def train(
    make: Callable[[], Any],
    kind: Any,
    options: dict[str, Any],
    device: str,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Run two training steps and return the loss, parameters, gradients and buffers."""
    torch.manual_seed(0)
    model = make().to(dtype)
    x, y = torch.randn(model.sample, dtype=dtype), torch.randint(0, 3, model.sample[:1])
    model, x, y = model.to(device), x.to(device), y.to(device)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for _ in range(2):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        isthmus.sync()
    gradients = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = {"loss": loss, **model.state_dict(), **gradients}
    return {n: tensor.detach().cpu() for n, tensor in found.items()}


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_on_the_reference_is_that_of_xla_and_of_the_cpu(name: str, backend: Any) -> None:
    recorder = Recorder()
    register_backend("recorder", recorder)
    with isthmus.lazy():
        on_xla = train(*STEPS[name], "jax")
        backend("recorder")
        on_reference = train(*STEPS[name], "jax")
        isthmus.sync()
    torch.testing.assert_close(on_reference, on_xla)
    torch.testing.assert_close(on_reference, train(*STEPS[name], "cpu"))

    steps = [(graph, values) for graph, values in recorder.seen if len(graph.nodes) > 10]
    assert len(steps) >= 2
    for graph, values in steps:
        _every_form_agrees(graph, values)


def _every_form_agrees(graph: Graph, values: tuple[Any, ...]) -> None:
    """Assert that a graph, its fx module and its optimised form compute the same, and that it can be printed."""
    check(graph)
    by_input = dict(zip(graph.inputs, values, strict=True))
    wanted = compute(graph, by_input)
    torch.testing.assert_close(list(to_fx(graph)(*values)), wanted, rtol=0, atol=0)
    folded = PASSES["fold_constants"](PASSES["fold_views"](graph))
    check(folded)
    assert len(folded.nodes) <= len(graph.nodes)
    torch.testing.assert_close(compute(folded, by_input), wanted, rtol=0, atol=0)
    after = optimised(graph)
    check(after)
    # Gradients from logits are rounded otherwise.
    torch.testing.assert_close(compute(after, by_input), wanted)
    assert len(str(graph).splitlines()) == len(graph.inputs) + len(graph.nodes) + 1
    assert dot(graph).count("->") == sum(len(n.inputs) for n in graph.nodes) + len(graph.outputs)


@pytest.mark.parametrize("name", ["mlp Adam", "conv SGD", "lstm", "gru", "attention causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_has_the_dtypes_that_were_recorded(
    name: str, dtype: torch.dtype, backend: Any
) -> None:
    make = STEPS[name][0]
    with isthmus.lazy():
        on_xla = train(make, SGD, {}, "jax", dtype)
        backend("reference")
        on_reference = train(make, SGD, {}, "jax", dtype)
    assert {n: t.dtype for n, t in on_reference.items()} == {n: t.dtype for n, t in on_xla.items()}
    torch.testing.assert_close(on_reference["loss"], on_xla["loss"])


def test_evaluation_on_the_reference(backend: Any) -> None:
    torch.manual_seed(0)
    model, x = ConvNet().eval(), torch.randn(ConvNet.sample)
    wanted = model(x).detach()
    model, x = model.to("jax"), x.to("jax")
    backend("reference")
    with isthmus.lazy():
        torch.testing.assert_close(model(x).detach().cpu(), wanted)


class TestReference:
    def test_a_result_that_is_not_what_was_recorded_is_refused(self) -> None:
        x = array(0, 4)
        for type, shown in ((Type((3,), F32), "float32[3]"), (Type((4,), torch.float64), "float64[4]")):
            wrong = node(call_of(aten.relu.default, {"self": Input(0)}, [type]), x)
            with pytest.raises(IsthmusError) as raised:
                Reference().compile(Graph.of([wrong]))(torch.ones(4))
            assert f"aten.relu.default gave float32[4] on the CPU where {shown} was recorded" in str(
                raised.value
            )

    def test_an_invalid_graph_is_not_compiled(self) -> None:
        relu = unary(aten.relu.default, array(0, 4))
        with pytest.raises(IsthmusError, match="not valid"):
            Reference().compile(Graph((), (relu,), (relu,)))

    def test_results_are_new_and_dense(self) -> None:
        x = array(0, 2, 3)
        given = torch.arange(6.0).reshape(2, 3)
        same, turned = Reference().compile(Graph.of([x, permute(x, 1, 0)]))(given)
        given.zero_()
        assert same.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert turned.is_contiguous()
        assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]

    def test_strides_are_those_of_the_value_not_of_its_memory(self) -> None:
        x = array(0, 2, 3)
        first = node(call_of(aten.select.int, {"self": Input(0), "dim": 0, "index": 1}, [Type((3,), F32)]), x)
        offset = leaf("offset", 0, Type((), torch.int64), int)
        graph = Graph.of([read(permute(x, 1, 0), (6,), (1,)), read(first, (2,), (1,), offset)])
        flat, part = compute(graph, {x: torch.arange(6.0).reshape(2, 3), offset: 1})
        assert flat.tolist() == [0, 3, 1, 4, 2, 5]
        assert part.tolist() == [4, 5]
        assert [t.tolist() for t in to_fx(graph)(torch.arange(6.0).reshape(2, 3), 1)] == [
            flat.tolist(),
            part.tolist(),
        ]

    @pytest.mark.parametrize(
        "call",
        [
            call_of(aten.rand.default, {"size": (64,), "dtype": F32}, [Type((64,), F32)], random=True),
            call_of(
                aten.native_dropout.default,
                {"input": Input(0), "p": 0.5, "train": True},
                [Type((64,), F32), Type((64,), torch.bool)],
                random=True,
            ),
        ],
        ids=["generator", "no generator"],
    )
    def test_random_numbers_depend_on_the_draw_alone(self, call: Call) -> None:
        draw = leaf("draw", 0, Type((4,), torch.uint32))
        x = array(0, 64)
        made = node(call, draw) if call.op is aten.rand.default else node(call, x, draw)
        graph = Graph.of([(made.results or (made,))[0]])
        given = {x: torch.ones(64)}
        words = [torch.tensor(w, dtype=torch.uint32) for w in ([1, 2, 3, 4], [1, 2, 3, 5], [9, 2, 3, 4])]
        before = torch.get_rng_state(), torch.jax.get_rng_state()  # type: ignore[attr-defined]
        first, again, other, seeded = (
            compute(graph, given | {draw: w})[0] for w in (words[0], words[0], *words[1:])
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert not torch.equal(first, seeded)
        after = torch.get_rng_state(), torch.jax.get_rng_state()  # type: ignore[attr-defined]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        (by_fx,) = to_fx(graph)(*[(given | {draw: words[0]})[n] for n in graph.inputs])
        assert torch.equal(by_fx, first)

    def test_the_default_dtype_is_that_of_the_recording(self) -> None:
        x = array(0, 3, dtype=torch.int64)
        context = (torch.float64, None)
        root = node(
            call_of(aten.sqrt.default, {"self": Input(0)}, [Type((3,), torch.float64)], context=context), x
        )
        graph = Graph.of([root])
        (found,) = compute(graph, {x: torch.tensor([1, 4, 9])})
        assert found.dtype == torch.float64
        assert torch.get_default_dtype() == torch.float32
        assert to_fx(graph)(torch.tensor([1, 4, 9]))[0].dtype == torch.float64

    @pytest.mark.parametrize(
        ("op", "number", "wanted"),
        [
            (aten.eq.Tensor, 2.0, [False, True, False]),
            (aten.maximum.default, 1.5, [1.5, 2.0, 3.0]),
            (aten.mul.Tensor, 0.1, [0.1, 0.2, 0.3]),
        ],
        ids=str,
    )
    def test_a_number_where_the_schema_has_a_tensor(self, op: Any, number: float, wanted: list[Any]) -> None:
        x, value = array(0, 3), leaf("number", 0, Type((), torch.float64))
        dtype = torch.bool if op is aten.eq.Tensor else F32
        made = node(call_of(op, {"self": Input(0), "other": Input(1)}, [Type((3,), dtype)]), x, value)
        graph = Graph.of([made])
        (found,) = compute(graph, {x: torch.tensor([1.0, 2.0, 3.0]), value: number})
        torch.testing.assert_close(found, torch.tensor(wanted))
        assert torch.equal(to_fx(graph)(torch.tensor([1.0, 2.0, 3.0]), number)[0], found)

    def test_an_op_without_a_cpu_kernel_is_taken_apart(self) -> None:
        torch.manual_seed(0)
        x, weight, grad = torch.randn(3, 4), torch.randn(4), torch.randn(3, 4)
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        F.rms_norm(leaves[0], (4,), leaves[1], 1e-5).backward(grad)
        rstd = (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        names = ("grad_out", "input", "rstd", "weight")
        inputs = [array(n, *t.shape) for n, t in enumerate((grad, x, rstd, weight))]
        arguments: dict[str, Any] = {name: Input(n) for n, name in enumerate(names)}
        arguments |= {"normalized_shape": (4,), "output_mask": (True, True)}
        types = [Type((3, 4), F32), Type((4,), F32)]
        both = node(call_of(aten._fused_rms_norm_backward.default, arguments, types), *inputs)
        graph = Graph.of([r for r in both.results if r is not None])
        found = compute(graph, dict(zip(inputs, (grad, x, rstd, weight), strict=True)))
        torch.testing.assert_close(found, [t.grad for t in leaves])


def test_fx_has_the_names_the_types_and_the_overloads() -> None:
    x, number = array(0, 5), leaf("number", 0, Type((), torch.float64))
    scaled = node(call_of(aten.mul.Scalar, {"self": Input(0), "other": Input(1)}, [x.type]), x, number)
    made = call_of(aten.sum.dim_IntList, {"self": Input(0), "dim": (0,), "dtype": F32}, [Type((), F32)])
    first, _ = topk(scaled).results
    assert first is not None
    module = to_fx(Graph.of([first, node(made, scaled)]))
    rows = [
        (n.op, n.name if n.op == "placeholder" else n.target, n.args, n.kwargs) for n in module.graph.nodes
    ]
    ops = [row[1] for row in rows if row[0] == "call_function"]
    assert [row[1] for row in rows if row[0] == "placeholder"] == ["a0", "n0"]
    assert ops[:2] == [aten.mul.Scalar, aten.topk.default]
    assert rows[-2][1] is aten.sum.dim_IntList
    assert rows[-2][3] == {"dtype": F32}
    types = {n.name: n.meta["type"] for n in module.graph.nodes if n.op != "output"}
    assert types["a0"] == Type((5,), F32)
    assert types["topk_default"] == (Type((2,), F32), Type((2,), torch.int64))
    values, total = module(torch.arange(5.0), 2.0)
    assert values.tolist() == [8.0, 6.0]
    assert total.item() == 20.0


class TestBackends:
    def test_one_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match="no backend 'tpu2'; choose from 'xla', 'reference'"):
            backend_named("tpu2")

    def test_names_and_objects_that_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="Isthmus's own"):
            register_backend("xla", Reference())
        with pytest.raises(ConfigError, match="no method compile"):
            register_backend("wrong", object())  # type: ignore[arg-type]

    def test_one_that_was_registered(self) -> None:
        mine = Recorder()
        register_backend("recorder", mine)
        assert backend_named("recorder") is mine
        assert isinstance(backend_named("reference"), Reference)


def test_temporary_nodes_are_seen_by_their_thread_alone() -> None:
    """What another thread records meanwhile stays in the tables, and it never gets a node that is about to go."""
    x = array(0, 3)
    before = len(TABLE)
    with temporary():
        mine = unary(aten.sin.default, x)
        assert unary(aten.sin.default, x) is mine
        with temporary():
            assert unary(aten.sin.default, x) is mine
        assert unary(aten.sin.default, x) is mine
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(unary, aten.sin.default, x).result()
            kept = pool.submit(unary, aten.tan.default, x).result()
        assert other is not mine
        assert unary(aten.sin.default, x) is mine
        assert unary(aten.tan.default, x) is kept
    assert unary(aten.sin.default, x) is other
    assert unary(aten.tan.default, x) is kept
    assert len(TABLE) == before + 2
