"""Gradients of log-softmax from its input, which is there already, and not from its result.

torch keeps the result for backward: the likelihood of every class of every token, written once and read once. Left to
XLA it is never written: the loss picks one element a row. Kept instead are the logits, which a matrix product wrote,
and two numbers a row.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import torch
from torch import Tensor
from torch.fx import Graph, Node

from isthmus._dynamo.evaluate import OWN, Evaluation
from isthmus._dynamo.layout import root_of
from isthmus._ops.common import accumulation_dtype, cast, wrap_dim
from isthmus._ops.nn.loss import nll_gradient
from isthmus._runtime.dtypes import to_jax_dtype

Array = Any
_aten = torch.ops.aten
_NLL_BACKWARD = (_aten.nll_loss_backward.default, _aten.nll_loss2d_backward.default)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-softmax, the largest element of each row, and the logarithm of the row's sum beside it."""
    wide = _wide(x)
    largest = wide.amax(dim, keepdim=True)
    total = (wide - largest).exp().sum(dim, keepdim=True).log()
    return torch._log_softmax(x, dim, half_to_float), largest, total


def log_softmax_gradient(
    x: Tensor, largest: Tensor, total: Tensor, dim: int, dtype: torch.dtype, grad: Tensor
) -> Tensor:
    """Return the gradient of log-softmax for its input."""
    likelihood = (_wide(x) - largest - total).exp()
    wide = grad.to(likelihood.dtype)
    return (wide - likelihood * wide.sum(dim, keepdim=True)).to(dtype)


def cross_entropy_gradient(
    x: Tensor, largest: Tensor, total: Tensor, dim: int, dtype: torch.dtype, grad: Tensor, *loss: Any
) -> Tensor:
    """Return the gradient of log-softmax, then of the likelihood of targets, for the input of both."""
    backward = _NLL_BACKWARD[x.dim() > 2]
    return log_softmax_gradient(x, largest, total, dim, dtype, backward(grad, x.to(dtype), *loss))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class _Kept:
    """What backward keeps of a log-softmax: its input, the largest element of each row, and the rest of the sum."""

    x: Node
    largest: Node
    total: Node


def rewrite(graph: Graph) -> None:
    """Let gradients of log-softmax in a joint graph be computed from its input."""
    known: dict[Node, _Kept] = {}
    for node in [*graph.nodes]:
        if node.target is not _aten._log_softmax_backward_data.default:
            continue
        result = _source(node.args[1])
        if result.target is _aten._log_softmax.default and result.meta["val"].dim() and not _is_given(result):
            result, known[result] = _split(graph, result)
        if result in known:
            _replace(graph, node, known[result])


def _is_given(result: Node) -> bool:
    """Return whether the input is an argument of the graph, which may be written to before backward, as in eager."""
    source = result.args[0]
    assert isinstance(source, Node)
    return root_of(_narrow(source)).op == "placeholder"


def _split(graph: Graph, result: Node) -> tuple[Node, _Kept]:
    """Replace a log-softmax by one that also gives what is to be kept; return its result, and that."""
    args: Any = result.args
    x, dim, _ = args
    value = result.meta["val"]
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    rows = [1 if n == wrap_dim(dim, value.dim()) else size for n, size in enumerate(value.shape)]
    values = (value, *[value.new_empty(rows, dtype=wide) for _ in range(2)])
    with graph.inserting_before(result):
        whole = graph.call_function(log_softmax, result.args)
        parts = [graph.call_function(operator.getitem, (whole, n)) for n in range(3)]
    for made, meta in zip([whole, *parts], [values, *values], strict=True):
        made.meta = {**result.meta, "val": meta}
        made.meta.pop("tensor_meta", None)
    result.replace_all_uses_with(parts[0])
    graph.erase_node(result)
    return parts[0], _Kept(_narrow(x), parts[1], parts[2])


def _replace(graph: Graph, node: Node, kept: _Kept) -> None:
    args: Any = node.args
    grad, _, dim, dtype = args
    rank = node.meta["val"].dim()
    of_loss = grad.target in _NLL_BACKWARD and wrap_dim(dim, rank) == min(1, rank - 1)
    with graph.inserting_before(node):
        if of_loss:
            above, _, *loss = grad.args
            target, given = cross_entropy_gradient, (above, *loss)
        else:
            target, given = log_softmax_gradient, (grad,)
        made = graph.call_function(target, (kept.x, kept.largest, kept.total, dim, dtype, *given))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    if not grad.users:
        graph.erase_node(grad)


def _source(node: Any) -> Node:
    """Return the node that a chain of detached ones ends at."""
    while node.target is _aten.detach.default:
        node = node.args[0]
    return node


def _narrow(x: Any) -> Node:
    """Return what was made wider to be ``x``: keeping that takes half the memory."""
    source = x.args[0] if x.target is _aten._to_copy.default else x
    halves = (torch.float16, torch.bfloat16)
    return source if source.meta["val"].dtype in halves and x.meta["val"].dtype == torch.float32 else x


def _lower(run: Evaluation, node: Node, x: Array, dim: int, half_to_float: bool) -> tuple[Array, ...]:
    wide = cast(x, accumulation_dtype(x.dtype))
    largest = wide.max(dim, keepdims=True, initial=-jnp.inf)  # a row may be empty
    total = jnp.log(jnp.exp(wide - largest).sum(dim, keepdims=True))
    return cast(wide - largest - total, jnp.float32 if half_to_float else x.dtype), largest, total


def _likelihood(x: Array, largest: Array, total: Array) -> Array:
    return jnp.exp(cast(x, largest.dtype) - largest - total)


def _lower_gradient(
    run: Evaluation, node: Node, x: Array, largest: Array, total: Array, dim: int, dtype: Any, grad: Array
) -> Array:
    wide = cast(grad, largest.dtype)
    found = wide - _likelihood(x, largest, total) * wide.sum(dim, keepdims=True)
    return cast(found, to_jax_dtype(dtype))


def _lower_loss(
    run: Evaluation,
    node: Node,
    x: Array,
    largest: Array,
    total: Array,
    dim: int,
    dtype: Any,
    grad: Array,
    *loss: Any,
) -> Array:
    # A row's gradient is zero but for its target's: that is the row's sum.
    hit, each = nll_gradient(grad, x, *loss)
    found = jnp.where(hit, each, jnp.zeros((), each.dtype)) - _likelihood(x, largest, total) * each
    return cast(found, to_jax_dtype(dtype))


OWN.update(
    {
        log_softmax: _lower,
        log_softmax_gradient: _lower_gradient,
        cross_entropy_gradient: _lower_loss,
    }
)
