"""Collectives as XLA programs over the devices of a group, one device per process.

A process passes its local array as its shard of a global one (no copy), runs the same program as every other process
of the group, and takes its shard of each result::

    launch, _ = RankMesh([0, 1]).prepare("all_reduce", ("sum",), each(reduced("sum", 2)), [array])
    (total,) = launch()         # when both processes have come here

The bodies below are functions of local arrays inside ``jax.shard_map`` over the axis ``AXIS``; ``group.py`` runs them
one by one, and ``compiled_collectives.py`` runs them inside the program of a whole compiled graph.

What can go wrong: a process that runs another program, or the same ones in another order, leaves the others waiting.
XLA's CPU collectives give up after seconds and match by order alone, so on the CPU a group first makes sure that all
ranks are there and want the same (``agreement.py``), and ``run`` waits for each result before it returns.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isthmus._caches import LruCache
from isthmus._runtime import compiler

Array = jax.Array
Body = Callable[..., list[Array]]
AXIS = "ranks"
# How many programs a group keeps: shapes that change from step to step must not pile up.
_PROGRAMS = 512
# Programs of two threads (autograd's launches the buckets of DDP) must be launched in the same order on all ranks.
lock = threading.RLock()


class RankMesh:
    """The devices of a group's ranks as a mesh of one axis, and the programs that were compiled for it."""

    def __init__(self, ranks: Sequence[int]) -> None:
        first: dict[int, jax.Device] = {}
        for device in jax.devices():
            first.setdefault(
                device.process_index, device
            )  # the one that ``compiler.default_device`` is there
        self.ranks = tuple(ranks)
        self.mesh = Mesh(np.array([first[rank] for rank in ranks]), (AXIS,))
        self.split = NamedSharding(self.mesh, P(AXIS))
        self.waits = compiler.platform() == "cpu"
        self._programs: LruCache[Any, Callable[..., Any]] = LruCache("collectives", _PROGRAMS)

    def __len__(self) -> int:
        return len(self.ranks)

    def prepare(
        self, name: str, details: tuple[Any, ...], body: Body, arrays: Sequence[Array]
    ) -> tuple[Callable[[], list[Array]], bool]:
        """Compile a collective for local arrays of these shapes; return how to run it, and whether it was compiled now.

        Compiling is separate from running, since its time differs between ranks and nobody should wait in XLA for it.
        """
        with compiler.scoped_x64():
            local = [array.reshape(1) if array.ndim == 0 else array for array in arrays]
            inputs = [self._global(array) for array in local]
        key = (name, details, tuple((array.shape, array.dtype) for array in local))
        call = self._programs.get(key)
        compiled = call is None
        if call is None:
            spread = jax.shard_map(body, mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
            call = self._programs[key] = compiler.build(
                spread, inputs, devices=tuple(self.mesh.devices.flat)
            ).call
        return functools.partial(self._launch, call, inputs), compiled

    def _global(self, array: Array) -> Array:
        shape = (len(self) * array.shape[0], *array.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.split, [array])

    def _launch(self, call: Callable[..., Any], inputs: list[Array]) -> list[Array]:
        outputs = [output.addressable_data(0) for output in call(*inputs)]
        if self.waits:
            # XLA's CPU client orders programs per thread only, and its collectives match by order.
            jax.block_until_ready(outputs)
        return outputs


def each(one: Callable[[Array], Array]) -> Body:
    """Return a body that applies ``one`` to every array."""
    return lambda *arrays: [jnp.atleast_1d(one(array)) for array in arrays]


# ---- what one array becomes, inside of ``shard_map``


def reduced(kind: str, count: int, factor: Any = None) -> Callable[[Array], Array]:
    """Return the function that reduces an array over ``count`` ranks; ``kind`` is torch's name in lower case."""

    def reduce(x: Array) -> Array:
        if x.dtype == bool:
            return _reduced_bool(x, kind, count)
        if kind in ("sum", "avg", "premul_sum"):
            x = x * jnp.asarray(factor).astype(x.dtype) if kind == "premul_sum" else x
            return _mean(_sum(x), count) if kind == "avg" else _sum(x)
        if kind in ("max", "min"):
            return lax.pmax(x, AXIS) if kind == "max" else lax.pmin(x, AXIS)
        return _fold(gathered(x), kind)

    return reduce


def _sum(x: Array) -> Array:
    if jnp.iscomplexobj(x):
        return lax.complex(lax.psum(x.real, AXIS), lax.psum(x.imag, AXIS))
    return lax.psum(x, AXIS)


def _mean(total: Array, count: int) -> Array:
    if jnp.issubdtype(total.dtype, jnp.integer):
        return lax.div(total, jnp.asarray(count, total.dtype))  # NCCL's average of integers is cut off too
    return (total / count).astype(total.dtype)


_ANY, _ALL = ("sum", "max", "bor"), ("product", "min", "band")


def _reduced_bool(x: Array, kind: str, count: int) -> Array:
    """Return a reduction of bools: as NCCL has it, a sum is an "or" and a product an "and"."""
    counted = lax.psum(x.astype(jnp.int32), AXIS)
    if kind in _ANY:
        return counted > 0
    if kind in _ALL:
        return counted == count
    if kind == "bxor":
        return counted % 2 == 1
    raise TypeError(f"no reduction {kind!r} of bools")


_FOLDS = {
    "product": jnp.multiply,
    "band": jnp.bitwise_and,
    "bor": jnp.bitwise_or,
    "bxor": jnp.bitwise_xor,
    "sum": jnp.add,
    "avg": jnp.add,
    "premul_sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
}


def _fold(stacked: Array, kind: str) -> Array:
    return functools.reduce(_FOLDS[kind], [stacked[n] for n in range(stacked.shape[0])])


def gathered(x: Array) -> Array:
    """Return the arrays of all ranks, stacked."""
    return _moved(lambda bits: lax.all_gather(bits, AXIS), x)


def from_rank(root: int) -> Callable[[Array], Array]:
    """Return the function that gives every rank the array of one."""

    def broadcast(x: Array) -> Array:
        # A sum in which all but one are zero. The bits are added as integers, which keeps NaNs and the sign of zero.
        return _moved(lambda bits: lax.psum(bits * (lax.axis_index(AXIS) == root), AXIS), x, as_integers=True)

    return broadcast


def exchanged(x: Array) -> Array:
    """Return the parts of dim 0 that all ranks have for this one, in the order of the ranks."""
    return _moved(lambda bits: lax.all_to_all(bits, AXIS, 0, 0, tiled=True), x)


def reduce_scattered(kind: str, count: int, factor: Any = None) -> Callable[[Array], Array]:
    """Return the function that reduces over the ranks and keeps this rank's part of dim 0."""

    def reduce_scatter(x: Array) -> Array:
        plain = x.dtype != bool and not jnp.iscomplexobj(x)
        if plain and kind in ("sum", "avg", "premul_sum"):
            x = x * jnp.asarray(factor).astype(x.dtype) if kind == "premul_sum" else x
            part = lax.psum_scatter(x, AXIS, tiled=True)
            return _mean(part, count) if kind == "avg" else part
        if x.dtype == bool:
            whole = _reduced_bool(x, kind, count)
            size = x.shape[0] // count
            return lax.dynamic_slice_in_dim(whole, lax.axis_index(AXIS) * size, size)
        parts = exchanged(x).reshape(count, x.shape[0] // count, *x.shape[1:])
        return _mean(_fold(parts, kind), count) if kind == "avg" else _fold(parts, kind)

    return reduce_scatter


_INTEGERS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def _moved(move: Callable[[Array], Array], x: Array, as_integers: bool = False) -> Array:
    """Apply ``move``, which moves whole elements, to ``x`` as a dtype that XLA's collectives have everywhere."""
    if jnp.iscomplexobj(x):
        return lax.complex(_moved(move, x.real, as_integers), _moved(move, x.imag, as_integers))
    if x.dtype == bool:
        return move(x.astype(jnp.uint8)).astype(bool)
    # XLA's CPU collectives know no 8-bit floats; half types they would widen.
    if (as_integers or x.dtype.itemsize < 4) and not jnp.issubdtype(x.dtype, jnp.integer):
        bits = lax.bitcast_convert_type(x, _INTEGERS[x.dtype.itemsize])
        return lax.bitcast_convert_type(move(bits), x.dtype)
    return move(x)


def padded_size(size: int) -> int:
    """Return the next power of two, so that sizes that vary a little share a program."""
    return 1 << max(0, math.ceil(math.log2(max(1, size))))
