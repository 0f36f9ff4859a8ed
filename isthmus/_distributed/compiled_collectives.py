"""Functional collectives inside compiled graphs: the whole graph becomes ONE XLA program over the processes of a group.

DTensor, FSDP2 and ``torch.distributed._functional_collectives`` leave ops such as ``_c10d_functional.all_reduce`` in
the graphs of ``torch.compile``. Eagerly these ask the group; here they have rules for compiled graphs alone, so that
XLA sees and schedules them with the rest::

    torch.compile(f, backend="isthmus", fullgraph=True)(x)
        graph:    h = relu(x);  s = _c10d_functional.all_reduce(h, "sum", "0");  wait_tensor(s) + h
        program:  shard_map(graph) over the mesh of group "0", local arrays in and out as shards

A graph without collectives stays a program of one process. All collectives of a program are over the same ranks; one
over other ranks is left out of the program (``clusters.py`` cuts there) and asks its group.

``install`` is called when a group is made. ``_program/program.py`` asks ``across`` for each graph it compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isthmus._device.torch_glue.private import group_named
from isthmus._distributed import agreement, collectives
from isthmus._distributed.collectives import AXIS
from isthmus._distributed.rank_group import RankGroup
from isthmus._graph.graph import Graph
from isthmus._graph.nodes import Call
from isthmus._program import program
from isthmus._program.evaluate import RULES, CallFailure
from isthmus._runtime import compiler
from isthmus.errors import Unsupported

Array = jax.Array
_c10d = torch.ops._c10d_functional


def install() -> None:
    """Let compiled graphs hold collectives; a second call does nothing."""
    RULES.update(_RULES)
    program.across = across


def _group_of(call: Call) -> RankGroup:
    """Return the group of a collective in a graph."""
    name = dict(call.arguments)["group_name"]
    group = group_named(name) if isinstance(name, str) else name
    if not isinstance(group, RankGroup):
        raise Unsupported(f"{call.op} over {group!r}, which is no group of 'jax' tensors")
    return group


def across(graph: Graph) -> Spread | None:
    """Return what runs a graph over the processes of its collectives' group; None where it has no collectives."""
    group: RankGroup | None = None
    count = 0
    for node in graph.nodes:
        if not isinstance(node.call, Call) or node.call.op not in _RULES or node.call.op is _WAIT:
            continue
        count += 1
        try:
            here = _group_of(node.call)
            if group is not None and here.mesh.ranks != group.mesh.ranks:
                raise Unsupported(
                    f"a collective over other ranks than those of the program, {group.mesh.ranks}"
                )
        except Unsupported as error:
            raise CallFailure(node, error) from error
        group = group or here
    return None if group is None else Spread(group, count)


class Spread:
    """Compiles a function of local arrays for the processes of a group, and runs it there."""

    def __init__(self, group: RankGroup, count: int) -> None:
        self.group, self.mesh = group, group.mesh
        self.line = f"a compiled program with {count} collectives"
        # An array without dims has no dim to split: each process has its own value, whatever the sharding says.
        self._shardings = (NamedSharding(self.mesh.mesh, P()), self.mesh.split)

    def build(
        self,
        function: Callable[..., Any],
        examples: Sequence[Any],
        donate: tuple[int, ...],
        options: Any,
        title: str,
    ) -> compiler.Executable:
        """Do what ``compiler.build`` does, for all processes."""
        inputs = jax.tree.map(self._example, list(examples))
        in_specs = tuple(jax.tree.map(_spec, list(examples)))
        shapes: Any = None

        def traced(*arrays: Any) -> Array:
            nonlocal shapes
            shapes = jax.tree.map(compiler.abstract, function(*arrays))
            return jnp.zeros(())

        # Specs of results are needed before the function is traced for good, so it is traced once for their shapes.
        with compiler.scoped_x64():
            whole = jax.shard_map(
                traced, mesh=self.mesh.mesh, in_specs=in_specs, out_specs=P(), check_vma=False
            )
            jax.eval_shape(whole, *inputs)
        spread = jax.shard_map(
            function,
            mesh=self.mesh.mesh,
            in_specs=in_specs,
            out_specs=jax.tree.map(_spec, shapes),
            check_vma=False,
        )
        devices = tuple(self.mesh.mesh.devices.flat)
        built = compiler.build(spread, inputs, donate, options, title, devices=devices)
        return replace(built, call=self._caller(built.call), shardings=None)  # local arrays come out

    def _caller(self, call: Callable[..., Any]) -> Callable[..., Any]:
        group, mesh = self.group, self.mesh

        def run(*inputs: Any) -> Any:
            if not mesh.waits:
                return jax.tree.map(_leave, call(*jax.tree.map(self._enter, inputs)))
            with collectives.lock:
                if len(mesh) > 1:
                    agreement.agree(group._cpu, group.rank(), mesh.ranks, self.line, None)
                outputs = jax.tree.map(_leave, call(*jax.tree.map(self._enter, inputs)))
                return jax.block_until_ready(outputs)

        return run

    def _example(self, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self._size(x), x.dtype, sharding=self._shardings[len(x.shape) > 0])

    def _size(self, x: Any) -> tuple[int, ...]:
        return (x.shape[0] * len(self.mesh), *x.shape[1:]) if len(x.shape) else ()

    def _enter(self, x: Any) -> Array:
        if not isinstance(x, jax.Array):
            with compiler.scoped_x64():
                x = jax.device_put(x, compiler.default_device())
        return jax.make_array_from_single_device_arrays(self._size(x), self._shardings[x.ndim > 0], [x])


