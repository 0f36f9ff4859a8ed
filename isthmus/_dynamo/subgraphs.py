"""Graphs inside a graph, such as the branches of ``cond``: run in place, or as functions for JAX to trace.

What a lowering requires inside a body cannot leave it as it is: a flag belongs to the trace of the body. So a body
returns the number of the first condition that did not hold, and the program around it requires that there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax
from torch.fx import GraphModule, Node

from isthmus._dynamo import layout
from isthmus._dynamo.evaluate import Evaluation, NodeFailure, on_device
from isthmus._dynamo.random import is_random
from isthmus._graph.schema import schema_of
from isthmus._ops.common import wrap_dim
from isthmus._ops.tensors.views import VIEWS
from isthmus._ops.value_checks import collecting, require
from isthmus.errors import Unsupported

Array = Any
_aten = torch.ops.aten
_STRIDED = (_aten.as_strided.default, _aten.as_strided_scatter.default)


def _copies() -> dict[Any, Callable[..., Any]]:
    """Return the views whose results are copies, as torch has them in the body of a loop."""
    found: dict[Any, Callable[..., Any]] = {}
    for op, function in VIEWS.items():
        packet = getattr(_aten, f"{op._schema.name.partition('::')[2]}_copy", None)
        copy = getattr(packet, op._overloadname, None)
        if copy is not None and copy not in VIEWS:
            found[copy] = function
    return found


_COPIES = _copies()


class Subgraph(Evaluation):
    """One run of a graph inside a graph: its arguments have no storage, and it may not write to them."""

    def _apply(self, node: Node) -> Any:
        if node.target is _aten.copy_.default:
            raise Unsupported("a write to an argument of a graph inside a graph")
        if node.target in _STRIDED and layout.root_of(node.all_input_nodes[0]).op == "placeholder":
            raise Unsupported("strides of an argument of a graph inside a graph")
        if node.target is _aten._local_scalar_dense.default:
            return self.look_up(node.args[0])  # a number of the loop: it stays an array
        if node.target is _aten.select.int and hasattr(self.look_up(node.args[2]), "dtype"):
            return _select(*self.look_up(node.args))
        if node.target in _COPIES:
            return _COPIES[node.target](*self.look_up(node.args), **self.look_up(node.kwargs))
        if node.target is _aten.scaled_dot_product_attention.default:
            return self._attention(node)
        return super()._apply(node)

    def _attention(self, node: Node) -> Any:
        """Return what the device's kernel gives: it chooses a way by itself, and torch leaves it whole in a body."""
        args, kwargs = self.look_up(node.args), self.look_up(node.kwargs)
        if schema_of(node.target).bind(args, kwargs).get("dropout_p"):  # type: ignore[arg-type]
            raise Unsupported("attention with dropout inside a graph inside a graph")
        return on_device(self, node, *args, **kwargs)


def _select(x: Array, dim: int, index: Array) -> Array:
    """Return the position of a dim that an array tells."""
    dim = wrap_dim(dim, x.ndim)
    count = x.shape[dim]
    index = index.reshape(())
    require((index >= -count) & (index < count), IndexError, "select(): index out of range")
    return lax.dynamic_index_in_dim(x, jnp.where(index < 0, index + count, index), dim, keepdims=False)


def run(evaluation: Evaluation, module: GraphModule, arguments: Sequence[Any]) -> Any:
    """Return what a graph inside the graph of ``evaluation`` returns; what cannot be lowered is Unsupported."""
    return run_as(Subgraph, evaluation, module, arguments)


def run_as(
    kind: type[Subgraph], evaluation: Evaluation, module: GraphModule, arguments: Sequence[Any]
) -> Any:
    """Run a graph inside a graph by rules of its own."""
    for node in module.graph.nodes:
        if is_random(node):
            # Its place among the draws of the call is not known here, and a loop would draw the same each time.
            raise Unsupported(f"{node.target} inside a graph inside a graph")
    try:
        return kind(module, _symbols(evaluation, module, arguments)).run(arguments)
    except NodeFailure as failure:
        raise Unsupported(str(failure)) from failure.cause


def _symbols(evaluation: Evaluation, module: GraphModule, arguments: Sequence[Any]) -> layout.Symbols:
    """Return the sizes known outside, and those that the arguments of a graph inside it tell."""
    found = layout.Symbols((), ())
    found.values.update(evaluation.symbols.values)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, argument in zip(placeholders, arguments, strict=True):
        value = node.meta.get("val")
        tensor = isinstance(value, torch.Tensor) and hasattr(argument, "shape")
        pairs = zip(value.shape, argument.shape, strict=True) if tensor else [(value, argument)]
        for size, actual in pairs:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and isinstance(actual, int):
                found.values[size.node.expr] = actual
    return found


class Body:
    """A graph inside a graph as a function for JAX to trace: it gives results, and which condition did not hold."""

    def __init__(self, evaluation: Evaluation, module: GraphModule, kind: type[Subgraph] = Subgraph) -> None:
        self.evaluation, self.module, self.kind = evaluation, module, kind
        self.errors: list[tuple[type[Exception], str]] = []

    def __call__(self, *arguments: Any) -> tuple[Any, Array]:
        """Return the results and the number of the first condition that did not hold, or -1."""
        with collecting() as found:
            results = run_as(self.kind, self.evaluation, self.module, arguments)
        self.errors = found.errors
        code = jnp.full((), -1, jnp.int32)
        for number, flag in reversed(list(enumerate(found.flags))):
            code = jnp.where(flag, code, jnp.int32(number))
        return results, code

    def arrays(self, *arguments: Any) -> tuple[list[Array | None], Array]:
        """Return the results as arrays whose dtypes are their own, not a number's; None stays."""
        results, code = self(*arguments)
        return [None if result is None else strong(result) for result in results], code

    def check(self, codes: Array, applies: Any = True) -> None:
        """Require, in the program around, that the conditions held in every run that applies."""
        for number, (error, message) in enumerate(self.errors):
            require(~(applies & (codes == number)), error, message)


def strong(value: Any) -> Array:
    """Return an array that promotes as a tensor does; a number would be one that depends on data."""
    if not hasattr(value, "dtype"):
        raise Unsupported(f"{value!r} as a result of a graph inside a graph")
    return lax.convert_element_type(value, value.dtype)
