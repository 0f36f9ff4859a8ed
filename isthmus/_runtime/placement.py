"""Where arrays live: on one device, or on all devices of a mesh, replicated or split.

A process has one *home*: one device, or, once a mesh is set, every device of the mesh with a whole copy on each. Arrays
that nothing has split are at home. A ``Signature`` says how its array lies by ``sharding``: None at home, else a
``jax.sharding.NamedSharding``; so on one device every key in the package is what it was without meshes, and with one a
key tells apart programs for arrays that are split differently, in all modes::

    placement.set_mesh(Mesh(devices, ("dp",)))
    split = placement.put(np.arange(8), NamedSharding(mesh, P("dp")))
    placement.sharding_of(split)            # the one NamedSharding object that splits dim 0 over "dp"
    placement.sharding_of(home_array)       # None

XLA inserts the collectives. What this package decides is where programs' inputs lie (``compiler.build``), that what is
written keeps the sharding of its storage (``constrain``), and which sharding results have: the executable's.

``NamedSharding``s are compared by identity in keys, so ``canonical`` interns them: trailing Nones, axes of size 1 and
one-tuples make no difference. ``OPEN`` stands for "whatever XLA chooses", for results that are recorded and not
computed yet (lazy mode).

What can go wrong: ``jax.device_put`` outside of 64-bit scope turns int64 into int32 behind an int64 tensor, so host
arrays go through ``put``. Across processes each fills its own devices from the same values; ``note`` keeps a checksum
of what tensors bring, and ``verify`` compares it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isthmus import _caches
from isthmus.errors import IsthmusError

Array = jax.Array
Sharding = NamedSharding | None


class _Open:
    """The sharding of what is not computed yet: XLA chooses it."""

    def __repr__(self) -> str:
        return "open"


OPEN = _Open()
home: NamedSharding | None = None
"""The sharding of arrays that nothing has split; None while the process uses one device."""
_known: dict[Any, Sharding] = {}
# Not cleared: buffers hold these objects and are compared by them. A mesh has few shardings.
_caches.register("shardings of the mesh", None, lambda: len(_known), lambda: None)


@dataclass
class _Noted:
    """A checksum of all host arrays that processes must agree on, and how many there were."""

    checksum: int = 0
    arrays: int = 0


_noted = _Noted()


def set_mesh(mesh: Mesh | None) -> None:
    """Make a mesh the home of all arrays, or one device again; arrays that exist stay where they are."""
    global home
    home = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    # Shardings name the devices of a mesh, so those of another one are of no use.
    _known.clear()
    _mover.cache_clear()


def devices() -> tuple[jax.Device, ...]:
    """Return the devices of the mesh in its order; none where the process uses one device."""
    return () if home is None else tuple(home.mesh.devices.flat)


def canonical(sharding: Any, ndim: int) -> Sharding:
    """Return the one object for all shardings that split arrays of ``ndim`` dims alike; None for home."""
    # By the number of dims too: a sharding that is no ``NamedSharding`` is matched for arrays of one rank (``_named``).
    key = (sharding, ndim)
    if key in _known:
        return _known[key]
    if home is None or sharding is None or sharding.is_fully_replicated:
        interned = None
    else:
        named = sharding if isinstance(sharding, NamedSharding) else _named(sharding, ndim)
        tidy = NamedSharding(named.mesh, PartitionSpec(*_tidy(named)))
        interned = _known.setdefault((tidy, ndim), tidy)
    _known[key] = interned
    return interned


def _tidy(sharding: NamedSharding) -> list[Any]:
    """Return the parts of a spec without axes of size 1, one-tuples and trailing Nones."""
    sizes = dict(sharding.mesh.shape)
    parts: list[Any] = []
    for part in sharding.spec:
        axes = [axis for axis in (part if isinstance(part, tuple) else (part,)) if axis and sizes[axis] > 1]
        parts.append(None if not axes else axes[0] if len(axes) == 1 else tuple(axes))
    # A trailing None means what is meant without it.
    while parts and parts[-1] is None:
        parts.pop()
    return parts


def _named(sharding: Any, ndim: int) -> NamedSharding:
    """Return a sharding of another kind by the axes of the mesh, tried one after another."""
    assert home is not None
    sizes = dict(home.mesh.shape)
    # Every dim is as long as there are devices, so that any axes of the mesh divide it evenly.
    shape = tuple([int(np.prod(list(sizes.values()), dtype=int))] * ndim)
    # What each device holds of such an array tells two shardings apart, whatever they are called.
    want = sharding.devices_indices_map(shape)
    for spec in _specs(list(sizes), ndim):
        candidate = NamedSharding(home.mesh, PartitionSpec(*spec))
        if candidate.devices_indices_map(shape) == want:
            return candidate
    raise IsthmusError(f"an array is laid out as no axes of the mesh {sizes} can say: {sharding}")


# All ways to give axes to dims, in the order of the axes: meshes have two or three.
def _specs(axes: list[str], ndim: int) -> list[list[Any]]:
    specs: list[list[Any]] = [[None] * ndim]
    for axis in axes:
        longer = []
        for spec in specs:
            longer.append(spec)
            for dim in range(ndim):
                before = spec[dim] if isinstance(spec[dim], tuple) else (spec[dim],) if spec[dim] else ()
                longer.append([*spec[:dim], (*before, axis), *spec[dim + 1 :]])
        specs = longer
    return specs


def sharding_of(value: Any) -> Sharding:
    """Return how an array is split; None at home, and for tracers, which have no place."""
    # A tracer has a place only once its program runs.
    if home is None or isinstance(value, jax.core.Tracer):
        return None
    return canonical(value.sharding, len(value.shape)) if isinstance(value, jax.Array) else None


def example(shape: tuple[int, ...], dtype: Any, sharding: Sharding = None) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding that a program is compiled for in the place of an array."""
    if home is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or home)


