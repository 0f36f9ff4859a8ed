"""The mesh that a program of split weights runs on: in torch it must be the one that the process's tensors live on."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from isthmus._runtime import placement
from isthmus.errors import ExportError


def mesh_for(spec: dict[str, Any]) -> Mesh | AbstractMesh | None:
    """Return the mesh for a program with this signature; None for one that runs on one device, or on any mesh."""
    if "mesh" not in spec:
        return None
    wanted = {str(name): int(size) for name, size in spec["mesh"].items()}
    if placement.home is not None and dict(placement.home.mesh.shape) == wanted:
        return placement.home.mesh
    count, sizes, names = 1, tuple(wanted.values()), tuple(wanted)
    for size in sizes:
        count *= size
    have = "one device" if placement.home is None else f"the mesh {dict(placement.home.mesh.shape)}"
    raise ExportError(
        f"isthmus.load: the program was exported from a model split over the mesh {wanted}, "
        f"and tensors live on {have}\n"
        f"  to go on     isthmus.distributed.init_device_mesh({sizes}, {names}) before loading, with {count} devices "
        f"(JAX has {jax.device_count()}); or load the model's checkpoint without a mesh and export it again"
    )
