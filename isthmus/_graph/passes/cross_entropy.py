"""The gradient of log-softmax is computed from its input, which exists anyway, instead of from its result.

torch saves the result of ``log_softmax`` for backward: a float32 number for every class of every token, written once
and read once. For a language model that is the largest tensor of the step. The loss itself reads one element a row, so
if backward does not need the result, XLA never writes it. Saved instead are the logits, which a matrix product wrote in
half precision, and two numbers a row: the largest logit and the logarithm of the row's sum. Backward computes the
result again and rounds it as forward did, so gradients are those of the unchanged graph.

The pass replaces

    out = _log_softmax(x)                       out, largest, total = isthmus::log_softmax_with_sums(x)
    _log_softmax_backward_data(grad, out)       isthmus::log_softmax_gradient(x, largest, total, grad)
    ... of nll_loss_backward(grad, out, ...)    isthmus::cross_entropy_gradient(x, largest, total, grad, ...)

The three ops are defined here in terms of ATen, for backends and devices without a lowering; their lowerings are in
``_ops/nn/cross_entropy.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call, Input, Item, Leaf, Node, Type, call_of, node
from isthmus._graph.passes.rewrite import Rule, is_call, type_of

_aten = torch.ops.aten
_NLL_BACKWARD = (_aten.nll_loss_backward.default, _aten.nll_loss2d_backward.default)
_HALVES = (torch.float16, torch.bfloat16)

# FRAGMENT: other modules define ops in the same namespace.
_library = torch.library.Library("isthmus", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
# Ops of our own, each with a composite kernel: whatever runs a graph without our lowerings can run them too.
_library.define(
    "log_softmax_with_sums(Tensor self, int dim, bool half_to_float) -> (Tensor, Tensor, Tensor)", tags=_TAGS
)
_library.define(
    "log_softmax_gradient(Tensor self, Tensor largest, Tensor total, int dim, ScalarType result_dtype, "
    "ScalarType dtype, Tensor grad) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "cross_entropy_gradient(Tensor self, Tensor largest, Tensor total, int dim, ScalarType result_dtype, "
    "ScalarType dtype, Tensor grad, Tensor target, Tensor? weight, int reduction, SymInt ignore_index, "
    "Tensor total_weight) -> Tensor",
    tags=_TAGS,
)


def _with_sums(self: Tensor, dim: int, half_to_float: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-softmax, the largest element of each row, and the logarithm of the row's sum beside it."""
    wide = _wide(self)
    # The largest element is subtracted before ``exp``, so that nothing overflows.
    largest = wide.amax(dim, keepdim=True)
    total = (wide - largest).exp().sum(dim, keepdim=True).log()
    return torch.ops.aten._log_softmax(self, dim, half_to_float), largest, total


def _gradient(
    self: Tensor,
    largest: Tensor,
    total: Tensor,
    dim: int,
    result_dtype: torch.dtype,
    dtype: torch.dtype,
    grad: Tensor,
) -> Tensor:
    """Return the gradient of log-softmax for its input; its result, were it saved, had ``result_dtype``."""
    # Rounded to the dtype that the saved result would have had, so that the gradient is eager's bit for bit.
    likelihood = (_wide(self) - largest - total).to(result_dtype).to(largest.dtype).exp()
    wide = grad.to(likelihood.dtype)
    return (wide - likelihood * wide.sum(dim, keepdim=True)).to(dtype)