def constrain(value: Array, sharding: Sharding) -> Array:
    """Return a value of a program being traced, split as said; None is home. On one device nothing happens."""
    return value if home is None else jax.lax.with_sharding_constraint(value, sharding or home)


def results_of(compiled: jax.stages.Compiled) -> tuple[Sharding, ...] | None:
    """Return how XLA splits each result of a program; None on one device, where all are at home."""
    if home is None:
        return None
    shardings = jax.tree.leaves(compiled.output_shardings)
    ndims = [len(info.shape) for info in jax.tree.leaves(compiled.out_info)]
    return tuple([canonical(sharding, ndim) for sharding, ndim in zip(shardings, ndims, strict=True)])


def put(array: np.ndarray[Any, Any], sharding: Sharding = None) -> Array:
    """Return a host array, of which every process has all, on the devices of the mesh; 64-bit types must be on."""
    place = sharding or home
    assert place is not None
    # One process cannot put parts on another's devices, but each can fill its own.
    # ``device_put`` needs all devices in this process; the callback fills those that are here.
    if place.is_fully_addressable:
        return jax.device_put(array, place)
    return jax.make_array_from_callback(array.shape, place, lambda at: array[at])


def note(array: np.ndarray[Any, Any]) -> None:
    """Add an array of a tensor that is about to be put to the checksum, if there are other processes."""
    if home is not None and not home.is_fully_addressable:
        flat = np.ascontiguousarray(array).reshape(-1)
        _noted.checksum = zlib.crc32(flat.view(np.uint8).data, _noted.checksum)
        _noted.arrays += 1


def move(array: Array, sharding: Sharding = None) -> Array:
    """Return an array split otherwise, by default at home; a program moves it, also across processes."""
    place = sharding or home
    assert place is not None
    with jax.enable_x64(True):
        # Everything is within reach: no program is needed.
        if array.is_fully_addressable and (place.is_fully_addressable or len(array.devices()) == 1):
            return (
                jax.device_put(array, place) if place.is_fully_addressable else put(np.asarray(array), place)
            )
        # Devices of other processes: only a program that all of them run can move elements there.
        return _mover(place)(array)


@functools.cache
def _mover(sharding: NamedSharding) -> Callable[[Array], Array]:
    """Return a program that splits arrays like this; JAX keeps its executables by shape."""
    return jax.jit(lambda array: array, out_shardings=sharding)


_caches.register(
    "programs that move arrays between shardings",
    None,
    lambda: _mover.cache_info().currsize,
    _mover.cache_clear,
)


def gather(array: Array) -> np.ndarray[Any, Any]:
    """Return all of an array on the host: every process must call it, unless this process can see all of the array."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(move(array, None))


def verify(all_gather: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
    """Raise if processes have moved different values to the device as if they were the same."""
    sums = np.asarray(all_gather(np.array([_noted.checksum, _noted.arrays], np.uint32))).reshape(-1, 2)
    if (sums != sums[0]).any():
        raise IsthmusError(
            f"processes moved different values to the mesh (checksum and number of arrays per process: "
            f"{sums.tolist()}). Parameters must be the same everywhere: call torch.manual_seed with one seed in every "
            f"process before the model is made, or load one checkpoint; data that differs by process goes through "
            f"isthmus.distributed.shard_batches"
        )
