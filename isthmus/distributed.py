"""Many devices and hosts, one program: the global view.

A mesh of devices is the place of every "jax" tensor. Tensors are plain and have global shapes; XLA splits each program
over the devices and inserts the collectives. Names, arguments and placements are those of ``torch.distributed``::

    import isthmus.distributed as dist
    from torch.distributed.tensor import Shard

    mesh = dist.init_device_mesh((8,), ("dp",))
    model = dist.fully_shard(Model().to("jax"), mesh=mesh)
    for batch in dist.shard_batches(loader, mesh):
        loss = step(batch)

See docs/mesh.md. For one process per device, as on CUDA, use ``torch.distributed`` itself.
"""

from __future__ import annotations

from isthmus._distributed.checkpoints import LoadPlanner, SavePlanner
from isthmus._distributed.data import check_replicas, shard_batches
from isthmus._distributed.fully_shard import ShardingWarning, fully_shard
from isthmus._distributed.hosts import initialize
from isthmus._distributed.mesh import DeviceMesh, init_device_mesh
from isthmus._distributed.styles import ExpertParallel, parallelize_module
from isthmus._distributed.tensors import distribute_tensor, redistribute, shard_, sharding_of, visualize
from isthmus._interop.checkpoints import follow_parameters

__all__ = [
    "DeviceMesh",
    "ExpertParallel",
    "LoadPlanner",
    "SavePlanner",
    "ShardingWarning",
    "check_replicas",
    "distribute_tensor",
    "follow_parameters",
    "fully_shard",
    "init_device_mesh",
    "initialize",
    "parallelize_module",
    "redistribute",
    "shard_",
    "shard_batches",
    "sharding_of",
    "visualize",
]
