"""Split tensors: placed from the host, split where they are, and split otherwise inside a program.

``redistribute`` is one op, ``isthmus::redistribute``, with a lowering and a derivative, so that every mode and every
graph has it: it is ``jax.lax.with_sharding_constraint`` on the value, and on its gradient. Its arguments are text, one
part for each dim: ``"dp"`` or ``"dp+tp"`` splits it, ``"-"`` does not, ``"?"`` leaves it to XLA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from isthmus._device.core.buffer import Buffer, Signature, buffer_of, set_buffer, wrap
from isthmus._device.core.host_tensors import array_from_cpu
from isthmus._device.core.transfers import array_of
from isthmus._device.torch_glue.private import in_function_transform
from isthmus._distributed.mesh import DeviceMesh, axes_for, axes_of, placements_of, sharding_for
from isthmus._graph.layout import is_dense, storage_order
from isthmus._ops.registry import lowering
from isthmus._runtime import placement
from isthmus.errors import IsthmusError

Array = jax.Array


def distribute_tensor(tensor: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return a tensor on "jax" with the same elements, split over the mesh; it is plain and shows its whole shape.

    Arguments:
        tensor: on the CPU, the same in every process, or on "jax".
        device_mesh: the mesh, or some dims of it; over the others it is replicated.
        placements: torch's ``Shard`` and ``Replicate``, one for each dim of the mesh.
    """
    sharding = sharding_for(device_mesh, placements, tensor.dim())
    _check_divisible(tensor, sharding)
    plain = tensor.detach()
    if tensor.device.type == "jax":
        array = placement.move(array_of(plain), sharding)
    else:
        array = array_from_cpu(plain.cpu(), sharding)
    return wrap(array, tensor.dtype).requires_grad_(tensor.requires_grad)


