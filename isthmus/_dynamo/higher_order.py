"""Ops that take graphs, converted: control flow becomes calls on sub-graphs, a nested region joins the graph around it.

Each converter gets the ``Conversion`` of the graph around, the FX node and its arguments, with ``GraphModule``s for the
graphs and nodes for tensors. ``Conversion.subgraph`` converts a graph for operands of given types; the calls are
computed by ``_program/control_flow.py`` and ``_program/flex_attention.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from isthmus._dynamo import flex_attention
from isthmus._graph.nodes import Node, Type
from isthmus._program import control_flow
from isthmus._runtime.dtypes import to_torch_dtype
from isthmus._runtime.host_arrays import NUMBER_DTYPES
from isthmus.errors import Unsupported

if TYPE_CHECKING:
    from isthmus._dynamo.convert import Conversion

_ops = torch.ops.higher_order


def _cond(
    conversion: Conversion,
    fx: FxNode,
    chosen: Any,
    on_true: GraphModule,
    on_false: GraphModule,
    operands: list[Any],
) -> Any:
    if not isinstance(chosen, Node):  # sizes decide, and they are known
        return conversion.inlined(fx, on_true if chosen else on_false, operands)
    # Both branches are converted for the same operands, and must agree in which results are None.
    graph, results = conversion.subgraph(on_true, operands)
    other, others = conversion.subgraph(on_false, operands)
    if results != others:
        raise Unsupported("branches of which one has no result where the other has one")
    types = [output.type for output in graph.outputs]
    results_of_call = conversion.function(control_flow.cond, [chosen, graph, other, operands], types)
    return [None if result is None else results_of_call[result] for result in results]


def _while_loop(
    conversion: Conversion,
    fx: FxNode,
    condition: GraphModule,
    body: GraphModule,
    carried: list[Any],
    others: list[Any],
    **options: Any,
) -> Any:
    if any(options.values()):
        raise Unsupported("a loop that writes to its arguments")
    _refuse_numbers_read(fx, carried)
    # What is carried has the types it starts with, in every round.
    types = [value.type if isinstance(value, Node) else _number_type(value) for value in carried]
    again, _ = conversion.subgraph(condition, [*types, *others])
    step, _ = conversion.subgraph(body, [*types, *others])
    return conversion.function(control_flow.while_loop, [again, step, carried, others], types)


def _number_type(value: Any) -> Type:
    if type(value) not in NUMBER_DTYPES:
        raise Unsupported(f"a loop that carries {value!r}")
    return Type((), to_torch_dtype(NUMBER_DTYPES[type(value)]))


def _refuse_numbers_read(fx: FxNode, carried: Sequence[Any]) -> None:
    """Refuse a loop that carries Python numbers which are read afterwards: no program can return one."""
    numbers = {at for at, value in enumerate(carried) if not isinstance(value, Node)}
    for user in fx.users:
        # A ``getitem`` of a number that is read, or a use of the whole: the program could not return it.
        if user.target is not operator.getitem or (user.args[1] in numbers and user.users):
            raise Unsupported("a number that a loop computes")


def _scan(
    conversion: Conversion,
    fx: FxNode,
    body: GraphModule,
    init: list[Node],
    xs: list[Node],
    others: Sequence[Any] = (),
) -> Any:
    carried = [value.type for value in init]
    graph, results = conversion.subgraph(body, [*carried, *_slices(xs), *others])
    types = [*carried, *_stacked(xs, [output.type for output in graph.outputs[len(carried) :]])]
    results_of_call = conversion.function(control_flow.scan, [graph, init, xs, others], types)
    return [None if result is None else results_of_call[result] for result in results]


def _slices(xs: Sequence[Node]) -> list[Type]:
    return [Type(x.type.size[1:], x.type.dtype) for x in xs]


def _stacked(xs: Sequence[Node], types: Sequence[Type]) -> list[Type]:
    """Return the types of results that a body gives for each position of the first dim."""
    return [Type((xs[0].type.size[0], *type.size), type.dtype) for type in types]


def _map(conversion: Conversion, fx: FxNode, body: GraphModule, xs: list[Node], others: list[Any]) -> Any:
    # A map is a scan that carries nothing.
    return _scan(conversion, fx, body, [], xs, others)


def _associative_scan(
    conversion: Conversion, fx: FxNode, body: GraphModule, xs: list[Node], others: Sequence[Any] = ()
) -> Any:
    # The body combines two elements, so it has two slices for each input.
    graph, _ = conversion.subgraph(body, [*_slices(xs), *_slices(xs), *others])
    types = [x.type for x in xs]
    return conversion.function(control_flow.associative_scan, [graph, xs, others], types)


def _invoke_subgraph(
    conversion: Conversion, fx: FxNode, module: GraphModule, name: Any, *operands: Any
) -> Any:
    return conversion.inlined(fx, module, operands)


CONVERTERS: dict[Any, Callable[..., Any]] = {
    _ops.cond: _cond,
    _ops.while_loop: _while_loop,
    _ops.scan: _scan,
    _ops.map_impl: _map,
    _ops.associative_scan: _associative_scan,
    _ops.invoke_subgraph: _invoke_subgraph,
    _ops.flex_attention: flex_attention.forward,
    _ops.flex_attention_backward: flex_attention.backward,
}
"""For each op, the function that converts a call of it."""
