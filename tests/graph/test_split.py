"""Graphs cut into stages: a loop in which a little thing grows finds the rest of its program again."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isthmus
from isthmus._device.core.buffer import buffer_of
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Item
from isthmus._graph.passes.split import split
from isthmus._graph.passes.stages import Stage
from isthmus._lazy import programs, recompile_warnings
from isthmus._lazy.recompile_warnings import RecompilationWarning
from isthmus.errors import IsthmusError
from tests.graph.test_graph import array, topk, unary
from tests.lazy.test_lazy_errors import fragile

aten = torch.ops.aten
BIG = (aten.linear.default, aten.mm.default)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    isthmus.config.shapes = "exact"  # programs for ranges leave next to nothing to cut
    recompile_warnings.forget()
    programs._families.clear()  # other tests may have run the same loops
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecompilationWarning)
        yield


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[set[Any]]:
    """The ops of every program that is compiled, in order."""
    found: list[set[Any]] = []

    class Noted(programs.CompiledProgram):
        def __init__(self, graph: Graph, *args: Any, **kwargs: Any) -> None:
            found.append(set(graph.ops))
            super().__init__(graph, *args, **kwargs)

    monkeypatch.setattr(programs, "CompiledProgram", Noted)
    return found


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many stages each graph had that was cut."""
    found: list[int] = []
    run = programs._Run.stages
    monkeypatch.setattr(
        programs._Run,
        "stages",
        lambda self, stages, commit: (found.append(len(stages)), run(self, stages, commit)),
    )
    return found


def boundary() -> None:
    """End a round: always on the same line."""
    isthmus.sync()


def read(tensor: Tensor) -> Any:
    """End a round, and read a tensor."""
    boundary()
    return tensor.tolist()


def graph_of(call: Callable[[], Any]) -> Graph:
    with isthmus.lazy():
        isthmus.sync()
        found = call()
        tensors = found if isinstance(found, (list, tuple)) else [found]
        graph = Graph.of([buffer_of(tensor).held for tensor in tensors])
    return graph


def names(stage: Stage) -> list[str]:
    return [n.call.op._schema.name.removeprefix("aten::") for n in stage.nodes if isinstance(n.call, Call)]


