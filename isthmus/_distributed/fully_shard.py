"""``fully_shard``: parameters, gradients and optimizer state split over a dim of the mesh.

Each parameter is split along its largest dim that the devices can share evenly (dims that tensor parallelism has split
come last). While the module's forward runs, its submodules show the gathered parameters: ``redistribute`` to "not split
over dp", whose gradient is split as the parameter is, so XLA gathers weights, never activations, and scatters
gradients. Outside of forward ``module.weight`` is the ``Parameter``, so that initialisation, optimizers, ``state_dict``
and checkpoints see what they always see.

Gathered tensors are shown by ``shown.py``.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar
from weakref import ref

import jax
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from isthmus._device.core.buffer import buffer_of
from isthmus._device.core.resharded import reshard
from isthmus._device.torch_glue.private import in_function_transform, parameters_of
from isthmus._distributed.mesh import DeviceMesh, check_current
from isthmus._distributed.shown import GROUPED, Part, Shown
from isthmus._distributed.tensors import constrain, shard_, shardings_by_dim, text_of_axes

Module = TypeVar("Module", bound=nn.Module)


class ShardingWarning(UserWarning):
    """A parameter stays replicated, because its sizes cannot be shared evenly."""


def fully_shard(module: Module, *, mesh: DeviceMesh, reshard_after_forward: bool = True) -> Module:
    """Split every parameter of a module over a mesh of one dim; return the module.

    As with torch's function of that name, parameters that an earlier call has split belong to that call: split each
    block first and the whole model last, and each block gathers its own when it runs.

    Arguments:
        module: on "jax".
        mesh: a dim of the mesh, such as ``mesh["dp"]``.
        reshard_after_forward: whether backward gathers parameters again, rather than forward keeping whole copies of
            them for it. Where forward and backward are one program (lazy mode, ``isthmus.jit``,
            ``isthmus.train_step``), XLA decides.
    """
    check_current(mesh)
    if mesh.ndim != 1:
        raise ValueError(
            f"fully_shard splits over one dim of a mesh, not {mesh.mesh_dim_names}: pass mesh[name]"
        )
    axis, count = mesh.mesh_dim_names[0], mesh.size()
    group: list[Part] = []
    left: list[str] = []
    split: dict[int, tuple[str, str]] = {}
    for prefix, sub in module.named_modules():
        grouped = sub.__dict__.setdefault(GROUPED, set())
        for name, parameter in parameters_of(sub).items():
            if parameter is None or name in grouped:
                continue
            if id(parameter) not in split:
                if not _split(parameter, mesh, count):
                    left.append(f"{prefix}.{name} {tuple(parameter.shape)}".removeprefix("."))
                split[id(parameter)] = _texts(parameter, axis)
            group.append((sub, name, *split[id(parameter)]))
            grouped.add(name)
    if left:
        warnings.warn(
            f"fully_shard: no dim of {', '.join(left)} can be shared evenly by {count} devices; these parameters stay "
            f"replicated",
            ShardingWarning,
            stacklevel=2,
        )
    Gathered(group, axis, count, reshard_after_forward).install(module)
    return module


def _split(parameter: Tensor, mesh: DeviceMesh, count: int) -> bool:
    """Split a parameter along its best dim; return False where none can be shared evenly."""
    buffer_of(parameter)  # raises where it is not on "jax"
    sizes = dict(mesh.jax_mesh.shape)
    axes = shardings_by_dim(parameter)

    def parts(dim: int) -> int:
        total = count
        for axis in axes[dim]:
            total *= sizes[axis]
        return total

    dims = [dim for dim in range(parameter.dim()) if parameter.shape[dim] % parts(dim) == 0]
    if not dims or not parameter.numel():
        return False
    best = max(dims, key=lambda dim: (not axes[dim], parameter.shape[dim], -dim))
    shard_(parameter, mesh, [Shard(best)])
    return True


def _texts(parameter: Tensor, axis: str) -> tuple[str, str]:
    """Return how a parameter is gathered, and how it and its gradient are split."""
    split = shardings_by_dim(parameter)
    gathered = [tuple([a for a in axes if a != axis]) for axes in split]
    return text_of_axes(gathered), text_of_axes(split)


class Gathered(Shown):
    """Shows gathered parameters while a module's forward runs, and keeps its outputs split by batch."""

    def __init__(self, group: list[Part], axis: str, count: int, again: bool) -> None:
        super().__init__(group)
        self.axis, self.count, self.again = axis, count, again

    def is_mine(self, module: nn.Module, name: str) -> bool:
        """Return True: what is in a group is shown by nothing else."""
        return True

    def before(self, shown: Tensor, parameter: Tensor) -> None:
        """Note the array that forward gathers, so that ``hidden`` can tell whether forward has replaced it."""
        if not self.again or torch.compiler.is_compiling() or not shown.requires_grad:
            return
        if in_function_transform():  # whose tensors have no memory of their own
            return
        gathered, parts = buffer_of(shown), buffer_of(parameter)
        # What is recorded or traced is part of a program that has backward too.
        if isinstance(gathered.held, jax.Array) and not gathered.signature.traced:
            shown.isthmus_gathered = (gathered, ref(gathered.held), parts.value)  # type: ignore[attr-defined]

    def hidden(self, shown: Tensor) -> None:
        """Drop the gathered array: autograd keeps its tensor, and gathers it again if backward reads it."""
        noted = None if torch.compiler.is_compiling() else getattr(shown, "isthmus_gathered", None)
        if noted is not None:
            gathered, array, parts = noted
            reshard(gathered, array(), parts)
            del shown.isthmus_gathered  # type: ignore[attr-defined]

    def after(self, output: Any) -> Any:
        """Return the output split along dim 0."""
        return keep_batch_split(output, self.axis, self.count)


def keep_batch_split(output: Any, axis: str, count: int) -> Any:
    """Return the tensors of a module's output split along dim 0: XLA might rather move activations than weights."""
    if isinstance(output, Tensor):
        if output.device.type != "jax" or not output.dim() or output.shape[0] % count or not output.numel():
            return output
        if not output.is_floating_point():
            return output
        text = ",".join([axis, *["?"] * (output.dim() - 1)])
        return constrain(output, text, text)
    if type(output) in (list, tuple):
        return type(output)([keep_batch_split(item, axis, count) for item in output])
    if type(output) is dict:
        return {key: keep_batch_split(item, axis, count) for key, item in output.items()}
    return output
