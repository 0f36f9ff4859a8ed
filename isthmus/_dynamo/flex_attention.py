"""``flex_attention`` as dense attention: every score is computed, and masked where torch's kernels would skip it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.fx import GraphModule, Node

from isthmus._dynamo.evaluate import Evaluation, NodeFailure
from isthmus._dynamo.subgraphs import Body, Subgraph
from isthmus._ops.common import accumulation_dtype, cast
from isthmus._ops.linalg.matmul import precision

Array = Any
_LN2 = math.log(2)  # torch keeps sums and maxima as logarithms to the base of two


@dataclass(frozen=True)
class Scatter:
    """Gradients on their way to places of a captured tensor: the sum over all scores is one scatter."""

    parts: tuple[tuple[Array, tuple[Array, ...]], ...]
    shape: tuple[int, ...]

    def total(self) -> Array:
        """Return the sum of all values at their places."""
        total = jnp.zeros(self.shape, self.parts[0][0].dtype)
        for values, indices in self.parts:
            total = total.at[tuple(indices)].add(values)
        return total


jax.tree_util.register_dataclass(Scatter, data_fields=["parts"], meta_fields=["shape"])


class ScoreGraph(Subgraph):
    """A function of one score: torch traced it in the dtype of the query, here scores are wider."""

    def _call(self, node: Node) -> Any:
        try:
            return self._apply(node)
        except Exception as error:
            raise NodeFailure(node, error) from error

    def _apply(self, node: Node) -> Any:
        if node.target is torch.ops.flex_lib.zeros_and_scatter.default:
            shape, indices, values = self.look_up(node.args)
            return _scatter(values, indices, tuple(shape))
        given = [self.values[source] for source in node.all_input_nodes]
        if any(isinstance(value, Scatter) for value in given):
            if node.target is torch.ops.aten.add.Tensor and not node.kwargs and _all_scatters(given, node):
                return Scatter(sum((value.parts for value in given), ()), given[0].shape)
            for source, value in zip(node.all_input_nodes, given, strict=True):
                self.values[source] = value.total() if isinstance(value, Scatter) else value
        return super()._apply(node)


def _scatter(values: Array, indices: Sequence[Array], shape: tuple[int, ...]) -> Scatter:
    indices = jnp.broadcast_arrays(*indices)
    values = jnp.broadcast_to(values, indices[0].shape + shape[len(indices) :])
    return Scatter(((values, tuple(indices)),), shape)


def _all_scatters(given: Sequence[Any], node: Node) -> bool:
    return len(given) == 2 == len(node.args) and all(isinstance(value, Scatter) for value in given)


@dataclass(frozen=True)
class Call:
    """What forward and backward share: heads of queries in groups by the head of keys they read, and the mask."""

    evaluation: Evaluation
    query: Array
    key: Array
    value: Array
    block_mask: list[Any]
    scale: float
    buffers: list[Any]
    mask_buffers: list[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scores: batch, heads, queries, keys."""
        return (*self.query.shape[:3], self.key.shape[2])

    @property
    def wide(self) -> Any:
        """The dtype of the scores."""
        return accumulation_dtype(self.query.dtype)

    def product(self, how: str, *operands: Array) -> Array:
        """Contract, accumulating wide; queries and scores have their heads in groups, as ``bhg``."""
        given = [
            self._grouped(x) if "g" in part else x for x, part in zip(operands, _parts(how), strict=True)
        ]
        found = jnp.einsum(how, *given, precision=precision(), preferred_element_type=self.wide)
        return found.reshape(found.shape[0], -1, *found.shape[3:]) if "g" in how.split("->")[1] else found

    def _grouped(self, x: Array) -> Array:
        return x.reshape(x.shape[0], self.key.shape[1], -1, *x.shape[2:])

    def scores(self) -> Array:
        """Return the scores before anything changes them."""
        query, key = self.query.astype(self.wide), self.key.astype(self.wide)
        return self.product("bhgqd,bhkd->bhgqk", query, key) * self.scale

    def each(self, graph: GraphModule, buffers: Sequence[Any], *arrays: Array) -> Any:
        """Run a graph for every score, given its place and what arrays hold there."""
        body = Body(self.evaluation, graph, ScoreGraph)

        def one(values: tuple[Array, ...], *place: Array) -> tuple[Any, Array]:
            return body(*values[:1], *place, *values[1:], *buffers)

        function: Callable[..., Any] = one
        for axis in (3, 2, 1, 0):
            function = jax.vmap(function, (0, *(0 if at == axis else None for at in range(4))))
        results, codes = function(arrays, *(jnp.arange(n, dtype=jnp.int32) for n in self.shape))
        body.check(codes)
        return results

    def allowed(self) -> Array:
        """Return where a query may attend to a key: in blocks of the mask, if its function says so or they are full."""
        _, _, count, columns, full_count, full_columns, *_, height, width, graph = self.block_mask
        inside = _blocks(self.shape, count, columns, height, width) & self.each(graph, self.mask_buffers)
        if full_count is None:
            return inside
        return inside | _blocks(self.shape, full_count, full_columns, height, width)

    def modified(self, scores: Array, graph: GraphModule, allowed: Array) -> Array:
        """Return the scores that the softmax sees."""
        changed = cast(self.each(graph, self.buffers, scores), self.wide)
        return jnp.where(allowed, changed, jnp.asarray(-jnp.inf, self.wide))


