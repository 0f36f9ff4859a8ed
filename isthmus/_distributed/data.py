"""``shard_batches``: batches of the host as tensors that are split along dim 0, each process giving its own rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from isthmus._device.core.buffer import wrap
from isthmus._device.core.host_tensors import numpy_from_cpu
from isthmus._device.torch_glue.pytree import tree_map
from isthmus._distributed.fully_shard import ShardingWarning
from isthmus._distributed.mesh import DeviceMesh, check_current, sharding_for
from isthmus._distributed.tensors import distribute_tensor
from isthmus._runtime import placement
from isthmus._runtime.compiler import scoped_x64


def shard_batches(batches: Iterable[Any], mesh: DeviceMesh) -> Iterator[Any]:
    """Yield each batch with its tensors on "jax", split along dim 0 over the mesh.

    Arguments:
        batches: a ``DataLoader`` or any iterable of pytrees of CPU tensors. With several processes each gives its own
            rows (a ``DistributedSampler``, say), and a tensor's global dim 0 is that of all of them together.
        mesh: the dims that share the batch, such as ``mesh["dp"]``.

    Yields:
        The same trees. A tensor whose rows the devices cannot share evenly is replicated, which is warned about once;
        with several processes it raises.
    """
    check_current(mesh)
    check_replicas()
    warned = False
    for batch in batches:
        even = True

        def place(value: Any) -> Any:
            nonlocal even
            if not isinstance(value, Tensor):
                return value
            placed, fits = _placed(value, mesh)
            even = even and fits
            return placed

        yield tree_map(place, batch)
        if not even and not warned:
            warned = True
            warnings.warn(
                f"shard_batches: a batch whose rows {mesh.size()} devices cannot share evenly is replicated; a "
                f"DataLoader has drop_last=True against the last, smaller one",
                ShardingWarning,
                stacklevel=2,
            )


def _placed(value: Tensor, mesh: DeviceMesh) -> tuple[Tensor, bool]:
    """Return a tensor of a batch on the mesh, and whether its rows could be shared."""
    whole = [Replicate()] * mesh.ndim
    if not value.dim() or not value.shape[0]:
        return distribute_tensor(value, mesh, whole), True
    split = [Shard(0)] * mesh.ndim
    if jax.process_count() == 1:
        fits = value.shape[0] % mesh.size() == 0
        return distribute_tensor(value, mesh, split if fits else whole), fits
    sharding = sharding_for(mesh, split, value.dim())
    with scoped_x64():
        array = jax.make_array_from_process_local_data(
            sharding or placement.home, np.array(numpy_from_cpu(value.cpu()), copy=True)
        )
    return wrap(array, value.dtype), True


def check_replicas() -> None:
    """Raise if processes hold different values where they must hold the same; does nothing in one process."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        placement.verify(multihost_utils.process_allgather)