class Writer(nn.Module):
    """Writes tokens: each depends on the last one and on a state, and joins those written before."""

    def __init__(self, device: str, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.step = nn.Embedding(16, 8), nn.Linear(16, 8)
        self.norm, self.dropout, self.out = nn.LayerNorm(8), nn.Dropout(dropout), nn.Linear(8, 16)
        self.to(device)

    def write(self, count: int, device: str) -> tuple[list[int], Tensor]:
        """Return what was written and the state at the end."""
        tokens, state = torch.zeros(1, 1, dtype=torch.long).to(device), torch.zeros(1, 8).to(device)
        with torch.no_grad():
            for _ in range(count):
                last = self.words(tokens[:, -1])
                best, _ = self.step(torch.cat([last, state], 1)).sort(1)
                state.mul_(0.5).add_(self.dropout(self.norm(best.tanh())))
                tokens = torch.cat([tokens, self.out(state).argmax(1, keepdim=True)], 1)
                if int(tokens[0, 0]) != 0:
                    break
        return tokens[0].tolist(), state.cpu()


def test_what_grows_is_computed_apart_and_the_rest_is_found_again(compiled: list[set[Any]]) -> None:
    wanted, at_end = Writer("cpu").write(20, "cpu")
    model = Writer("jax")
    with isthmus.lazy():
        found, state = model.write(20, "jax")
    assert found == wanted
    torch.testing.assert_close(state, at_end)
    large = [n for n, ops in enumerate(compiled) if ops & {*BIG}]
    # One for each round up to the warning, and one without what grows; the first rounds differ in other ways too.
    assert len(large) <= recompile_warnings._IN_A_ROW + 3
    assert len(compiled) - large[-1] > 12  # small ones only


def test_a_second_loop_compiles_nothing(compiled: list[set[Any]]) -> None:
    model = Writer("jax")
    with isthmus.lazy():
        first = model.write(14, "jax")
        model.write(14, "jax")
        compiled.clear()
        again = model.write(14, "jax")
    assert compiled == []
    assert again[0] == first[0]
    torch.testing.assert_close(again[1], first[1])


def test_random_ops_draw_what_they_draw_in_one_program(staged: list[int]) -> None:
    model = Writer("jax", dropout=0.5)
    torch.manual_seed(3)
    wanted = model.write(12, "jax")
    torch.manual_seed(3)
    with isthmus.lazy():
        found = model.write(12, "jax")
    assert staged
    assert found[0] == wanted[0]
    torch.testing.assert_close(found[1], wanted[1])


def test_memory_is_given_away_only_where_no_later_stage_reads_it(staged: list[int]) -> None:
    with isthmus.lazy():
        total, grown = torch.zeros(6).to("jax"), torch.ones(1).to("jax")
        for n in range(2, 14):
            before = (total * 2).neg().neg().neg().neg()
            total.add_(grown.sum())  # in the middle: what grows is before and after it
            grown = torch.cat([grown, before[:1] + total[:1]])
            boundary()
            assert grown.shape == (n,)
    assert staged
    wanted, tokens = 0.0, [1.0]
    for _ in range(2, 14):
        before, wanted = wanted * 2, wanted + sum(tokens)
        tokens.append(before + wanted)
    torch.testing.assert_close(grown.cpu(), torch.tensor(tokens))
    torch.testing.assert_close(total.cpu(), torch.full((6,), wanted))


def test_an_index_out_of_range_names_its_line(staged: list[int]) -> None:
    table, grown = torch.arange(4.0).to("jax"), torch.zeros(1, dtype=torch.long).to("jax")
    place = torch.zeros(1, dtype=torch.long).to("jax")
    with isthmus.lazy():
        for n in range(13):
            place = place.mul(0).add(9 if n == 12 else 0)
            found = table.exp().cos().tanh().sin().gather(0, place)
            line = f"{__file__}:{sys._getframe().f_lineno - 1}"
            grown = torch.cat([grown, found.long().mul(0)])
            if n < 12:
                boundary()
        with pytest.raises(RuntimeError, match="out of bounds") as caught:
            read(grown)
        assert line in str(caught.value)
    assert len(staged) == 13 - recompile_warnings._IN_A_ROW


def test_a_stage_that_fails_to_compile_loses_only_what_it_would_have_made(staged: list[int]) -> None:
    _keep, op, fails = fragile("stagesfail1")
    held, grown, total = torch.ones(5).to("jax"), torch.ones(1).to("jax"), torch.zeros(5).to("jax")
    with isthmus.lazy():
        for n in range(9):
            total.add_(grown.sum().mul(0).add(1))
            shown = op(held * total.sum()).exp().cos().tanh().sin()
            grown, before = torch.cat([grown, shown[:1]]), grown
            if n < 8:
                boundary()
        programs._families.clear()  # all stages are compiled anew
        fails[0] = True
        with pytest.raises(IsthmusError, match="out of luck"):
            boundary()
        assert len(staged) == 9 - recompile_warnings._IN_A_ROW
        assert held.tolist() == [1.0] * 5
        assert total.tolist() == [8.0] * 5  # as before what failed
        assert before.shape == (9,)
        assert before[0].item() == 1.0
        with pytest.raises(IsthmusError, match="never computed"):
            grown.tolist()


class TestCut:
    """Which stages a graph is cut into."""

    x, w = torch.ones(3, 4).to("jax"), torch.ones(4, 4).to("jax")

    def pair(self, call: Callable[[Tensor], Any]) -> tuple[Graph, Graph]:
        small, large = torch.ones(1, 5).to("jax"), torch.ones(1, 6).to("jax")
        return graph_of(lambda: call(small)), graph_of(lambda: call(large))

    def test_before_and_after(self) -> None:
        def call(grown: Tensor) -> Any:
            y = (self.x + grown.sum()).exp().cos().tanh() @ self.w
            return torch.cat([grown, y.sigmoid().sum().view(1, 1)], 1), y.sin()

        old, new = self.pair(call)
        first, middle, last = split(old, new)
        assert (names(first), names(last)) == (["sum"], ["cat"])
        assert {"mm", "sin"} <= {*names(middle)}
        together = [n for stage in (first, middle, last) for n in stage.nodes]
        assert len(together) == len(new.nodes)
        assert {*together} == {*new.nodes}
        assert first.outputs == first.nodes

    def test_what_has_no_part_in_it_waits_for_the_rest(self) -> None:
        def call(grown: Tensor) -> Any:
            apart = self.w.exp().cos().tanh().sin()
            return (grown.sum() + apart).sqrt()

        old, new = self.pair(call)
        assert [len(stage.nodes) for stage in split(old, new)] == [1, len(new.nodes) - 1]

    def test_a_call_stays_with_all_of_its_results(self) -> None:
        def call(grown: Tensor) -> Any:
            best, places = self.x.exp().cos().tanh().sort(1)
            wide = (best + grown.sum()).sin().exp()
            return (wide + places).abs() * grown.mean()

        old, new = self.pair(call)
        stages = split(old, new)
        for stage in stages:
            for n in stage.nodes:
                if isinstance(n.call, Item):
                    assert n.inputs[0] in stage.nodes
            assert all(len(n.types) == 1 for n in stage.outputs)

    def test_results_that_are_read_in_different_stages(self) -> None:
        def call(grown: Tensor) -> Any:
            best, places = (self.x.exp() + grown.sum()).cos().sort(1)
            joined = torch.cat([grown, best.view(1, 12)], 1)
            return (places + joined.sum()).sin().exp().neg().tanh().abs().cos()

        old, new = self.pair(call)
        stages = split(old, new)
        assert ["cat"] in [names(stage) for stage in stages]
        (sorting,) = [stage for stage in stages if "sort" in names(stage)]
        assert [n.call for n in sorting.outputs if isinstance(n.call, Item)] == [Item(1)]
        later = [given for n in stages[-1].nodes for given in n.inputs]
        assert any(given.call == Item(1) for given in later)

    def test_results_that_nothing_changed_reads(self) -> None:
        def graph(size: int) -> Graph:
            pair = topk(unary(aten.exp.default, unary(aten.cos.default, array(0, 4))))
            best, places = [result for result in pair.results if result is not None]
            grown = unary(aten.sin.default, array(1, size))
            sides = [unary(op, best) for op in (aten.tanh.default, aten.neg.default, aten.abs.default)]
            return Graph.of([*sides, unary(aten.neg.default, places), grown])

        old, new = graph(5), graph(6)
        stages = split(old, new)
        assert sorted(len(stage.nodes) for stage in stages) == [1, len(new.nodes) - 1]

    @pytest.mark.parametrize("case", ["much", "same", "longer", "again and again"])
    def test_graphs_that_are_left_whole(self, case: str) -> None:
        def again_and_again(grown: Tensor) -> Tensor:
            for _ in range(3):
                grown = grown * self.x.sum().add(grown.sum().exp().cos().tanh().sin().neg())
            return grown

        calls: dict[str, Callable[[Tensor], Any]] = {
            "much": lambda grown: grown.exp().cos().sum() + self.x,
            "same": lambda grown: self.x.exp().cos() + 1,
            "again and again": again_and_again,
            "longer": lambda grown: (
                (grown if grown.shape[1] == 5 else grown.cos()).sum() + self.x.exp().cos().sin()
            ),
        }
        assert split(*self.pair(calls[case])) == []
