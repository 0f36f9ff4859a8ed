"""Compiled graphs that torch's wrapper adds nothing to are called without it; all others with it."""

import pytest
import torch

import isthmus
from isthmus._dynamo import backend

ALONE = {
    "one op": lambda x: x + 1,
    "several results": lambda x: (x + 1, x * 2, (x @ x).sum()),
    "a number beside tensors": lambda x: (x + 1, 3),
    "nested results": lambda x: {"a": [x.sin(), x.cos()]},
    "an argument is returned": lambda x: (x, x + 1),  # Dynamo returns it, not the graph
    "views of one result": lambda x: ((y := x + 1)[0], y[1]),
}
WRAPPED = {
    "an argument is written to": lambda x: x.add_(1),
    "a view of an argument": lambda x: (x.t(), x + 1),
}


@pytest.fixture
def alone(monkeypatch, fresh_dynamo):
    """Return what was said of each inference graph: whether it is called without torch's wrapper."""
    said = []
    ask = backend.only_calls_graph

    def watched():
        said.append(ask())
        return said[-1]

    monkeypatch.setattr(backend, "only_calls_graph", watched)
    return said


def same(function, *args):
    """Compare three calls of a compiled function with eager ones on the CPU, and what they leave in the arguments."""
    compiled = torch.compile(function, backend="isthmus", fullgraph=True)
    for _ in range(3):
        mine = [arg.to("jax") for arg in args]
        wanted = [arg.clone() for arg in args]
        found = compiled(*mine)
        torch.testing.assert_close(
            torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, found), function(*wanted)
        )
        torch.testing.assert_close([arg.cpu() for arg in mine], wanted)


@pytest.mark.parametrize("name", ALONE)
def test_nothing_is_around_these(name, alone):
    same(ALONE[name], torch.randn(3, 3))
    assert alone == [True]


@pytest.mark.parametrize("name", WRAPPED)
def test_these_need_the_wrapper(name, alone):
    same(WRAPPED[name], torch.randn(3, 3))
    assert alone == [False]


def test_gradients_need_the_wrapper(alone):
    x = torch.randn(3, device="jax", requires_grad=True)
    torch.compile(lambda x: x * 2, backend="isthmus")(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert alone == []


@pytest.mark.usefixtures("fresh_dynamo")
def test_results_are_as_the_mode_has_them():
    weight = torch.randn(3, 3, device="jax", requires_grad=True)
    compiled = torch.compile(lambda x, w: x @ w, backend="isthmus")
    x = torch.randn(3, 3, device="jax")
    with torch.no_grad():
        found = compiled(x, weight)
    assert not found.requires_grad
    assert not found.is_inference()
    with torch.inference_mode():
        assert compiled(x, weight).is_inference()
    assert compiled(x, weight).requires_grad


@pytest.mark.usefixtures("fresh_dynamo")
def test_autocast_is_the_graphs():
    x = torch.randn(3, 3, device="jax")
    compiled = torch.compile(lambda x: ((x @ x).sin(), x + 1), backend="isthmus")
    for _ in range(2):
        with torch.autocast("jax", torch.bfloat16):
            product, rest = compiled(x)
        assert (product.dtype, rest.dtype) == (torch.bfloat16, torch.float32)
        assert [found.dtype for found in compiled(x)] == [torch.float32] * 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:.*runs outside the compiled programs")
def test_nodes_outside_of_programs_run_in_torchs_modes():
    seen = []

    @torch.library.custom_op("alone::looked_at", mutates_args=())
    def looked_at(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("jax")))
        return x.clone()

    looked_at.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: looked_at(x + 1) * 2, backend="isthmus")
    x = torch.randn(3, 3, device="jax")
    for _ in range(2):
        with torch.autocast("jax", torch.bfloat16):
            torch.testing.assert_close(compiled(x).cpu(), (x.cpu() + 1) * 2)
    assert seen == [(False, False)] * 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_node_that_fails_when_it_is_traced_runs_outside():
    compiled = torch.compile(lambda x: torch.nonzero_static(x, size=2).sum() + x.sum(), backend="isthmus")
    x = torch.tensor([0.0, 1.0, 2.0])
    for _ in range(2):
        assert compiled(x.to("jax")).item() == torch.nonzero_static(x, size=2).sum() + x.sum()


@pytest.fixture
def slow(monkeypatch, fresh_dynamo):
    """Return the arguments of calls that took the long way."""
    seen = []
    ask = backend._shortest

    def watched(program, slow):
        seen.append(program)
        return ask(program, slow)

    monkeypatch.setattr(backend, "_shortest", watched)
    return seen


@pytest.mark.parametrize("count", [1, 3, 16])
def test_the_next_call_takes_the_short_way(count, slow):
    compiled = torch.compile(lambda *args: (sum(args), args[0] * 2), backend="isthmus")
    for _ in range(4):
        args = [torch.randn(3) for _ in range(count)]
        found = compiled(*[arg.to("jax") for arg in args])
        torch.testing.assert_close([each.cpu() for each in found], [sum(args), args[0] * 2])
    assert len(slow) == 1


OTHERS = {
    "an offset": lambda: torch.arange(8.0).to("jax")[3:6],
    "a larger storage": lambda: torch.arange(8.0).to("jax")[:3],
    "strides": lambda: torch.arange(6.0).to("jax").view(3, 2)[:, 0],
    "expanded": lambda: torch.ones(1, device="jax").expand(3),
    "another device": lambda: torch.arange(3.0),
    "a parameter": lambda: torch.nn.Parameter(torch.arange(3.0).to("jax"), requires_grad=False),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_call_that_is_not_like_the_last_one(name):
    compiled = torch.compile(lambda x: x * 2 + 1, backend="isthmus")
    plain = torch.ones(3, device="jax")
    for _ in range(3):
        assert compiled(plain).tolist() == [3.0] * 3
        other = OTHERS[name]()
        torch.testing.assert_close(compiled(other).cpu(), other.cpu() * 2 + 1)


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_is_only_recorded_is_computed_first():
    compiled = torch.compile(lambda x: x * 2, backend="isthmus")
    x = torch.ones(3, device="jax")
    for _ in range(2):
        assert compiled(x).tolist() == [2.0] * 3
        with isthmus.lazy():
            assert compiled(x + 1).tolist() == [4.0] * 3
            y = x + 2
        assert compiled(y).tolist() == [6.0] * 3


@pytest.mark.usefixtures("fresh_dynamo")
def test_results_are_new_each_time_and_writes_are_seen():
    compiled = torch.compile(lambda x: x + 1, backend="isthmus")
    x = torch.zeros(3, device="jax")
    first, second = compiled(x), compiled(x)
    first.add_(1)
    assert second.tolist() == [1.0] * 3
    x.add_(5)
    assert compiled(x).tolist() == [6.0] * 3
    assert first.tolist() == [2.0] * 3


@pytest.mark.usefixtures("fresh_dynamo")
def test_sizes_that_take_turns():
    compiled = torch.compile(lambda x: x * 2, backend="isthmus", dynamic=True)
    for size in (3, 4, 5, 3, 4, 5, 5, 5):
        assert compiled(torch.ones(size, device="jax")).tolist() == [2.0] * size
