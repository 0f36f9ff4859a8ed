"""``flex_attention`` as dense attention: every score is computed, and masked where torch's kernels would skip it.

The functions of one score that a user wrote are ``Graph``s of scalars, mapped over all scores: the score, its batch,
head, query and key, in the gradient's graph the gradient of the changed score, then captured tensors.
``_dynamo/flex_attention.py`` converts them, in the dtype that scores have here, which is wider than the query's.

A graph calls ``flex_attention`` and ``flex_attention_backward`` as it calls an op. What torch's kernels skip is
masked::

    scores = query @ key.T * scale                 [batch, heads, queries, keys]
    scores = score_mod(score, b, h, q, k)          of every score, by ``vmap`` (``Attention.each``)
    scores = where(allowed, scores, -inf)          mask_mod in partial blocks, and all of the full ones

What can go wrong: the memory is that of all scores, which torch's kernels never hold at once; value checks inside the
user's functions come out of the ``vmap`` as codes, which ``Body.check`` requires outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from isthmus._graph.arguments import AnyFunction, Value
from isthmus._graph.graph import Graph
from isthmus._ops.common import DType, accumulation_dtype, cast
from isthmus._ops.linalg.matmul import precision
from isthmus._ops.nn.attention import softmax_with_sums
from isthmus._program.control_flow import Body, Operand

Array = jax.Array
_LN2 = math.log(2)  # torch keeps sums and maxima as logarithms to the base of two


@dataclass(frozen=True)
class Scatter:
    """Gradients on their way to places of a captured tensor of this size.

    A part is the values and, for each of the first dims, their indices: nodes while a graph of one score is converted,
    then the numbers of its outputs, then arrays. Summed up over all scores they are one scatter, where a sum of
    gradients as large as the captured tensor, one for each score, would not fit into memory.
    """

    size: tuple[int, ...]
    parts: tuple[tuple[Value, tuple[Value, ...]], ...]

    def map(self, function: Callable[[Value], Value]) -> Scatter:
        """Return the scatter with the function's result for everything in its parts."""
        parts = [(function(values), tuple(map(function, indices))) for values, indices in self.parts]
        return Scatter(self.size, tuple(parts))


def aligned(values: Array, indices: list[Array], size: tuple[int, ...]) -> list[Array]:
    """Return values and indices broadcast against each other, for a scatter into a tensor of this size."""
    indices = jnp.broadcast_arrays(*indices)
    return [jnp.broadcast_to(values, (*indices[0].shape, *size[len(indices) :])), *indices]


def scattered(size: Sequence[int], *parts: list[Array]) -> Array:
    """Return the sum of all values at their places; a part is the values, then their indices."""
    total = jnp.zeros(tuple(size), parts[0][0].dtype)
    for values, *indices in parts:
        total = total.at[tuple(indices)].add(values)
    return total


