"""The mesh of devices that all tensors live on, and the sharding that torch's placements mean on it.

``init_device_mesh`` makes a mesh the home of every "jax" tensor of the process (``_runtime/placement.py``). Tensors
stay plain and show global shapes. ``DeviceMesh`` has the interface of torch's and no process groups behind it, since
one process drives all of its devices, or, across hosts, the same program runs in each process::

    mesh = init_device_mesh((4, 2), ("dp", "tp"))
    sharding_for(mesh, [Shard(0), Replicate()], 2)          # NamedSharding(P("dp"))
    sharding_for(mesh["tp"], [Shard(1)], 2, before)         # before's "dp" stays, dim 1 is split over "tp"

Tensors that exist when the mesh is set are moved to it, and every cache is emptied: programs compiled before are for
one device. They are found by the garbage collector, so that making a tensor costs nothing on one device; tensors that
``gc.freeze`` hides are not found, and using one raises JAX's error about devices.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from isthmus import _caches
from isthmus._device.core import donation, mode
from isthmus._device.core.buffer import Buffer, Lost, Signature
from isthmus._device.kernels import factories
from isthmus._device.torch_glue.registration import load
from isthmus._runtime import placement
from isthmus.errors import IsthmusError

Axes = tuple[str, ...]
"""The axes of the mesh that split one dim."""


class DeviceMesh:
    """A grid of devices with a name for each dim; ``mesh["tp"]`` is the mesh of some of its dims.

    Plain attributes and methods only: Dynamo traces code that uses a mesh.
    """

    device_type = "jax"

    def __init__(self, mesh: torch.Tensor, mesh_dim_names: tuple[str, ...], jax_mesh: Mesh) -> None:
        self.mesh, self.mesh_dim_names, self.jax_mesh = mesh, mesh_dim_names, jax_mesh
        self.shape = tuple(mesh.shape)
        self.ndim = len(self.shape)
        self.others = tuple(
            [name for name, n in jax_mesh.shape.items() if n > 1 and name not in mesh_dim_names]
        )
        """The dims of the process's mesh, larger than 1, that this one does not have."""

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        wanted = (names,) if isinstance(names, str) else tuple(names)
        missing = [name for name in wanted if name not in self.mesh_dim_names]
        if missing:
            raise KeyError(f"the mesh has the dims {self.mesh_dim_names}, and none is called {missing[0]!r}")
        first = tuple([slice(None) if name in wanted else 0 for name in self.mesh_dim_names])
        kept = [name for name in self.mesh_dim_names if name in wanted]
        return DeviceMesh(self.mesh[first].permute([kept.index(n) for n in wanted]), wanted, self.jax_mesh)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return how many devices a dim has, by default all dims together."""
        if isinstance(mesh_dim, str):
            mesh_dim = self.mesh_dim_names.index(mesh_dim)
        return math.prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={n}" for name, n in zip(self.mesh_dim_names, self.shape, strict=True))
        return f"DeviceMesh({sizes})"


def init_device_mesh(
    mesh_shape: Sequence[int], mesh_dim_names: Sequence[str], *, devices: Sequence[jax.Device] | None = None
) -> DeviceMesh:
    """Make a mesh of devices the place of every "jax" tensor of this process; those that exist are moved to it.

    Arguments:
        mesh_shape: how many devices each dim has; one -1 stands for what is left.
        mesh_dim_names: a name for each dim, such as ``("dp", "tp")``.
        devices: the JAX devices, by default all, over all hosts.

    Returns:
        A mesh with the interface of ``torch.distributed.device_mesh.DeviceMesh``, without process groups.
    """
    if isinstance(mesh_shape, str):  # torch's function of this name begins with a type of device
        raise TypeError(
            "isthmus.distributed.init_device_mesh takes a shape and names, such as ((4, 2), "
            f'("dp", "tp")), not {mesh_shape!r}: its devices are always those of "jax"'
        )
    found = list(jax.devices() if devices is None else devices)
    shape = list(mesh_shape)
    if shape.count(-1) == 1:
        known = math.prod(n for n in shape if n != -1)
        shape[shape.index(-1)] = len(found) // known
    count = math.prod(shape)
    names = tuple(mesh_dim_names)
    if len(names) != len(shape) or len(set(names)) != len(names):
        raise ValueError(f"a mesh of {len(shape)} dims needs as many different names, got {names}")
    if min(shape) < 1 or count > len(found):
        raise ValueError(
            f"a mesh of shape {tuple(mesh_shape)} needs {count} devices, and JAX has {len(found)}: "
            f"XLA_FLAGS=--xla_force_host_platform_device_count=8 makes 8 of one CPU, for tests"
        )
    if count < len(found) and jax.process_count() > 1:
        raise ValueError(f"a mesh across processes takes all {len(found)} devices, not {count}")
    grid = np.array(found[:count]).reshape(shape)
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    set_mesh(mesh)
    from isthmus._distributed import checkpoints  # which needs this module

    checkpoints.install()
    return DeviceMesh(torch.arange(count).reshape(shape), names, mesh)


def set_mesh(mesh: Mesh | None) -> None:
    """Make a mesh, or one device again, the home of all tensors, and move those that exist."""
    load()  # kernels first: they hold arrays made before
    mode.current.materialise()
    buffers = [each for each in gc.get_objects() if type(each) is Buffer]
    with donation.lock:
        arrays = [(buffer, buffer.value) for buffer in buffers if _is_array(buffer)]
        if any(not (array.is_fully_addressable or array.is_fully_replicated) for _, array in arrays):
            # Gathering is a collective, and processes may find their buffers in different orders.
            raise IsthmusError(
                "a mesh across processes is set before tensors are split: some are split over the processes now, and "
                "moving them to another mesh is not possible\n"
                "  to go on     save a checkpoint and load it in a program with the other mesh"
            )
        host: list[Any] = [placement.gather(array) if mesh is None else array for _, array in arrays]
        _caches.clear_caches()
        Signature.forget()
        placement.set_mesh(mesh)
        factories.follow_shardings()
        for (buffer, _), array in zip(arrays, host, strict=True):
            moved = (
                placement.move(array) if mesh is not None else jax.device_put(array, jax.local_devices()[0])
            )
            buffer.rebind(moved)


def _is_array(buffer: Buffer) -> bool:
    if buffer.signature.traced or type(buffer.held) is Lost:
        return False
    return not getattr(buffer.held, "is_deleted", bool)()


def sharding_for(
    mesh: DeviceMesh, placements: Sequence[Placement], ndim: int, before: NamedSharding | None = None
) -> placement.Sharding:
    """Return the sharding that placements mean; axes that ``mesh`` does not have stay as they are in ``before``."""
    check_current(mesh)
    kept = [tuple([a for a in axes if a not in mesh.mesh_dim_names]) for axes in axes_of(before, ndim)]
    axes = [(*mine, *new) for mine, new in zip(kept, axes_for(mesh, placements, ndim), strict=True)]
    return placement.canonical(NamedSharding(mesh.jax_mesh, PartitionSpec(*axes)), ndim)


def axes_for(mesh: DeviceMesh, placements: Sequence[Placement], ndim: int) -> list[Axes]:
    """Return the axes by which placements split each dim."""
    if len(placements) != mesh.ndim:
        raise ValueError(f"{mesh.ndim} dims of the mesh need as many placements, got {list(placements)}")
    dims: list[Axes] = [()] * ndim
    for name, place in zip(mesh.mesh_dim_names, placements, strict=True):
        if isinstance(place, Shard):
            if not -ndim <= place.dim < ndim:
                raise ValueError(f"{place} of a tensor of {ndim} dims")
            dims[place.dim % ndim] = (*dims[place.dim % ndim], name)
        elif not isinstance(place, Replicate):
            raise ValueError(f"{place}: a plain tensor is split or replicated, never partial")
    return dims


def check_current(mesh: DeviceMesh) -> None:
    """Raise if tensors of the process live on another mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"isthmus.distributed takes the mesh of isthmus.distributed.init_device_mesh, not {type(mesh).__name__}: "
            f"torch's has a process for each device"
        )
    if placement.home is None or placement.home.mesh is not mesh.jax_mesh:
        raise IsthmusError(f"tensors do not live on {mesh} now: another mesh was set since")


def placements_of(sharding: placement.Sharding, ndim: int) -> tuple[Placement, ...]:
    """Return a sharding as torch's placements, one for each dim of the process's mesh."""
    assert placement.home is not None
    names = placement.home.mesh.axis_names
    where = {axis: dim for dim, axes in enumerate(axes_of(sharding, ndim)) for axis in axes}
    return tuple([Shard(where[name]) if name in where else Replicate() for name in names])


def axes_of(sharding: placement.Sharding, ndim: int) -> list[Axes]:
    """Return the axes that split each dim."""
    parts = list(sharding.spec) if sharding is not None else []
    named = [() if part is None else part if isinstance(part, tuple) else (part,) for part in parts]
    return [*named, *[()] * (ndim - len(named))]