def _parts(how: str) -> list[str]:
    return how.split("->")[0].split(",")


def _blocks(shape: tuple[int, ...], count: Array, columns: Array, height: int, width: int) -> Array:
    """Return which scores are in listed blocks: the first ``count`` of ``columns`` in each row of blocks."""
    listed = jnp.arange(columns.shape[-1]) < count[..., None]
    known = jnp.arange(-(-shape[3] // width))
    found = ((columns[..., None] == known) & listed[..., None]).any(-2)
    rows, places = np.arange(shape[2]) // height, np.arange(shape[3]) // width
    return jnp.broadcast_to(found[..., rows, :][..., places], shape)


def _softmax(scores: Array) -> tuple[Array, Array, Array]:
    """Return probabilities, log-sum-exp and maximum of each row; a row of minus infinities gives zeros."""
    top = scores.max(-1, keepdims=True)
    finite = jnp.where(jnp.isneginf(top), jnp.zeros_like(top), top)
    powers = jnp.exp(scores - finite)
    total = powers.sum(-1, keepdims=True)
    chances = powers / jnp.where(total == 0, jnp.ones_like(total), total)
    return chances, (jnp.log(total) + finite).squeeze(-1), top.squeeze(-1)


def _call(
    evaluation: Evaluation,
    query: Array,
    key: Array,
    value: Array,
    block_mask: list[Any],
    scale: float,
    buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> Call:
    """Return a call whose keys and values are of every batch."""
    key, value = (jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in (key, value))
    return Call(evaluation, query, key, value, block_mask, scale, list(buffers), list(mask_buffers))


def forward(evaluation: Evaluation, node: Node, args: list[Any]) -> list[Array]:
    """Return what each query attends to, its log-sum-exp and its highest score."""
    query, key, value, graph, block_mask, scale, _, *buffers = args
    call = _call(evaluation, query, key, value, block_mask, scale, *buffers)
    chances, sums, top = _softmax(call.modified(call.scores(), graph, call.allowed()))
    out = call.product("bhgqk,bhkd->bhgqd", cast(chances, query.dtype), cast(call.value, query.dtype))
    return [cast(out, query.dtype), cast(sums / _LN2, jnp.float32), cast(top / _LN2, jnp.float32)]


def backward(evaluation: Evaluation, node: Node, args: list[Any]) -> list[Any]:
    """Return the gradients for query, key, value and what the function of the score captured."""
    query, key, value, out, _, grad_out, grad_sums, graph, joint_graph, block_mask, scale, _, *buffers = args
    call = _call(evaluation, query, key, value, block_mask, scale, *buffers)
    grad_out = jnp.zeros_like(out) if grad_out is None else grad_out
    scores, allowed = call.scores(), call.allowed()
    # The sums torch kept are float32 even for float64, so they are computed again.
    chances, _, _ = _softmax(call.modified(scores, graph, allowed))
    wide_grad = cast(grad_out, call.wide)
    grad_chances = call.product("bhgqd,bhkd->bhgqk", wide_grad, cast(call.value, call.wide))
    shared = (cast(out, call.wide) * wide_grad).sum(-1, keepdims=True)
    if grad_sums is not None:
        shared = shared - cast(grad_sums, call.wide)[..., None] / _LN2
    grad_modified = chances * (grad_chances - shared)
    grad_scores, *captured = call.each(joint_graph, call.buffers, scores, grad_modified)
    grad_scores = cast(jnp.where(allowed, grad_scores * scale, 0), query.dtype)
    grads = [
        call.product("bhgqk,bhkd->bhgqd", grad_scores, call.key),
        call.product("bhgqk,bhgqd->bhkd", grad_scores, query),
        call.product("bhgqk,bhgqd->bhkd", cast(chances, query.dtype), grad_out),
    ]
    found = [cast(_unbroadcast(g, x.shape), x.dtype) for g, x in zip(grads, (query, key, value), strict=True)]
    return [*found, _captured(node, captured[4:], call.buffers)]


def _unbroadcast(grad: Array, shape: tuple[int, ...]) -> Array:
    """Return the gradient for keys of one batch that every batch of queries read."""
    return grad.sum(0, keepdims=True) if shape[0] != grad.shape[0] else grad


def _captured(node: Node, grads: Sequence[Any], buffers: Sequence[Any]) -> list[Array | None]:
    """Return the gradients for captured tensors, summed over every score; None where torch wants none."""
    found: list[Array | None] = []
    for wanted, grad, buffer in zip(node.meta["val"][3], grads, buffers, strict=True):
        if wanted is None or grad is None:
            found.append(None)
            continue
        total = grad.total() if isinstance(grad, Scatter) else grad.sum((0, 1, 2, 3))
        found.append(cast(total, buffer.dtype))
    return found