@dataclass(frozen=True)
class Attention:
    """What forward and backward share: heads of queries in groups by the head of keys they read, and the mask."""

    query: Array
    key: Array
    value: Array
    block_mask: list[Value]
    scale: float
    buffers: list[Operand]
    mask_buffers: list[Operand]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scores: batch, heads, queries, keys."""
        return (*self.query.shape[:3], self.key.shape[2])

    @property
    def wide(self) -> DType:
        """The dtype of the scores."""
        return accumulation_dtype(self.query.dtype)

    def product(self, how: str, *operands: Array) -> Array:
        """Contract, accumulating wide; queries and scores have their heads in groups, as ``bhg``."""
        # "g" in a part of the formula means that this operand has its heads in groups.
        parts = how.split("->")[0].split(",")
        grouped = [self._grouped(x) if "g" in part else x for x, part in zip(operands, parts, strict=True)]
        out = jnp.einsum(how, *grouped, precision=precision(), preferred_element_type=self.wide)
        return out.reshape(out.shape[0], -1, *out.shape[3:]) if "g" in how.split("->")[1] else out

    def _grouped(self, x: Array) -> Array:
        return x.reshape(x.shape[0], self.key.shape[1], -1, *x.shape[2:])

    def scores(self) -> Array:
        """Return the scores before anything changes them."""
        query, key = self.query.astype(self.wide), self.key.astype(self.wide)
        return self.product("bhgqd,bhkd->bhgqk", query, key) * self.scale

    def each(self, graph: Graph, buffers: Sequence[Operand], *arrays: Array) -> list[Array]:
        """Run a graph for every score, given its place and the elements of ``arrays`` there."""
        body = Body(graph)

        def one(values: tuple[Array, ...], *place: Array) -> tuple[list[Array], Array]:
            return body(*values[:1], *place, *values[1:], *buffers)

        # From the innermost axis outwards, so that ``one`` sees a single score and its four indices.
        function: AnyFunction = one
        for axis in (3, 2, 1, 0):
            function = jax.vmap(function, (0, *(0 if at == axis else None for at in range(4))))
        results, codes = function(arrays, *(jnp.arange(n, dtype=jnp.int32) for n in self.shape))
        body.check(codes)
        flat: list[Array] = results
        return flat

    def allowed(self) -> Array:
        """Return where a query may attend to a key: in blocks of the mask, if its function says so or they are full."""
        _, _, count, columns, full_count, full_columns, *_, height, width, graph = self.block_mask
        (inside,) = self.each(graph, self.mask_buffers)
        inside = _blocks(self.shape, count, columns, height, width) & inside
        # Without full blocks torch passes None for their count and columns.
        if full_count is None:
            return inside
        return inside | _blocks(self.shape, full_count, full_columns, height, width)

    def modified(self, scores: Array, graph: Graph, allowed: Array) -> Array:
        """Return the scores that the softmax sees."""
        (changed,) = self.each(graph, self.buffers, scores)
        return jnp.where(allowed, cast(changed, self.wide), jnp.asarray(-jnp.inf, self.wide))


def _blocks(shape: tuple[int, ...], count: Array, columns: Array, height: int, width: int) -> Array:
    """Return which scores are in listed blocks: the first ``count`` of ``columns`` in each row of blocks."""
    # Rows are as long as the longest; only the first ``count`` columns of each are meant.
    listed = jnp.arange(columns.shape[-1]) < count[..., None]
    known = jnp.arange(-(-shape[3] // width))
    covered = ((columns[..., None] == known) & listed[..., None]).any(-2)
    rows, places = np.arange(shape[2]) // height, np.arange(shape[3]) // width
    return jnp.broadcast_to(covered[..., rows, :][..., places], shape)


def _attention(query: Array, key: Array, value: Array, *rest: Value) -> Attention:
    """Return a call whose keys and values are of every batch."""
    # torch broadcasts keys of one batch; the backward formula sums over it again (``_unbroadcast``).
    key, value = (jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in (key, value))
    return Attention(query, key, value, *rest)


def flex_attention(
    query: Array,
    key: Array,
    value: Array,
    graph: Graph,
    block_mask: list[Value],
    scale: float,
    buffers: list[Operand],
    mask_buffers: list[Operand],
) -> list[Array]:
    """Return the attention of each query, its log-sum-exp and its highest score."""
    call = _attention(query, key, value, block_mask, scale, buffers, mask_buffers)
    chances, sums, top = softmax_with_sums(call.modified(call.scores(), graph, call.allowed()))
    out = call.product("bhgqk,bhkd->bhgqd", cast(chances, query.dtype), cast(call.value, query.dtype))
    return [cast(out, query.dtype), cast(sums / _LN2, jnp.float32), cast(top / _LN2, jnp.float32)]


def flex_attention_backward(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    grad_out: Array | None,
    grad_sums: Array | None,
    graph: Graph,
    joint: Graph,
    captured: list[int | Scatter | None],
    block_mask: list[Value],
    scale: float,
    buffers: list[Operand],
    mask_buffers: list[Operand],
) -> list[Array | None]:
    """Return the gradients for query, key, value and each captured tensor.

    ``joint`` returns the gradient of a score first; ``captured`` says which of its outputs are for captured tensors.
    """
    call = _attention(query, key, value, block_mask, scale, buffers, mask_buffers)
    # None where nothing but the log-sum-exp was differentiated.
    grad_out = jnp.zeros_like(out) if grad_out is None else grad_out
    scores, allowed = call.scores(), call.allowed()
    # The sums torch kept are float32 even for float64, so they are computed again.
    chances, _, _ = softmax_with_sums(call.modified(scores, graph, allowed))
    wide_grad = cast(grad_out, call.wide)
    grad_chances = call.product("bhgqd,bhkd->bhgqk", wide_grad, cast(call.value, call.wide))
    shared = (cast(out, call.wide) * wide_grad).sum(-1, keepdims=True)
    # torch's log-sum-exp is to the base of two; its gradient has the factor with it.
    if grad_sums is not None:
        shared = shared - cast(grad_sums, call.wide)[..., None] / _LN2
    grad_modified = chances * (grad_chances - shared)
    joint_results = call.each(joint, call.buffers, scores, grad_modified)
    grad_scores = cast(jnp.where(allowed, joint_results[0] * scale, 0), query.dtype)
    grads = [
        call.product("bhgqk,bhkd->bhgqd", grad_scores, call.key),
        call.product("bhgqk,bhgqd->bhkd", grad_scores, query),
        call.product("bhgqk,bhgqd->bhkd", cast(chances, query.dtype), grad_out),
    ]
    return [
        *[cast(_unbroadcast(g, x.shape), x.dtype) for g, x in zip(grads, (query, key, value), strict=True)],
        *[_summed(which, joint_results, buffer) for which, buffer in zip(captured, buffers, strict=True)],
    ]


def _unbroadcast(grad: Array, shape: tuple[int, ...]) -> Array:
    """Return the gradient for keys of one batch that every batch of queries read."""
    return grad.sum(0, keepdims=True) if shape[0] != grad.shape[0] else grad


def _summed(which: int | Scatter | None, joint_results: list[Array], buffer: Value) -> Array | None:
    """Return the gradient for a captured tensor, summed over every score; None where torch wants none."""
    if which is None:
        return None
    if isinstance(which, Scatter):
        arrays = which.map(lambda at: joint_results[at])
        return cast(scattered(which.size, *[[v, *i] for v, i in arrays.parts]), buffer.dtype)
    return cast(joint_results[which].sum((0, 1, 2, 3)), buffer.dtype)
