"""Ops that take graphs: torch's control flow becomes XLA's, a nested region is a part of the program around it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.fx import Node

from isthmus._dynamo import flex_attention, subgraphs
from isthmus._dynamo.evaluate import HIGHER_ORDER, OWN, Evaluation
from isthmus._dynamo.subgraphs import Body, strong
from isthmus._runtime.host_arrays import NUMBER_DTYPES
from isthmus.errors import Unsupported

Array = Any
_ops = torch.ops.higher_order


def cond(evaluation: Evaluation, node: Node, args: list[Any]) -> Any:
    """Run one of two branches; the conditions of the other one are not asked."""
    chosen, true_graph, false_graph, operands = args
    if isinstance(chosen, (bool, int)):  # sizes decide, and they are known
        return subgraphs.run(evaluation, true_graph if chosen else false_graph, operands)
    first, second = Body(evaluation, true_graph), Body(evaluation, false_graph)
    chosen = chosen.reshape(()).astype(bool)
    results, code = lax.cond(chosen, lambda: first.arrays(*operands), lambda: second.arrays(*operands))
    first.check(code, chosen)
    second.check(code, ~chosen)
    return results


def while_loop(evaluation: Evaluation, node: Node, args: list[Any]) -> Any:
    """Repeat a body for as long as a condition holds."""
    condition_graph, body_graph, carried, others = args
    if any(node.kwargs.values()):
        raise Unsupported("a loop that writes to its arguments")
    _refuse_numbers_read(node, carried)
    condition, body = Body(evaluation, condition_graph), Body(evaluation, body_graph)
    initial = [_array(value) for value in carried]

    def again(state: tuple[list[Array], Array]) -> Array:
        result, _ = condition(*state[0], *others)
        return jnp.asarray(result).reshape(()).astype(bool)

    def step(state: tuple[list[Array], Array]) -> tuple[list[Array], Array]:
        results, code = body(*state[0], *others)
        return _like(results, initial), jnp.where(state[1] >= 0, state[1], code)

    results, code = lax.while_loop(again, step, (initial, jnp.full((), -1, jnp.int32)))
    if condition.errors:
        raise Unsupported("an index that must be checked to decide whether a loop goes on")
    body.check(code)
    return results


def _refuse_numbers_read(node: Node, carried: Sequence[Any]) -> None:
    """Refuse a loop that carries Python numbers which are read afterwards: no program can return one."""
    numbers = {at for at, value in enumerate(carried) if not hasattr(value, "dtype")}
    for user in node.users:
        if user.target is not operator.getitem or (user.args[1] in numbers and user.users):
            raise Unsupported("a number that a loop computes")


def _array(value: Any) -> Array:
    if type(value) in NUMBER_DTYPES:
        return jnp.asarray(np.asarray(value, NUMBER_DTYPES[type(value)]))
    return strong(value)


def _like(results: Sequence[Any], initial: Sequence[Array]) -> list[Array]:
    """Return what a loop carries on, in the dtypes it started with."""
    return [_carry(result, start) for result, start in zip(results, initial, strict=True)]


def _carry(result: Any, start: Array) -> Array:
    array = jnp.asarray(result)
    if array.shape != start.shape:
        raise Unsupported(f"a loop that carries {start.shape} on as {array.shape}")
    return lax.convert_element_type(array, start.dtype)


def scan(evaluation: Evaluation, node: Node, args: list[Any]) -> Any:
    """Run a body along the first dim, carrying values on: the last ones, then what each step gave."""
    graph, init, xs, others = args
    body = Body(evaluation, graph)
    initial = [strong(value) for value in init]

    def step(carried: list[Array], slices: list[Array]) -> tuple[list[Array], Any]:
        results, code = body.arrays(*carried, *slices, *others)
        return _like(results[: len(initial)], initial), (results[len(initial) :], code)

    carried, (stacked, codes) = lax.scan(step, initial, list(xs))
    body.check(codes)
    return [*carried, *stacked]


def map_(evaluation: Evaluation, node: Node, args: list[Any]) -> Any:
    """Run a body for each position of the first dim."""
    graph, xs, others = args
    body = Body(evaluation, graph)
    results, codes = lax.map(lambda slices: body.arrays(*slices, *others), list(xs))
    body.check(codes)
    return results


def associative_scan(evaluation: Evaluation, node: Node, args: list[Any]) -> Any:
    """Combine along the first dim, in an order of XLA's choice."""
    graph, xs, others = args
    body = Body(evaluation, graph)

    def combine(left: list[Array], right: list[Array]) -> list[Array]:
        results, codes = jax.vmap(lambda a, b: body.arrays(*a, *b, *others))(left, right)
        body.check(codes)
        return _like(results, left)

    return lax.associative_scan(combine, [strong(x) for x in xs])


def invoke_subgraph(evaluation: Evaluation, node: Node, args: list[Any]) -> Any:
    """Run a nested region in place."""
    graph, _, *operands = args
    return subgraphs.run(evaluation, graph, operands)


def _with_effects(run: Evaluation, node: Node, args: list[Any]) -> Any:
    """Run an op torch keeps in its place by a token, which a program has no use for: its conditions are results."""
    token, op, *rest = args
    if op not in OWN:
        raise Unsupported(f"the effect of {op}")
    return token, OWN[op](run, node, *rest, **run.look_up(node.kwargs))


HIGHER_ORDER.update(
    {
        _ops.cond: cond,
        _ops.while_loop: while_loop,
        _ops.scan: scan,
        _ops.map_impl: map_,
        _ops.associative_scan: associative_scan,
        _ops.invoke_subgraph: invoke_subgraph,
        _ops.flex_attention: flex_attention.forward,
        _ops.flex_attention_backward: flex_attention.backward,
        _ops.with_effects: _with_effects,
    }
)