def _loss_gradient(
    self: Tensor,
    largest: Tensor,
    total: Tensor,
    dim: int,
    result_dtype: torch.dtype,
    dtype: torch.dtype,
    grad: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Return the gradient of log-softmax followed by the likelihood of targets, for the input of both."""
    # The op for losses over images has its classes in dim 1 of four.
    backward = _NLL_BACKWARD[self.dim() > 2]
    wide = self.to(dtype)
    of_loss = backward(grad, wide, target, weight, reduction, ignore_index, total_weight)
    return _gradient(self, largest, total, dim, result_dtype, dtype, of_loss)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


_library.impl("log_softmax_with_sums", _with_sums, "CompositeExplicitAutograd")
_library.impl("log_softmax_gradient", _gradient, "CompositeExplicitAutograd")
_library.impl("cross_entropy_gradient", _loss_gradient, "CompositeExplicitAutograd")
WITH_SUMS = torch.ops.isthmus.log_softmax_with_sums.default
GRADIENT = torch.ops.isthmus.log_softmax_gradient.default
LOSS_GRADIENT = torch.ops.isthmus.cross_entropy_gradient.default


def cross_entropy(graph: Graph) -> Rule | None:
    """Return the rule: gradients of log-softmax are computed from its input."""
    # Calls of log-softmax whose result a backward reads, and whose input is still there then.
    splits = {
        out.call
        for n in graph.nodes
        if is_call(n, _aten._log_softmax_backward_data.default)
        and is_call(out := _undetached(n.inputs[1]), _aten._log_softmax.default)
        and _may_split(graph, out)
    }

    def rule(call: Call, inputs: tuple[Node, ...]) -> Node | None:
        # First the forward call: its backward, which comes later, finds the new one among its inputs.
        if call in splits:
            return _split(call, inputs[0]).results[0]
        if call.op is _aten._log_softmax_backward_data.default:
            # AOTAutograd detaches what it saves.
            out = _undetached(inputs[1])
            if isinstance(out.call, Item) and is_call(out.inputs[0], WITH_SUMS):
                return _replaced(call, inputs[0], out.inputs[0])
        return None

    return rule if splits else None


def _may_split(graph: Graph, out: Node) -> bool:
    """Return whether backward may read the input later: in a joint graph an argument may be written to before that."""
    source = _before_cast(out.inputs[0])
    while isinstance(source.call, Call) and source.call.op in _VIEWS:
        source = source.inputs[0]
    return bool(out.type.size) and not (isinstance(source.call, Leaf) and source.call.kind == "argument")


_VIEWS = frozenset(
    {_aten.view.default, _aten.permute.default, _aten.t.default, _aten.transpose.int, _aten.expand.default,
     _aten.slice.Tensor, _aten.select.int, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.detach.default,
     _aten._unsafe_view.default, _aten.alias.default, _aten.as_strided.default}
)  # fmt: skip

# Views that do not depend on the dtype or strides of what they view.
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default})


def _split(call: Call, x: Node) -> Node:
    arguments = dict(call.arguments)
    out = type_of(call)
    dim = arguments["dim"] % len(out.size)
    # One number per row: the reduced dim has length one.
    rows = tuple(1 if n == dim else size for n, size in enumerate(out.size))
    sums = Type(rows, torch.float64 if out.dtype == torch.float64 else torch.float32)
    named = {"self": Input(0), "dim": dim, "half_to_float": arguments["half_to_float"]}
    return node(call_of(WITH_SUMS, named, [out, sums, sums], context=call.context), x)


def _replaced(call: Call, grad: Node, whole: Node) -> Node:
    arguments = dict(call.arguments)
    result = type_of(call)
    dim = arguments["dim"] % len(result.size)
    _, largest, total = whole.results
    assert largest is not None
    assert total is not None
    assert whole.types[0] is not None
    # The half-precision source if there is one: it is what backward saves then.
    inputs = [_before_cast(whole.inputs[0]), largest, total]
    named = {"self": Input(0), "largest": Input(1), "total": Input(2), "dim": dim}
    named |= {"result_dtype": whole.types[0].dtype, "dtype": arguments["input_dtype"]}
    # A loss over classes: the gradient of each row is zero but for its target's.
    of_loss = isinstance(grad.call, Call) and grad.call.op in _NLL_BACKWARD
    # The likelihood loss reads dim 1, or the only dim of a single sample.
    if not of_loss or dim != min(1, len(result.size) - 1):
        named["grad"] = Input(3)
        return node(call_of(GRADIENT, named, [result], context=call.context), *inputs, grad)
    assert isinstance(grad.call, Call)
    # All arguments of the loss's backward, its inputs numbered after ours.
    for name, value in grad.call.arguments:
        if name == "self":
            continue
        if isinstance(value, Input):
            inputs.append(grad.inputs[value.index])
            value = Input(len(inputs) - 1)
        named["grad" if name == "grad_output" else name] = value
    return node(call_of(LOSS_GRADIENT, named, [result], context=call.context), *inputs)


def _undetached(value: Node) -> Node:
    while is_call(value, _aten.detach.default):
        value = value.inputs[0]
    return value


def _before_cast(x: Node) -> Node:
    """Return the half-precision value that ``x`` is a float32 copy of, or ``x`` itself.

    Saving the source for backward instead of its copy halves the residual; backward repeats the cast, which XLA fuses.
    """
    if x.type.dtype != torch.float32 or not isinstance(x.call, Call) or len(x.inputs) != 1:
        return x
    if x.call.op is _aten._to_copy.default:
        source = x.inputs[0]
        return source if source.type.dtype in _HALVES else x
    if x.call.op not in _RESHAPES:
        return x
    # A view of the copy, as flattened logits are: the same view of what was copied.
    source = _before_cast(x.inputs[0])
    if source is x.inputs[0]:
        return x
    type = Type(x.type.size, source.type.dtype)
    return node(call_of(x.call.op, dict(x.call.arguments), [type], context=x.call.context), source)
