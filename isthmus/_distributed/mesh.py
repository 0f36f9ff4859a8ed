"""The mesh: torch's ``DeviceMesh`` over JAX's devices, and the sharding that torch's placements mean on it.

``init_device_mesh`` makes a mesh the home of every "jax" tensor of the process (``_runtime/placement.py``). Tensors
stay plain and show global shapes; a ``DeviceMesh`` here has no process groups behind it, since one process drives all
of its devices, or, across hosts, the same program runs in each process::

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
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from isthmus import _caches
from isthmus._device.core import donation, mode
from isthmus._device.core.buffer import Buffer, Lost
from isthmus._device.kernels import factories
from isthmus._device.torch_glue.registration import load
from isthmus._runtime import placement
from isthmus.errors import IsthmusError

Spec = list[Any]
"""The axes that split each dim: None, a name, a tuple of names, or ``PartitionSpec.UNCONSTRAINED``."""


class DeviceMesh(TorchMesh):
    """torch's ``DeviceMesh`` without process groups; ``mesh["tp"]`` is the mesh of some of its dims."""

    def __init__(self, devices: torch.Tensor, names: tuple[str, ...], jax_mesh: Mesh) -> None:
        super().__init__("jax", devices, mesh_dim_names=names, _init_backend=False, _rank=0)
        self.jax_mesh = jax_mesh

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its dims."""
        assert self.mesh_dim_names is not None
        return tuple(self.mesh_dim_names)

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        wanted = (names,) if isinstance(names, str) else tuple(names)
        missing = [name for name in wanted if name not in self.names]
        if missing:
            raise KeyError(f"the mesh has the dims {self.names}, and none is called {missing[0]!r}")
        first = tuple([slice(None) if name in wanted else 0 for name in self.names])
        kept = [name for name in self.names if name in wanted]
        return DeviceMesh(self.mesh[first].permute([kept.index(n) for n in wanted]), wanted, self.jax_mesh)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return how many devices a dim has, by default all dims together."""
        if isinstance(mesh_dim, str):
            mesh_dim = self.names.index(mesh_dim)
        return int(self.mesh.numel() if mesh_dim is None else self.mesh.size(mesh_dim))

    @property
    def others(self) -> tuple[str, ...]:
        """Return the dims of the process's mesh, larger than 1, that this one does not have."""
        return tuple(
            [name for name, n in self.jax_mesh.shape.items() if n > 1 and name not in self.names]
        )

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={self.size(n)}" for n, name in enumerate(self.names))
        return f"DeviceMesh({sizes})"

    __hash__ = TorchMesh.__hash__


def init_device_mesh(
    mesh_shape: Sequence[int], mesh_dim_names: Sequence[str], *, devices: Sequence[jax.Device] | None = None
) -> DeviceMesh:
    """Make a mesh of devices the place of every "jax" tensor of this process; those that exist are moved to it.

    Arguments:
        mesh_shape: how many devices each dim has; one -1 stands for what is left.
        mesh_dim_names: a name for each dim, such as ``("dp", "tp")``.
        devices: the JAX devices, by default all, over all hosts.

    Returns:
        A ``torch.distributed.device_mesh.DeviceMesh`` without process groups.
    """
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
    return DeviceMesh(torch.arange(count).reshape(shape), names, mesh)


def set_mesh(mesh: Mesh | None) -> None:
    """Make a mesh, or one device again, the home of all tensors, and move those that exist."""
    load()  # kernels first: they hold arrays made before
    mode.current.materialise()
    buffers = [each for each in gc.get_objects() if type(each) is Buffer]
    with donation.lock:
        arrays = [(buffer, buffer.value) for buffer in buffers if _is_array(buffer)]
        host = [placement.gather(array) if mesh is None else array for _, array in arrays]
        _caches.clear_caches()
        placement.set_mesh(mesh)
        factories.follow_shardings()
        for (buffer, _), array in zip(arrays, host, strict=True):
            moved = placement.move(array) if mesh is not None else jax.device_put(array, jax.local_devices()[0])
            buffer.rebind(moved)


def _is_array(buffer: Buffer) -> bool:
    if buffer.signature.traced or type(buffer.held) is Lost:
        return False
    return not getattr(buffer.held, "is_deleted", bool)()


def sharding_for(
    mesh: DeviceMesh, placements: Sequence[Placement], ndim: int, before: NamedSharding | None = None
) -> placement.Sharding:
    """Return the sharding that placements mean; axes that ``mesh`` does not have stay as they are in ``before``."""
    spec = spec_for(mesh, placements, ndim, before)
    return placement.canonical(NamedSharding(mesh.jax_mesh, PartitionSpec(*spec)), ndim)


def spec_for(
    mesh: DeviceMesh, placements: Sequence[Placement], ndim: int, before: NamedSharding | None = None
) -> Spec:
    """Return the axes that split each dim; those that ``mesh`` does not have stay as they are in ``before``."""
    check_current(mesh)
    if len(placements) != len(mesh.names):
        raise ValueError(f"{len(mesh.names)} dims of the mesh need as many placements, got {list(placements)}")
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for dim, part in enumerate(before.spec if before is not None else ()):
        dims[dim] = [axis for axis in _axes(part) if axis not in mesh.names]
    for name, place in zip(mesh.names, placements, strict=True):
        if isinstance(place, Shard):
            if not -ndim <= place.dim < ndim:
                raise ValueError(f"{place} of a tensor of {ndim} dims")
            dims[place.dim % ndim].append(name)
        elif not isinstance(place, Replicate):
            raise ValueError(f"{place}: a plain tensor is split or replicated, never partial")
    return [None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in dims]


def check_current(mesh: DeviceMesh) -> None:
    """Raise if tensors of the process live on another mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"isthmus.distributed takes the mesh of isthmus.distributed.init_device_mesh, not {type(mesh).__name__}: "
            f"torch's has a process for each device"
        )
    if placement.home is None or placement.home.mesh != mesh.jax_mesh:
        raise IsthmusError(f"tensors do not live on {mesh} now: another mesh was set since")


def placements_of(sharding: placement.Sharding, ndim: int) -> tuple[Placement, ...]:
    """Return a sharding as torch's placements, one for each dim of the process's mesh."""
    assert placement.home is not None
    names = placement.home.mesh.axis_names
    where = {axis: dim for dim, part in enumerate(sharding.spec if sharding else ()) for axis in _axes(part)}
    return tuple([Shard(where[name]) if name in where else Replicate() for name in names])


def _axes(part: Any) -> tuple[str, ...]:
    return () if part is None else part if isinstance(part, tuple) else (part,)


def axes_of(sharding: placement.Sharding, ndim: int) -> list[tuple[str, ...]]:
    """Return the axes that split each dim."""
    parts = [_axes(part) for part in (sharding.spec if sharding else ())]
    return parts + [()] * (ndim - len(parts))
