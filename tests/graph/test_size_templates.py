"""Graphs alike but for sizes: skeletons, templates made of samples, and that a template serves only what fits it."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Input, Type, call_of, leaf, node
from isthmus._graph.size_guesses import generalise
from isthmus._graph.size_templates import Expression, Ints, Template, skeleton

aten = torch.ops.aten


def doubled(*size: int, dim: int = 0) -> Graph:
    """Return cat([x, x], dim) of an array of this size."""
    x = leaf("array", 0, Type(size, torch.float32))
    result = tuple(2 * n if d == dim else n for d, n in enumerate(size))
    arguments = {"tensors": (Input(0), Input(1)), "dim": dim}
    return Graph.of((node(call_of(aten.cat.default, arguments, [Type(result, torch.float32)]), x, x),))


def integers(template: Template, sizes: Ints) -> Ints:
    """Return all integers of the graph that a template says these sizes have."""
    quantities = template.quantities(sizes)
    expressions = template.expressions
    return tuple(
        expressions[i].value(quantities) if i in expressions else n for i, n in enumerate(template.fixed)
    )


def test_graphs_of_other_sizes_have_one_skeleton() -> None:
    first, second = skeleton(doubled(3, 5)), skeleton(doubled(4, 7))
    assert first is not None
    assert second is not None
    assert first.key == second.key
    assert first.dims == (0, 1)
    assert (first.ints, second.ints) == ((3, 5, 6, 5), (4, 7, 8, 7))


def test_another_op_or_dtype_is_another_skeleton() -> None:
    x = leaf("array", 0, Type((3, 5), torch.float32))
    relu = Graph.of((node(call_of(aten.relu.default, {"self": Input(0)}, [x.type]), x),))
    neg = Graph.of((node(call_of(aten.neg.default, {"self": Input(0)}, [x.type]), x),))
    assert len({s.key for s in map(skeleton, (relu, neg, doubled(3, 5))) if s is not None}) == 3


def test_integers_that_differ_become_expressions_of_sizes() -> None:
    template = generalise([(3, 5, 6, 5), (4, 5, 8, 5)], (0, 1))
    assert template is not None
    assert template.places == (0,)
    assert template.expressions == {0: Expression(((1, (0,)),)), 2: Expression(((2, (0,)),))}
    assert template.match((9, 5, 18, 5)) == (9,)
    assert template.match((9, 5, 17, 5)) is None, "an integer that is not what the expression says"
    assert template.match((9, 6, 18, 6)) is None, "a size that never changed is fixed"
    assert template.match((1, 5, 2, 5)) is None, "a size of 1 is a program of its own"


def test_sizes_that_are_equal_by_chance_are_told_apart_by_a_third_sample() -> None:
    both = [(4, 4, 16), (6, 6, 36)]
    assert generalise(both, (0, 1)) is None or generalise(both, (0, 1)).places == (0,)  # type: ignore[union-attr]
    template = generalise([*both, (4, 7, 28)], (0, 1))
    assert template is not None
    assert template.places == (0, 1)
    assert template.expressions[2] == Expression(((1, (0, 1)),))
    assert template.match((5, 9, 45)) == (5, 9)
    assert template.match((5, 9, 44)) is None


def test_an_integer_that_no_array_explains_has_no_template() -> None:
    assert generalise([(3, 5), (3, 7)], (0,)) is None
    assert generalise([(3, 5), (4, 5), (5, 9)], (0,)) is None


def test_a_dim_that_was_never_empty_is_not_empty() -> None:
    template = generalise([(6, 3), (7, 4)], (0,))
    assert template is not None
    assert template.least == (4,)
    assert template.match((3, 0)) is None


def test_sizes_may_be_counted_in_units() -> None:
    """Images that are cut into patches: the sides are multiples of what those seen are multiples of."""
    template = generalise([(8, 2, 16), (12, 3, 24)], (0,), 1, in_units=True)
    assert template is not None
    assert template.units == (4,)
    assert template.match((20, 5, 40)) == (5,)
    assert integers(template, (5,)) == (20, 5, 40)
    assert template.match((18, 4, 36)) is None, "no multiple"
    assert template.match((20, 5, 41)) is None


def test_sizes_may_start_with_the_smallest_seen() -> None:
    template = generalise([(9, 18), (7, 14), (12, 24)], (0,), None)
    assert template is not None
    assert template.least == (7,)
    assert template.match((6, 12)) is None


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # slow is the machine
@given(
    samples=st.lists(st.tuples(st.integers(2, 60), st.integers(2, 60)), min_size=2, max_size=4, unique=True),
    new=st.tuples(st.integers(2, 60), st.integers(2, 60)),
    k=st.integers(1, 5),
    c=st.integers(0, 5),
)
def test_a_match_is_exact(samples: list[tuple[int, int]], new: tuple[int, int], k: int, c: int) -> None:
    def ints(b: int, s: int) -> tuple[int, ...]:
        return (b, s, k * s + c, b * s, 7)

    template = generalise([ints(*sizes) for sizes in samples], (0, 1))
    if template is None:
        return
    sizes = template.match(ints(*new))
    if sizes is None:
        return
    assert integers(template, sizes) == ints(*new)


def test_lifting_puts_expressions_into_the_graph() -> None:
    graph = doubled(3, 5)
    template = generalise([(3, 5, 6, 5), (4, 5, 8, 5)], (0, 1))
    assert template is not None
    lifted = template.lift(graph, [11])
    assert lifted.inputs[0].type.size == (11, 5)
    assert lifted.outputs[0].type.size == (22, 5)
    assert graph.outputs[0].type.size == (6, 5), "the graph itself stays as it is"


def test_calls_with_layouts_have_no_skeleton() -> None:
    from isthmus._graph.layout import Spec

    x = leaf("array", 0, Type((3,), torch.float32))
    layouts = (Spec((3,), (1,), torch.float32),)
    call = call_of(aten.relu.default, {"self": Input(0)}, [x.type], layouts=layouts)
    assert skeleton(Graph.of((node(call, x),))) is None
