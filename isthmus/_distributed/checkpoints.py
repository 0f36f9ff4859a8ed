"""``torch.distributed.checkpoint`` of tensors on a mesh: every process writes and reads the parts that it holds.

``dcp.save`` and ``dcp.load`` ask a *planner* what to write and where to put what was read. torch's takes a plain tensor
for one that every process has whole, lets one process write it, and so has one process alone read a split tensor, which
is a collective. These planners describe a tensor by the parts on this process's devices. They are the planners that
``dcp`` uses once there is a mesh; a checkpoint is torch's own format, so that another mesh, ranks of
``torch.distributed`` or one device load it::

    torch.distributed.init_process_group("gloo")   # several processes: dcp agrees on the plan through a group
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)

Loading fills parts on the host. Tensors are written when all parts are there, by every process in the same order, and
keep their sharding; what fails before that changes none of them.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from isthmus._device.core.buffer import buffer_of, wrap
from isthmus._device.core.host_tensors import cpu_from_array, numpy_from_cpu
from isthmus._device.core.transfers import array_of
from isthmus._device.torch_glue import patches
from isthmus._distributed.tensors import array_order, inverse
from isthmus._runtime import placement
from isthmus._runtime.compiler import scoped_x64
from isthmus.errors import IsthmusError

Offsets = tuple[int, ...]


class Parts:
    """A "jax" tensor on a mesh, as the parts of it that this process holds; torch's planners know it by its methods."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        order = array_order(self.tensor)
        # A view of a part of a storage is copied, by every process; its copy has its dims in order.
        self.array = array_of(self.tensor) if order is None else buffer_of(self.tensor).value
        self.order = list(range(tensor.dim())) if order is None else order
        self.shards: dict[Offsets, Any] = {}
        for shard in self.array.addressable_shards:
            self.shards.setdefault(self._offsets(shard.index), shard.data)
        self.loaded: dict[Offsets, Tensor] = {}

    def _offsets(self, index: tuple[slice, ...]) -> Offsets:
        """Return where a part of the array begins in the tensor."""
        starts = [at.start or 0 for at in index]
        return tuple([starts[dim] for dim in inverse(self.order)])

    def _size(self, offsets: Offsets) -> torch.Size:
        shape = self.shards[offsets].shape
        return torch.Size([shape[dim] for dim in inverse(self.order)])

    def size(self) -> torch.Size:
        """Return the size of the whole tensor."""
        return self.tensor.size()

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(
            dtype=self.tensor.dtype, layout=self.tensor.layout, requires_grad=self.tensor.requires_grad
        )
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(at), sizes=self._size(at)) for at in sorted(self.shards)
        ]

    def saved(self, offsets: Offsets) -> Tensor:
        """Return a part on the CPU."""
        return cpu_from_array(self.shards[offsets], self.tensor.dtype).permute(inverse(self.order))

    def part(self, offsets: Offsets) -> Tensor:
        """Return the CPU tensor that a part is read into."""
        if offsets not in self.loaded:
            self.loaded[offsets] = torch.empty(self._size(offsets), dtype=self.tensor.dtype)
        return self.loaded[offsets]

    def write(self) -> None:
        """Write to the tensor what was read."""

        def part(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
            assert index is not None
            return numpy_from_cpu(self.part(self._offsets(index)).permute(self.order))

        with scoped_x64():
            array = jax.make_array_from_callback(self.array.shape, self.array.sharding, part)
        self.tensor.copy_(wrap(array, self.tensor.dtype).permute(inverse(self.order)))


def _in_parts(state: dict[str, Any]) -> dict[str, Any]:
    """Return a flat state dict with the tensors on the mesh as their parts."""
    if placement.home is None:
        return state
    if jax.process_count() > 1 and not torch.distributed.is_initialized():
        raise IsthmusError(
            f"torch.distributed.checkpoint in one of {jax.process_count()} processes without a process group: each "
            f"would take itself for the only one\n"
            f'  to go on     call torch.distributed.init_process_group("gloo") in every process; the tensors need no '
            f"group, but what is written by whom is agreed on through it"
        )
    return {name: Parts(value) if _is_on_mesh(value) else value for name, value in state.items()}


def _is_on_mesh(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "jax"


class SavePlanner(DefaultSavePlanner):
    """Plans ``dcp.save`` of tensors on a mesh: each process writes its parts, and what several have is written once.

    Arguments are those of torch's ``DefaultSavePlanner``.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict; tensors on the mesh become their parts."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = _in_parts(self.state_dict)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is written for an item of the plan."""
        value = self.state_dict[index.fqn]
        return (
            value.saved(tuple(index.offset or ()))
            if isinstance(value, Parts)
            else super().lookup_object(index)
        )


class LoadPlanner(DefaultLoadPlanner):
    """Plans ``dcp.load`` into tensors on a mesh: each process reads its parts, and tensors keep their sharding.

    Arguments are those of torch's ``DefaultLoadPlanner``.
    """

    def create_local_plan(self) -> LoadPlan:
        """Return what this process reads."""
        # Before torch plans: it asks each value for its parts, and a plain tensor would be read whole.
        self.state_dict = _in_parts(self.state_dict)
        plan = super().create_local_plan()
        # Counted, because torch calls ``commit_tensor`` for each item and nothing once all have been read.
        self._left = sum(isinstance(self.state_dict[item.dest_index.fqn], Parts) for item in plan.items)
        self._read = sorted({item.dest_index.fqn for item in plan.items})
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return what an item of the plan is read into."""
        value = self.state_dict[index.fqn]
        return (
            value.part(tuple(index.offset or ()))
            if isinstance(value, Parts)
            else super().lookup_tensor(index)
        )

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Note that an item was read; after the last one the tensors are written."""
        super().commit_tensor(read_item, tensor)
        if not isinstance(self.state_dict[read_item.dest_index.fqn], Parts):
            return
        self._left -= 1
        if not self._left:
            # In one order everywhere: writing to a view of a split storage is a program of all processes.
            for value in [self.state_dict[name] for name in self._read]:
                if isinstance(value, Parts):
                    value.write()


def install() -> None:
    """Make these the planners of ``dcp.save`` and ``dcp.load`` where none is named."""
    folder = "torch.distributed.checkpoint"
    patches.replace(f"{folder}.state_dict_saver", "DefaultSavePlanner", lambda theirs: SavePlanner)
    patches.replace(f"{folder}.state_dict_loader", "DefaultLoadPlanner", lambda theirs: LoadPlanner)
