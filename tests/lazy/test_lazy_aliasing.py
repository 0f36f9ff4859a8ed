"""Random programs of views and writes, recorded: whenever some of it is read, every tensor equals CPU torch's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import isthmus
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Item, Node
from isthmus._graph.passes.split import staged
from isthmus._graph.passes.stages import Stage
from isthmus._lazy import programs as lazy_programs
from tests.device.test_aliasing import Program, programs

STEPS = ["view", "view", "write", "write", "start", "relayout", "fresh"]
READS = ["sync", "read", "item", "drop"]


@pytest.fixture(autouse=True, params=["xla", "reference"])
def lazily(strict_fallback: None, request: pytest.FixtureRequest) -> Iterator[None]:
    isthmus.config.backend = request.param
    with isthmus.lazy():
        yield
    isthmus.config.backend = "xla"


class LazyProgram(Program):
    """A program with points at which recorded ops run: all of them, or those one tensor needs."""

    def fresh(self) -> None:
        """Make a tensor on a storage of its own, laid out as torch lays it out."""
        pair = self.pick(self.alive)
        if 0 in pair[0].shape:
            return  # strides that say nothing: torch itself chooses them differently on the CPU and on Meta
        make = self.pick([torch.clone, torch.Tensor.contiguous, torch.neg])
        made = self.both(make, pair)
        assert made is not None
        assert made[1].stride() == made[0].stride()
        self.alive.append(made)

    def sync(self) -> None:
        isthmus.sync()

    def read(self) -> None:
        want, got = self.pick(self.alive)
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)

    def item(self) -> None:
        want, got = self.pick(self.alive)
        if want.numel():
            place = (self.number(0, 3),) * want.dim()
            place = tuple(i % n for i, n in zip(place, want.shape, strict=True))
            read, wanted = torch.tensor(got[place].item()), torch.tensor(want[place].item())
            torch.testing.assert_close(read, wanted, rtol=0, atol=0, equal_nan=True)

    def drop(self) -> None:
        """Let a tensor die before it was computed; its views and its base live on."""
        if len(self.alive) > 1:
            del self.alive[self.number(0, len(self.alive) - 1)]


def run(data: st.DataObject, steps: int) -> None:
    assert isthmus.mode() == "lazy"
    program = LazyProgram(data)
    program.start()
    for _ in range(steps):
        getattr(program, program.pick(STEPS))()
        if program.number(0, 3) == 0:
            getattr(program, program.pick(READS))()
    program.check()


@programs(60)
@given(st.data())
def test_random_programs(data: st.DataObject) -> None:
    run(data, steps=8)


def test_random_programs_in_random_stages() -> None:
    chance = random.Random(0)
    counts = []

    def stages(line: str, wanted: tuple[Node, ...]) -> tuple[Graph, list[Stage]] | None:
        graph = Graph.of(tuple(dict.fromkeys(wanted)))
        apart = {n for n in graph.nodes if not isinstance(n.call, Item) and chance.random() < 0.3}
        found = staged(
            graph, apart | {n for n in graph.nodes if apart & {*n.inputs} and isinstance(n.call, Item)}
        )
        counts.append(len(found))
        return (graph, found) if found else None

    @programs(30)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        run(data, steps=10)

    with patch.object(lazy_programs, "_stages", stages):
        check()
    assert max(counts) > 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@programs(240)
@given(st.data())
def test_many_random_programs(data: st.DataObject) -> None:
    run(data, steps=14)