def _leave(x: Array) -> Array:
    return x.addressable_data(0)


def _spec(x: Any) -> P:
    return P(AXIS) if len(x.shape) else P()


# ---- rules: what a call of a graph computes, inside of ``shard_map``


def _size(call: Call) -> int:
    return _group_of(call).size()


def _all_reduce(call: Call, input: Array, reduce_op: str, group_name: Any) -> Array:
    return collectives.reduced(_kind(reduce_op), _size(call))(input)


def _all_reduce_coalesced(call: Call, inputs: list[Array], reduce_op: str, group_name: Any) -> list[Array]:
    return [collectives.reduced(_kind(reduce_op), _size(call))(x) for x in inputs]


def _all_gather(call: Call, input: Array, group_size: int, group_name: Any) -> Array:
    rows = input.reshape(1) if input.ndim == 0 else input
    stacked = collectives.gathered(rows)
    return stacked.reshape(stacked.shape[0] * stacked.shape[1], *stacked.shape[2:])


def _all_gather_coalesced(call: Call, inputs: list[Array], group_size: int, group_name: Any) -> list[Array]:
    return [_all_gather(call, x, group_size, group_name) for x in inputs]


def _reduce_scatter(call: Call, input: Array, reduce_op: str, group_size: int, group_name: Any) -> Array:
    return collectives.reduce_scattered(_kind(reduce_op), _size(call))(input)


def _reduce_scatter_coalesced(
    call: Call, inputs: list[Array], reduce_op: str, group_size: int, group_name: Any
) -> list[Array]:
    return [_reduce_scatter(call, x, reduce_op, group_size, group_name) for x in inputs]


def _all_to_all(
    call: Call, input: Array, output_split_sizes: Any, input_split_sizes: Any, group_name: Any
) -> Array:
    if len({*output_split_sizes, *input_split_sizes}) > 1:
        raise Unsupported("all_to_all of parts of different sizes")
    return collectives.exchanged(input)


def _broadcast(call: Call, input: Array, src: int, group_name: Any) -> Array:
    return collectives.from_rank(src)(input)


def _shard_dim_all_to_all(
    call: Call, input: Array, gather_dim: int, shard_dim: int, group_name: Any
) -> Array:
    if input.shape[shard_dim] % _size(call) or input.dtype == bool:
        raise Unsupported("all_to_all of parts of different sizes")
    return lax.all_to_all(input, AXIS, shard_dim, gather_dim, tiled=True)


def _wait(call: Call, tensor: Array) -> Array:
    return tensor


def _kind(reduce_op: str) -> str:
    kind = reduce_op.lower()
    if kind not in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor"):
        raise Unsupported(f"a reduction {reduce_op!r}")
    return kind


_WAIT = _c10d.wait_tensor.default
_RULES: dict[Any, Callable[..., Any]] = {
    _c10d.all_reduce.default: _all_reduce,
    _c10d.all_reduce_coalesced.default: _all_reduce_coalesced,
    _c10d.all_gather_into_tensor.default: _all_gather,
    _c10d.all_gather_into_tensor_coalesced.default: _all_gather_coalesced,
    _c10d.reduce_scatter_tensor.default: _reduce_scatter,
    _c10d.reduce_scatter_tensor_coalesced.default: _reduce_scatter_coalesced,
    _c10d.all_to_all_single.default: _all_to_all,
    _c10d.broadcast.default: _broadcast,
    _WAIT: _wait,
}
if hasattr(torch.ops._dtensor, "shard_dim_alltoall"):
    _RULES[torch.ops._dtensor.shard_dim_alltoall.default] = _shard_dim_all_to_all