def shard_(tensor: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Split a "jax" tensor where it is, so that every view of it sees it; axes of other dims of the mesh stay."""
    buffer = buffer_of(tensor)
    array = buffer.value
    order = _storage_dims(tensor)
    before = placement.sharding_of(array)
    sharding = sharding_for(device_mesh, placements, tensor.dim(), _permuted(before, inverse(order)))
    _check_divisible(tensor, sharding)
    moved = placement.move(array, placement.canonical(_permuted(sharding, order), tensor.dim()))
    # A new buffer on the same storage: recordings that know the old one do not fit any more.
    return set_buffer(tensor, Buffer(moved, Signature.of(moved)))


def _storage_dims(tensor: Tensor) -> list[int]:
    """Return which dim of a tensor each dim of its storage's array is; it must show the whole storage."""
    order = array_order(tensor)
    if order is None:
        raise IsthmusError(
            "a view of a part of a storage is split as the storage is: split the tensor it is a view of"
        )
    return order


def array_order(tensor: Tensor) -> list[int] | None:
    """Return which dim of a tensor each dim of its storage's array is; None if it shows a part of the storage."""
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    if not is_dense(size, stride) or tensor.storage_offset():
        return None
    order = list(storage_order(size, stride))
    return order if tuple([size[dim] for dim in order]) == buffer_of(tensor).signature.shape else None


def inverse(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes another."""
    return [order.index(dim) for dim in range(len(order))]


def _permuted(sharding: NamedSharding | None, order: Sequence[int]) -> NamedSharding | None:
    """Return a sharding for the array with its dims in another order."""
    if sharding is None:
        return None
    parts = [*sharding.spec, *[None] * (len(order) - len(sharding.spec))]
    return NamedSharding(sharding.mesh, PartitionSpec(*[parts[dim] for dim in order]))


def _check_divisible(tensor: Tensor, sharding: NamedSharding | None) -> None:
    if sharding is None:
        return
    for dim, (size, part) in enumerate(zip(tensor.shape, sharding.spec, strict=False)):
        axes = part if isinstance(part, tuple) else (part,)
        count = 1
        for axis in axes:
            count *= sharding.mesh.shape[axis] if axis else 1
        if size % count:
            raise ValueError(
                f"dim {dim} of a tensor of shape {tuple(tensor.shape)} has {size} elements, which {count} devices "
                f"cannot share evenly: choose another dim, or leave it replicated"
            )


def sharding_of(tensor: Tensor) -> tuple[Placement, ...]:
    """Return how a "jax" tensor is split, as torch's placements, one for each dim of the process's mesh.

    A view is split as the storage it is a view of; where that cannot be said by dims of the view, as its copy is.
    """
    if placement.home is None:
        raise IsthmusError("there is no mesh: isthmus.distributed.init_device_mesh makes one")
    array = buffer_of(tensor).value
    try:
        order = _storage_dims(tensor)
    except IsthmusError:
        array, order = array_of(tensor), list(range(tensor.dim()))
    return placements_of(_permuted(placement.sharding_of(array), inverse(order)), tensor.dim())


def visualize(tensor: Tensor) -> None:
    """Print which device holds which part of a tensor of one or two dims."""
    jax.debug.visualize_array_sharding(array_of(tensor))


def redistribute(
    tensor: Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    gradient: Sequence[Placement] | None = None,
) -> Tensor:
    """Return a tensor with the same elements, split otherwise: in eager at once, in a program as a constraint on XLA.

    Arguments:
        tensor: on "jax".
        device_mesh: the mesh, or some dims of it; the other dims of the mesh may then split dim 0, the batch.
        placements: torch's ``Shard`` and ``Replicate``, one for each dim of ``device_mesh``.
        gradient: how the gradient is split; by default XLA decides.
    """
    forward = _text(device_mesh, placements, tensor.dim())
    backward = "" if gradient is None else _text(device_mesh, gradient, tensor.dim())
    return constrain(tensor, forward, backward)


def _text(mesh: DeviceMesh, placements: Sequence[Placement], ndim: int) -> str:
    """Return placements as ``constrain`` takes them; Dynamo traces this."""
    axes = axes_for(mesh, placements, ndim)
    parts = ["+".join(each) or "-" for each in axes]
    if mesh.others and ndim:
        # The batch stays split as it is; where it is split over this mesh too, the others come first.
        parts[0] = "+".join([*mesh.others, *axes[0]]) if axes[0] else "?"
    return ",".join(parts)


def _parsed(text: str) -> PartitionSpec:
    def part(text: str) -> Any:
        named = {"?": PartitionSpec.UNCONSTRAINED, "-": None}
        return named[text] if text in named else tuple(text.split("+"))

    return PartitionSpec(*[part(each) for each in text.split(",")] if text else [])


def constrain(tensor: Tensor, forward: str, backward: str = "", again: bool = False) -> Tensor:
    """Split a tensor, and its gradient, as the texts say; "" leaves the gradient to XLA.

    With ``again`` a compiled forward does not keep the result for backward, which redistributes the tensor again.
    """
    if not torch.compiler.is_compiling() and in_function_transform():
        return _Redistributed.apply(tensor, forward, backward, again)  # type: ignore[no-any-return,no-untyped-call]
    return torch.ops.isthmus.redistribute(tensor, forward, backward, again)  # type: ignore[no-any-return]


def text_of_axes(axes: Sequence[tuple[str, ...]]) -> str:
    """Return the axes that split each dim as ``constrain`` takes them."""
    return ",".join(["+".join(each) or "-" for each in axes])


def shardings_by_dim(tensor: Tensor) -> list[tuple[str, ...]]:
    """Return the axes that split each dim of a tensor that shows its whole storage."""
    sharding = placement.sharding_of(buffer_of(tensor).value)
    return axes_of(_permuted(sharding, inverse(_storage_dims(tensor))), tensor.dim())


_library = torch.library.Library("isthmus", "FRAGMENT")
_library.define(
    "redistribute(Tensor input, str forward, str backward, bool again=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_op = torch.ops.isthmus.redistribute.default


@lowering(_op, static={"forward", "backward", "again"})
def _lowered(input: Array, forward: str, backward: str, again: bool = False) -> Array:
    if placement.home is None or not forward:
        return input
    spec = _parsed(forward)
    sizes = placement.home.mesh.shape
    parts = [_even(part, size, sizes) for part, size in zip(spec, input.shape, strict=True)]
    return jax.lax.with_sharding_constraint(input, NamedSharding(placement.home.mesh, PartitionSpec(*parts)))


def _even(part: Any, size: int, sizes: Any) -> Any:
    """Return a part of a spec, or None where a dim cannot be shared evenly: XLA would ignore it without a word."""
    if not isinstance(part, tuple):
        return part
    count = 1
    for axis in part:
        count *= sizes[axis]
    return part if size % count == 0 else None


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.backward = inputs[2]


def _gradient(ctx: Any, gradient: Tensor) -> Any:
    # torch leaves out trailing arguments that have their default.
    others = (None,) * (len(ctx.needs_input_grad) - 1)
    return (constrain(gradient, ctx.backward) if ctx.backward else gradient), *others


_library.impl("redistribute", lambda input, *_: torch.empty_like(input), "Meta")
_library.impl("redistribute", lambda input, *_: input.clone(), "CPU")
torch.library.register_autograd("isthmus::redistribute", _gradient, setup_context=_setup, lib=_library)
torch.library.register_vmap(
    "isthmus::redistribute",
    lambda info, dims, input, *_: (input.clone(), dims[0]),
    lib=_library,
)


class _Redistributed(torch.autograd.Function):
    """The op inside ``torch.func``'s transformations, which refuse the derivative that an op of a library has."""

    @staticmethod
    def forward(tensor: Tensor, forward: str, backward: str, again: bool) -> Tensor:
        """Return the tensor split otherwise; torch calls this below the innermost of its transformations."""
        return torch.ops.isthmus.redistribute(tensor, forward, backward, again)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Note how the result and its gradient are split."""
        _, ctx.forward, ctx.backward, _ = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient, split as it was asked for."""
        return (constrain(gradient, ctx.backward) if ctx.backward else gradient), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *texts: None) -> Tensor:
        """Return the tangent, split as the result is."""
        return constrain(tangent, ctx.forward, ctx.backward)

    @staticmethod
    def vmap(info: Any, dims: Any, tensor: Tensor, *texts: Any) -> Any:
        """Return the batch as XLA splits it: the texts say nothing about its own dim."""
        return tensor.clone(), dims[0]
